"""`steersman services`: what this node serves, and where it leads."""

from __future__ import annotations

from steersman.cli.command import Example
from steersman.cli.lists import list_command

COMMAND = list_command(
    "services",
    "list Services: frontends, endpoints in and out, connections",
    """\
List what this node serves: a row for each port of a Service in each family, with its frontends,
its endpoints in and out, and whether something is wrong; then the Services that are not served.
-o wide adds policies, session affinity, age and the kernel objects of the mode; -o json adds what
happens to each class of clients, every endpoint with the reason why it is in or out, and hints.""",
    Example("steersman services", "all Services"),
    Example("steersman services shop", "the Services of a namespace"),
    Example(
        "steersman services --address 10.96.0.10 -o wide",
        "who has this address?",
    ),
    Example("steersman services --pod shop/web-7d4b9", "which Services use this pod"),
    Example("steersman services -n shop web --watch", "its connections, live"),
)
