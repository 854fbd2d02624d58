"""`steersman endpoints`: the endpoints of Services, in or out, and why."""

from __future__ import annotations

from steersman.cli.command import Command, Example
from steersman.cli.lists import ARGUMENT, EXIT_CODES, FLAGS, list_answer

COMMAND = Command(
    name="endpoints",
    summary="list endpoints: in or out and why, connections",
    description="""\
List the endpoints of Services: a row for each endpoint of each port, with its pod and node, whether
clients of this node can be sent there, and why. Notes follow: hints, and what the Service lacks.

Connections are counted from the moment the Service was first served, if the mode of the running
process can count them; --rates and --watch add new connections per second.""",
    arguments=(ARGUMENT,),
    flags=FLAGS,
    examples=(
        Example("steersman endpoints shop/web", "the endpoints of a Service"),
        Example(
            "steersman endpoints --pod 10.244.1.5",
            "does this pod get traffic, and of which Services",
        ),
        Example("steersman endpoints shop/web --watch", "how connections spread, live"),
    ),
    answer=list_answer("endpoints"),
    watch=True,
    exit_codes=EXIT_CODES,
)
