"""List the tracked connections of Services: who connects, to which endpoint, in which state.

The kernel sends its whole table, about 1 us for each entry here; it selects by protocol only.
Other entries are skipped as they stream in. Everything blocks: call it in a thread.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple

from steersman.host.netlink import NETLINK_NETFILTER, DumpInterruptedError, Netlink
from steersman.host.nlmsg import Request, attributes
from steersman.model.names import PROTOCOL_BY_NUMBER, Family, Protocol
from steersman.model.tracing import TrackedConnection, WatchedFlow
from steersman.netfilter.conntrack.wire import (
    AF_NUMBERS,
    CT_GET,
    CTA_PROTOINFO,
    CTA_STATUS,
    CTA_TIMEOUT,
    CTA_TUPLE_ORIG,
    CTA_TUPLE_REPLY,
    SEEN_REPLY,
    list_request,
    parse_tuple,
)

_PROTOINFO_TCP, _PROTOINFO_TCP_STATE = 1, 1
_TCP_STATES = {
    **{1: "SYN_SENT", 2: "SYN_RECV", 3: "ESTABLISHED", 4: "FIN_WAIT", 5: "CLOSE_WAIT"},
    **{6: "LAST_ACK", 7: "TIME_WAIT", 8: "CLOSE", 9: "SYN_SENT2"},
}


class Tracked(NamedTuple):
    """A tracked connection, or a flow of datagrams."""

    protocol: Protocol
    client: str
    """Address of who opened it."""
    client_port: int
    address: str
    """The destination that the client used."""
    port: int
    endpoint: str
    """Address that answers: the endpoint, if the destination was translated."""
    endpoint_port: int
    seen_source: str
    """The client that the endpoint sees: this node if the connection is masqueraded."""
    seen_port: int
    answered: bool
    """Whether a packet came back."""
    state: str = ""
    """State of TCP, such as ESTABLISHED; "" for others."""
    seconds_left: int = 0
    """Until the entry is removed, if no packet comes."""


def tracked(family: Family, addresses: Collection[tuple[str, int]]) -> list[Tracked]:
    """Return the tracked connections to some destinations, as clients named them.

    Args:
        family: the address family.
        addresses: canonical address and port; the address is "" for a port at any address.

    Raises:
        OSError: the table cannot be listed (CAP_NET_ADMIN is missing).
    """
    wanted, found = frozenset(addresses), []
    request = Request(CT_GET, bytes((AF_NUMBERS[family], 0, 0, 0)))
    with Netlink(NETLINK_NETFILTER) as netlink:
        try:
            for reply in netlink.dump(request):
                entry = parse_entry(reply.payload)
                if entry and not wanted.isdisjoint(((entry.address, entry.port), ("", entry.port))):
                    found.append(entry)
        except DumpInterruptedError:
            pass  # the table changed while it was listed: most of it was seen
    return found


def parse_entry(payload: bytes) -> Tracked | None:
    """Decode an entry; None if it has no ports (ICMP)."""
    values = attributes(payload, 4)
    original, reply = (parse_tuple(values.get(k, b"")) for k in (CTA_TUPLE_ORIG, CTA_TUPLE_REPLY))
    protocol = PROTOCOL_BY_NUMBER.get(original[0]) if original else None
    if original is None or reply is None or protocol is None:
        return None
    tcp = attributes(attributes(values.get(CTA_PROTOINFO, b"")).get(_PROTOINFO_TCP, b""))
    status, left = (int.from_bytes(values.get(k, b""), "big") for k in (CTA_STATUS, CTA_TIMEOUT))
    state = _TCP_STATES.get(next(iter(tcp.get(_PROTOINFO_TCP_STATE, b"")), 0), "")
    return Tracked(protocol, *original[1:], *reply[1:], bool(status & SEEN_REPLY), state, left)


def find_connection(flow: WatchedFlow) -> TrackedConnection | None:
    """Return the entry of a flow with a known client; None if there is none. It blocks.

    Raises:
        OSError: the entries cannot be listed.
    """
    packed = ip_address(flow.destination).packed
    key = bytes((flow.protocol.number,)) + packed + flow.port.to_bytes(2, "big")
    wanted = flow.source, flow.source_port, flow.destination, flow.port
    found: TrackedConnection | None = None
    with Netlink(NETLINK_NETFILTER, buffer=1 << 20) as netlink, suppress(DumpInterruptedError):
        for reply in netlink.dump(list_request(flow.family, key)):
            entry = parse_entry(reply.payload)
            if entry and entry[1:5] == wanted:
                state = "replied" if entry.answered else "unreplied"
                found = TrackedConnection(*wanted, *entry[5:9], state)
    return found
