"""`steersman nodeports`: the ports of this node that Services use."""

from __future__ import annotations

from steersman.cli.command import Command, Example
from steersman.cli.lists import ARGUMENT, EXIT_CODES, FLAGS, list_answer

COMMAND = Command(
    name="nodeports",
    summary="list node ports: their Services, addresses and endpoints",
    description="""\
List the node ports and health check node ports of this node by number: whose they are, on which
addresses they answer, and what happens to clients outside.

Connections are counted from the moment the Service was first served, if the mode of the running
process can count them; --rates and --watch add new connections per second.""",
    arguments=(ARGUMENT,),
    flags=FLAGS,
    examples=(
        Example("steersman nodeports", "all node ports"),
        Example("steersman nodeports --port 30080", "which Service has this port?"),
    ),
    answer=list_answer("node_ports"),
    watch=True,
    exit_codes=EXIT_CODES,
)
