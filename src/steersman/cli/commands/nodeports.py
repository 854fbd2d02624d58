"""`steersman nodeports`: the ports of this node that Services use."""

from __future__ import annotations

from steersman.cli.command import Example
from steersman.cli.lists import list_command

COMMAND = list_command(
    "nodeports",
    "list node ports: their Services, addresses and endpoints",
    """\
List the node ports and health check node ports of this node by number: whose they are, on which
addresses they answer, and what happens to clients outside.""",
    Example("steersman nodeports", "all node ports"),
    Example("steersman nodeports --port 30080", "which Service has this port?"),
    method="node_ports",
)
