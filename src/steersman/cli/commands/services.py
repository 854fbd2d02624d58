"""`steersman services`: what this node serves, and where it leads."""

from __future__ import annotations

from steersman.cli.command import Command, Example
from steersman.cli.lists import ARGUMENT, EXIT_CODES, FLAGS, list_answer

COMMAND = Command(
    name="services",
    summary="list Services: frontends, endpoints in and out, connections",
    description="""\
List what this node serves: a row for each port of a Service in each family, with its frontends,
its endpoints in and out, and whether something is wrong; then the Services that are not served.
-o wide adds policies, session affinity, age and the kernel objects of the mode; -o json adds what
happens to each class of clients, every endpoint with the reason why it is in or out, and hints.

Connections are counted from the moment the Service was first served, if the mode of the running
process can count them; --rates and --watch add new connections per second.""",
    arguments=(ARGUMENT,),
    flags=FLAGS,
    examples=(
        Example("steersman services", "all Services"),
        Example("steersman services shop", "the Services of a namespace"),
        Example(
            "steersman services --address 10.96.0.10 -o wide",
            "who has this address?",
        ),
        Example("steersman services --pod shop/web-7d4b9", "which Services use this pod"),
        Example("steersman services -n shop web --watch", "its connections, live"),
    ),
    answer=list_answer("services"),
    watch=True,
    exit_codes=EXIT_CODES,
)
