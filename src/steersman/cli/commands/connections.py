"""`steersman connections`: who talks to a Service now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steersman.cli.command import NAMESPACE, Argument, Command, Example, option

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.operate.answer import Answer


async def _answer(parsed: Parsed) -> Answer:
    from steersman.operate.connections import list_connections  # noqa: PLC0415

    values = parsed.values
    return await list_connections(
        parsed.arguments[0],
        str(values.get("namespace") or ""),
        int(str(values.get("limit", 100))),
        ended=bool(values.get("all")),
    )


COMMAND = Command(
    name="connections",
    summary="list who talks to a Service now, and to which endpoint",
    description="""\
List the connections to a Service that go through this node: the client, the address that it used,
the endpoint, and how long nothing was sent (IDLE). Before that, the number of connections by
endpoint; an endpoint that gets no new ones has left the Service, or is not ready.

The running process reads them where its mode keeps them: iptables and nftables in conntrack, ipvs
in its own table, ebpf in its map of flows and at the sockets of this node, userspace in the
process. AGE is known in userspace, and where net.netfilter.nf_conntrack_timestamp is 1. Packets
from a pod on another node are seen there only, unless they come in by a node port of this one.

opening  nobody has answered yet
open     answered; for UDP sockets in ebpf mode nobody knows that
closing  one end has said that it sends no more
ended    over; the entry is kept for a while (--all)""",
    arguments=(
        Argument(
            "SERVICE",
            "NAMESPACE/NAME, with :PORT for one port, or any other name of it.",
            completes="service",
            required=True,
        ),
    ),
    flags=(
        NAMESPACE,
        option(
            "limit", "Connections to list; the counts are of all.", kind="uint32", default="100"
        ),
        option("all", "List those that have ended, too.", kind="bool"),
    ),
    examples=(
        Example("steersman connections shop/web", "who talks to it, and to which pod"),
        Example("steersman connections shop/web:http -o wide", "one port, and what endpoints see"),
        Example("steersman connections shop/web --watch", "does an endpoint drain?"),
    ),
    exit_codes=(
        (0, "They are listed, if there are any."),
        (2, "The Service is not served here, or the process cannot be asked."),
    ),
    answer=_answer,
    takes=frozenset(),
    watch=True,
)
