"""Listing and deleting conntrack entries over ctnetlink. Which are stale is decided in compile/.

The kernel filters what it can (CTA_FILTER, since 5.8; before that the filter is ignored and every
entry is looked at here), entries are looked at as they stream in, and all of it happens in a
thread, so that 200,000 entries neither fill memory nor hold up the event loop.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from steersman.host.netlink import (
    NETLINK_NETFILTER,
    NETLINK_ROUTE,
    DumpInterruptedError,
    Netlink,
    NetlinkError,
    Request,
)
from steersman.host.nlmsg import NLM_F_ACK, attr, attributes, nested, u8, u32
from steersman.host.sysctl import SysctlError, read
from steersman.model.conntrack import Cleanup, Confirm, Entry, Stale
from steersman.model.names import Family

_CT_GET = 0x101
_CT_DELETE = 0x102
_CTA_TUPLE_ORIG, _CTA_TUPLE_REPLY, _CTA_ID, _CTA_ZONE, _CTA_FILTER = 1, 2, 12, 18, 25
_CTA_TUPLE_IP, _CTA_TUPLE_PROTO = 1, 2
_CTA_IP_V4_SRC, _CTA_IP_V4_DST, _CTA_IP_V6_SRC, _CTA_IP_V6_DST = 1, 2, 3, 4
_CTA_PROTO_NUM, _CTA_PROTO_SRC_PORT, _CTA_PROTO_DST_PORT = 1, 2, 3
_CTA_FILTER_ORIG_FLAGS = 1
_FILTER_IP_DST, _FILTER_PROTO_NUM, _FILTER_DST_PORT = 1 << 1, 1 << 3, 1 << 5

_RTM_GETROUTE, _RTA_DST, _RTN_LOCAL = 26, 1, 2
_ROUTE_TYPE_AT = 7  # in struct rtmsg

_DELETES = 256  # in one datagram
_AT_ONCE = 4096  # stale entries that are held in memory
_FEW = 4  # destinations that are asked for one by one: each costs the kernel a walk of the table


class Usage(NamedTuple):
    """How full the table is."""

    entries: int
    maximum: int


class _Layout(NamedTuple):
    """Where things are in a payload with plain tuples of ports: as every kernel writes them."""

    orig: bytes
    """Headers of the two tuples, which are checked, and the places of the second."""
    reply: bytes
    reply_at: int
    protocol: slice
    destination: slice
    destination_port: slice
    source: slice
    source_port: slice


def _layout(size: int) -> _Layout:
    """Layout for addresses of `size` bytes: nfgenmsg, then the tuple of each direction."""
    tuple_size = 4 + (4 + 2 * (4 + size)) + (4 + 3 * 8)
    reply = 4 + tuple_size

    def at(offset: int, length: int) -> slice:
        return slice(offset, offset + length)

    number = 2 * size + 24  # from the start of a tuple to its protocol number; then the ports
    return _Layout(
        struct.pack("=HH", tuple_size, _CTA_TUPLE_ORIG | 0x8000),
        struct.pack("=HH", tuple_size, _CTA_TUPLE_REPLY | 0x8000),
        reply,
        protocol=at(4 + number, 1),
        destination=at(4 + size + 16, size),
        destination_port=at(4 + number + 16, 2),
        source=at(reply + 12, size),
        source_port=at(reply + number + 8, 2),
    )


_LAYOUTS = {Family.IPV4: _layout(4), Family.IPV6: _layout(16)}
_FAMILIES = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}


def usage(root: Path = Path("/")) -> Usage:
    """Return how full the table is.

    Raises:
        SysctlError: conntrack is not in use.
    """
    directory = "proc/sys/net/netfilter/nf_conntrack_"
    return Usage(read(f"{directory}count", root), read(f"{directory}max", root))


async def entries(family: Family, protocol: int) -> list[Entry]:
    """List the entries of a protocol.

    Raises:
        OSError: ctnetlink refused or does not exist.
    """
    with Netlink(NETLINK_NETFILTER) as netlink:
        return await asyncio.to_thread(_entries, netlink, family, protocol)


def _entries(netlink: Netlink, family: Family, protocol: int) -> list[Entry]:
    found = []
    for payload in _dump(netlink, _listing(family, bytes((protocol,)))):
        destination, source = _keys(payload, _LAYOUTS[family])
        if destination and destination[0] == protocol:
            found.append(_entry(family, destination, source))
    return found


def _entry(family: Family, destination: bytes, source: bytes) -> Entry:
    number = _FAMILIES[family]
    return Entry(
        destination[0],
        socket.inet_ntop(number, destination[1:-2]),
        int.from_bytes(destination[-2:], "big"),
        socket.inet_ntop(number, source[:-2]),
        int.from_bytes(source[-2:], "big"),
    )


async def delete_stale(stale: Stale, confirm: Confirm | None = None) -> Cleanup:
    """Delete the stale entries of a family.

    Args:
        stale: which they are.
        confirm: what is stale once they are listed; None if that cannot have changed.

    Raises:
        OSError: the entries cannot be listed; some may have been deleted.
    """
    if not stale:
        return Cleanup(0, 0, complete=True)
    try:
        return await _delete_stale(stale, confirm)
    except OSError:
        if _in_use():
            raise
        return Cleanup(0, 0, complete=True)


def _in_use() -> bool:
    """Whether this kernel tracks connections at all: in ebpf mode it need not."""
    try:
        usage()
    except SysctlError:
        return False
    return True


async def _delete_stale(stale: Stale, confirm: Confirm | None) -> Cleanup:
    with (
        Netlink(NETLINK_NETFILTER) as netlink,
        Netlink(NETLINK_NETFILTER) as deleting,
        Netlink(NETLINK_ROUTE) as routes,
    ):
        listing, deleted, failed = _Listing(netlink, _Routes(routes, stale.family), stale), 0, 0
        while found := await asyncio.to_thread(listing.some):
            if confirm is not None:
                fresh = await confirm()
                found = [each for each in found if fresh.contains(*_keys(each, listing.layout))]
            done = await asyncio.to_thread(_delete, deleting, found)
            deleted, failed = deleted + done[0], failed + done[1]
    return Cleanup(deleted, failed, listing.complete)


class _Routes:
    """Which addresses are this node's, as its routing tables say. Blocks."""

    def __init__(self, netlink: Netlink, family: Family) -> None:
        self._netlink = netlink
        self._family = family
        self._known: dict[bytes, bool] = {}

    def ends_here(self, address: bytes) -> bool:
        """Whether packets to an address are for this node."""
        known = self._known.get(address)
        if known is None:
            known = self._known[address] = self._ask(address)
        return known

    def _ask(self, address: bytes) -> bool:
        head = bytes((_FAMILIES[self._family], self._family.bits)) + bytes(10)  # struct rtmsg
        try:
            replies = self._netlink.request(Request(_RTM_GETROUTE, head + attr(_RTA_DST, address)))
        except NetlinkError:  # no route
            return False
        return all(reply.payload[_ROUTE_TYPE_AT] == _RTN_LOCAL for reply in replies)


class _Listing:
    """The stale entries of a family, some at a time. Blocks.

    A node port is one of this node's addresses: what has its number elsewhere is somebody else's.
    """

    def __init__(self, netlink: Netlink, routes: _Routes, stale: Stale) -> None:
        self.complete = True
        self.layout = _LAYOUTS[stale.family]
        self._routes = routes
        self._found = self._find(netlink, stale)

    def some(self) -> list[bytes]:
        """The payloads of the next ones; none at the end."""
        return list(islice(self._found, _AT_ONCE))

    def _find(self, netlink: Netlink, stale: Stale) -> Iterator[bytes]:
        layout, contains = self.layout, stale.contains
        for request in _listings(stale):
            try:
                for reply in netlink.dump(request):
                    destination, source = _keys(reply.payload, layout)
                    if contains(destination, source) and (
                        destination in stale.by_address or self._routes.ends_here(destination[1:-2])
                    ):
                        yield reply.payload
            except DumpInterruptedError:  # what was seen is good enough for now (behaviour 12)
                self.complete = False


def _delete(netlink: Netlink, payloads: list[bytes]) -> tuple[int, int]:
    """Delete entries; how many were, and how many the kernel refused.

    An entry that is gone already is neither.
    """
    deleted = failed = 0
    for first in range(0, len(payloads), _DELETES):
        requests = [_deletion(each) for each in payloads[first : first + _DELETES]]
        refused = netlink.batch(requests)
        gone = sum(error.errno == errno.ENOENT for error in refused.values())
        deleted += len(requests) - len(refused)
        failed += len(refused) - gone
    return deleted, failed


def _deletion(payload: bytes) -> Request:
    """Delete exactly the entry that was seen: a newer one of the same tuple has another id."""
    values = attributes(payload, 4)
    kept = (_CTA_TUPLE_ORIG, _CTA_ZONE, _CTA_ID)
    parts = (
        attr(k | (0x8000 if k == _CTA_TUPLE_ORIG else 0), values[k]) for k in kept if k in values
    )
    return Request(_CT_DELETE, payload[:4] + b"".join(parts), NLM_F_ACK)


def _listings(stale: Stale) -> Iterator[Request]:
    """Listing requests that together cover every entry that can be stale."""
    destinations = (*stale.by_address, *stale.by_node_port)
    keys = destinations if len(destinations) <= _FEW else map(_byte, stale.protocols)
    for key in keys:
        yield _listing(stale.family, key)


def _byte(value: int) -> bytes:
    return bytes((value,))


def _listing(family: Family, key: bytes) -> Request:
    """List the entries of a protocol; with a longer key, of an address too, or of a port only.

    Kernels to 6.18 at least select the wrong entries by an IPv6 address (their comparison is
    the wrong way round): there the port has to do.
    """
    address, port = key[1:-2], key[-2:] if len(key) > 1 else b""
    flags = _FILTER_PROTO_NUM
    ip = proto = b""
    if address and family is Family.IPV4:
        flags |= _FILTER_IP_DST
        ip = attr(_CTA_IP_V4_DST, address)
    if port:
        flags |= _FILTER_DST_PORT
        proto = attr(_CTA_PROTO_DST_PORT, port)
    return Request(
        _CT_GET,
        bytes((_FAMILIES[family], 0, 0, 0))
        + nested(
            _CTA_TUPLE_ORIG,
            nested(_CTA_TUPLE_IP, ip) if ip else b"",
            nested(_CTA_TUPLE_PROTO, u8(_CTA_PROTO_NUM, key[0]), proto),
        )
        + nested(_CTA_FILTER, u32(_CTA_FILTER_ORIG_FLAGS, flags)),
    )


def _dump(netlink: Netlink, request: Request) -> Iterator[bytes]:
    """Payloads of the entries; a list that changed meanwhile is taken as it is."""
    try:
        for reply in netlink.dump(request):
            yield reply.payload
    except DumpInterruptedError:
        return


def _keys(payload: bytes, layout: _Layout) -> tuple[bytes, bytes]:
    """Destination and source as compile/conntrack.py packs them; b"" for what has no ports."""
    at = layout.reply_at
    if payload[4:8] != layout.orig or payload[at : at + 4] != layout.reply:
        return _parsed_keys(payload)
    return (
        payload[layout.protocol] + payload[layout.destination] + payload[layout.destination_port],
        payload[layout.source] + payload[layout.source_port],
    )


def _parsed_keys(payload: bytes) -> tuple[bytes, bytes]:
    """The same from any entry: of ICMP, in a zone, of a kernel to come."""
    values = attributes(payload, 4)
    orig, reply = (
        attributes(values.get(_CTA_TUPLE_ORIG, b"")),
        attributes(values.get(_CTA_TUPLE_REPLY, b"")),
    )
    to, ports = (attributes(orig.get(k, b"")) for k in (_CTA_TUPLE_IP, _CTA_TUPLE_PROTO))
    back, back_ports = (attributes(reply.get(k, b"")) for k in (_CTA_TUPLE_IP, _CTA_TUPLE_PROTO))
    if _CTA_PROTO_DST_PORT not in ports or _CTA_PROTO_SRC_PORT not in back_ports:
        return b"", b""
    destination = to.get(_CTA_IP_V4_DST) or to.get(_CTA_IP_V6_DST, b"")
    source = back.get(_CTA_IP_V4_SRC) or back.get(_CTA_IP_V6_SRC, b"")
    return (
        ports[_CTA_PROTO_NUM] + destination + ports[_CTA_PROTO_DST_PORT],
        source + back_ports[_CTA_PROTO_SRC_PORT],
    )
