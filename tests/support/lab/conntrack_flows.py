"""Conntrack entries made through ctnetlink: flows that never happened."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from steersman.host.netlink import NETLINK_NETFILTER, Netlink
from steersman.host.nlmsg import (
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_EXCL,
    Request,
    attr,
    be16,
    be32,
    nested,
    u8,
)
from steersman.model.names import Family
from steersman.netfilter.conntrack.wire import entry_keys, list_request
from tests.support.stale import Entry

_CT_NEW = 0x100
_BATCH = 500


class FlowEntry(NamedTuple):
    """A flow of a client to a destination, answered by a source."""

    protocol: int
    client: str
    client_port: int
    destination: str
    port: int
    source: str
    source_port: int
    zone: int = 0


def add_entries(flows: Iterable[FlowEntry]) -> None:
    """Put flows into the conntrack table of the caller's namespace."""
    with Netlink(NETLINK_NETFILTER) as netlink:
        batch: list[Request] = []
        for request in map(creation, flows):
            batch.append(request)
            if len(batch) == _BATCH:
                _send(netlink, batch)
                batch = []
        _send(netlink, batch)


def _send(netlink: Netlink, batch: list[Request]) -> None:
    if batch:
        refused = netlink.batch(batch)
        assert not refused, next(iter(refused.values()))


async def entries(family: Family, protocol: int) -> list[Entry]:
    """List the entries of a protocol in the caller's namespace."""
    found = []
    with Netlink(NETLINK_NETFILTER) as netlink:
        for reply in netlink.dump(list_request(family, bytes((protocol,)))):
            destination, source = entry_keys(reply.payload)
            if destination and destination[0] == protocol:
                found.append(unpack_entry(family, destination, source))
    return found


def unpack_entry(family: Family, destination: bytes, source: bytes) -> Entry:
    """Unpack the keys of an entry."""
    number = socket.AF_INET if family is Family.IPV4 else socket.AF_INET6
    return Entry(
        destination[0],
        socket.inet_ntop(number, destination[1:-2]),
        int.from_bytes(destination[-2:], "big"),
        socket.inet_ntop(number, source[:-2]),
        int.from_bytes(source[-2:], "big"),
    )


def creation(flow: FlowEntry) -> Request:
    """The request that creates a flow; its payload is laid out as in the kernel's own messages."""
    there = _tuple(flow.protocol, flow.client, flow.destination, flow.client_port, flow.port)
    back = _tuple(flow.protocol, flow.source, flow.client, flow.source_port, flow.client_port)
    family = socket.AF_INET6 if ":" in flow.client else socket.AF_INET
    state = {
        6: nested(4, nested(1, u8(1, 3))),
        132: nested(4, nested(3, u8(1, 4), be32(2, 1), be32(3, 1))),
    }
    parts = (
        nested(1, *there),
        nested(2, *back),
        be32(3, 0x8),  # confirmed
        be32(7, 600),
        state.get(flow.protocol, b""),
        be16(18, flow.zone) if flow.zone else b"",
    )
    flags = NLM_F_CREATE | NLM_F_EXCL | NLM_F_ACK
    return Request(_CT_NEW, bytes((family, 0, 0, 0)) + b"".join(parts), flags)


def _tuple(protocol: int, source: str, destination: str, sport: int, dport: int) -> Iterator[bytes]:
    v6 = ":" in source
    number = socket.AF_INET6 if v6 else socket.AF_INET
    yield nested(
        1,
        attr(3 if v6 else 1, socket.inet_pton(number, source)),
        attr(4 if v6 else 2, socket.inet_pton(number, destination)),
    )
    yield nested(2, u8(1, protocol), be16(2, sport), be16(3, dport))
