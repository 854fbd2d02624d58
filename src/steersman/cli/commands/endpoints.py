"""`steersman endpoints`: the endpoints of Services, in or out, and why."""

from __future__ import annotations

from steersman.cli.command import Example
from steersman.cli.lists import list_command

COMMAND = list_command(
    "endpoints",
    "list endpoints: in or out and why, connections",
    """\
List the endpoints of Services: a row for each endpoint of each port, with its pod and node, whether
clients of this node can be sent there, and why. Notes follow: hints, and what the Service
lacks.""",
    Example("steersman endpoints shop/web", "the endpoints of a Service"),
    Example(
        "steersman endpoints --pod 10.244.1.5",
        "does this pod get traffic, and of which Services",
    ),
    Example("steersman endpoints shop/web --watch", "how connections spread, live"),
)
