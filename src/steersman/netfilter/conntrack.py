"""List, find and delete conntrack entries over ctnetlink; compile/conntrack.py says which.

The kernel filters as far as it can (CTA_FILTER, since 5.8; older kernels ignore the filter and
send every entry). Entries are checked while they stream in, and all of it happens in a thread: so
200,000 entries neither fill memory nor block the event loop.
"""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import cache
from ipaddress import ip_address
from itertools import islice
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from steersman.host.netlink import (
    NETLINK_NETFILTER,
    NETLINK_ROUTE,
    DumpInterruptedError,
    Netlink,
    NetlinkError,
)
from steersman.host.nlmsg import (
    NLA_F_NESTED,
    NLM_F_ACK,
    NLM_F_CREATE,
    Request,
    attr,
    attributes,
    be32,
    nested,
    u8,
    u32,
)
from steersman.host.process import to_thread_to_end
from steersman.host.rtnetlink import get_route, is_local_route
from steersman.host.sysctl import SysctlError, read
from steersman.model.addresses import canonical_ip
from steersman.model.conntrack import Cleanup, Confirm, Stale
from steersman.model.names import PROTOCOL_BY_NUMBER, Family, Protocol
from steersman.model.tracing import TrackedConnection, WatchedFlow

P = ParamSpec("P")
T = TypeVar("T")

# -- Entries of the kernel -------------------------------------------------------------------------

_CT_NEW = 0x100
CT_GET = 0x101
_CT_DELETE = 0x102
_CTA_TUPLE_ORIG, _CTA_TUPLE_REPLY, CTA_STATUS = 1, 2, 3
_CTA_PROTOINFO, CTA_TIMEOUT, _CTA_ID, _CTA_ZONE, _CTA_FILTER, CTA_STATUS_MASK = 4, 7, 12, 18, 25, 26
SEEN_REPLY = 1 << 1  # IPS_SEEN_REPLY
_ASSURED, _CONFIRMED, _SRC_NAT = 1 << 2, 1 << 3, 1 << 4
_CTA_TUPLE_IP, _CTA_TUPLE_PROTO = 1, 2
_CTA_IP_V4_SRC, _CTA_IP_V4_DST, _CTA_IP_V6_SRC, _CTA_IP_V6_DST = 1, 2, 3, 4
_CTA_PROTO_NUM, _CTA_PROTO_SRC_PORT, _CTA_PROTO_DST_PORT = 1, 2, 3
_CTA_FILTER_ORIG_FLAGS = 1
_FILTER_IP_DST, _FILTER_PROTO_NUM, _FILTER_DST_PORT = 1 << 1, 1 << 3, 1 << 5

_AT_ONCE = 256  # changed entries in one datagram
_CHUNK = 4096  # stale entries in memory at a time
_FEW = 4  # destinations that are listed one by one: each costs the kernel a walk of the table


class Usage(NamedTuple):
    """How full the conntrack table is."""

    entries: int
    maximum: int


def usage(root: Path = Path("/")) -> Usage:
    """Return how full the conntrack table is.

    Raises:
        SysctlError: conntrack is not in use.
    """
    directory = "proc/sys/net/netfilter/nf_conntrack_"
    return Usage(read(f"{directory}count", root), read(f"{directory}max", root))


async def delete_stale(stale: Stale, confirm: Confirm | None = None) -> Cleanup:
    """Delete the stale entries of a family.

    Args:
        stale: tells which entries these are.
        confirm: computes the stale entries again after the listing; None if they cannot change.

    Raises:
        OSError: the entries cannot be listed; some may have been deleted.
    """
    if not stale:
        return Cleanup(0, 0, complete=True)
    deleted = failed = 0
    seconds = 0.0
    try:
        with (
            Netlink(NETLINK_NETFILTER) as listing,
            Netlink(NETLINK_NETFILTER) as deleting,
            Netlink(NETLINK_ROUTE) as routes,
        ):
            search = _Search(listing, routes, stale)
            while True:
                found, took = await to_thread_to_end(_timed, search.chunk)
                seconds += took
                if not found:
                    break
                if confirm is not None:
                    fresh = await confirm()
                    found = [p for p in found if fresh.contains(*entry_keys(p, search.layout))]
                done, took = await to_thread_to_end(_timed, delete_entries, deleting, found)
                deleted, failed, seconds = deleted + done[0], failed + done[1], seconds + took
    except OSError:
        try:
            usage()
        except SysctlError:  # this kernel tracks no connections: in ebpf mode it need not
            return Cleanup(0, 0, complete=True)
        raise
    return Cleanup(deleted, failed, search.complete, seconds)


def _timed(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """Return a result, and the CPU seconds that it took this thread."""
    began = time.thread_time()
    result = call(*args, **kwargs)
    return result, time.thread_time() - began


def find_stale(stale: Stale, most: int = 20) -> list[tuple[bytes, bytes]]:
    """Return destination and source of the first stale entries, packed; delete none. It blocks.

    Raises:
        OSError: the entries cannot be listed.
    """
    if not stale:
        return []
    with Netlink(NETLINK_NETFILTER) as listing, Netlink(NETLINK_ROUTE) as routes:
        search = _Search(listing, routes, stale)
        return [entry_keys(payload, search.layout) for payload in search.chunk()[:most]]


class _Search:
    """The stale entries of a family, a chunk at a time. Its methods block.

    A node port is only at addresses of this node: a connection to the same port of another host
    is foreign.
    """

    def __init__(self, listing: Netlink, routes: Netlink, stale: Stale) -> None:
        self.complete = True
        self.layout = LAYOUTS[stale.family]
        self._found = self._find(listing, routes, stale)

    def chunk(self) -> list[bytes]:
        """Return the payloads of the next stale entries; [] at the end."""
        return list(islice(self._found, _CHUNK))

    def _find(self, listing: Netlink, routes: Netlink, stale: Stale) -> Iterator[bytes]:
        layout, contains = self.layout, stale.contains

        @cache
        def is_local(address: bytes) -> bool:
            try:
                return all(map(is_local_route, routes.request(get_route(address))))
            except NetlinkError:  # no route
                return False

        # The requests together cover every entry that can be stale.
        keys = [*stale.by_address, *stale.by_node_port]
        if len(keys) > _FEW:
            keys = [bytes((protocol,)) for protocol in stale.protocols]
        for key in keys:
            try:
                for reply in listing.dump(_listing(stale.family, key)):
                    destination, source = entry_keys(reply.payload, layout)
                    if contains(destination, source) and (
                        destination in stale.by_address or is_local(destination[1:-2])
                    ):
                        yield reply.payload
            except DumpInterruptedError:  # the entries seen are enough for now (behaviour 12)
                self.complete = False


def delete_entries(netlink: Netlink, payloads: list[bytes]) -> tuple[int, int]:
    """Delete entries; return how many were deleted, and how many the kernel refused to delete.

    An entry that no longer exists counts as neither.
    """
    deleted = failed = 0
    for first in range(0, len(payloads), _AT_ONCE):
        requests = []
        for payload in payloads[first : first + _AT_ONCE]:
            # With its id exactly the entry that was seen goes, not a newer one of the same tuple.
            values = attributes(payload, 4)
            body = attr(_CTA_TUPLE_ORIG | NLA_F_NESTED, values[_CTA_TUPLE_ORIG])
            body += b"".join(attr(k, values[k]) for k in (_CTA_ZONE, _CTA_ID) if k in values)
            requests.append(Request(_CT_DELETE, payload[:4] + body, NLM_F_ACK))
        refused = netlink.batch(requests)
        gone = sum(error.errno == errno.ENOENT for error in refused.values())
        deleted += len(requests) - len(refused)
        failed += len(refused) - gone
    return deleted, failed


# Messages


def _listing(family: Family, key: bytes) -> Request:
    """Return a request for the entries of a key: a protocol, then an address and a port if given.

    Kernels up to at least 6.18 select the wrong entries by an IPv6 address (their comparison is
    inverted), so for IPv6 the port must be enough.
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
        CT_GET,
        bytes((AF_NUMBERS[family], 0, 0, 0))
        + nested(
            _CTA_TUPLE_ORIG,
            nested(_CTA_TUPLE_IP, ip) if ip else b"",
            nested(_CTA_TUPLE_PROTO, u8(_CTA_PROTO_NUM, key[0]), proto),
        )
        + nested(_CTA_FILTER, u32(_CTA_FILTER_ORIG_FLAGS, flags)),
    )


# The payload of an entry of TCP, UDP or SCTP, as every known kernel writes it. Each bracket is an
# attribute with a header of 4 bytes:
#
#     nfgenmsg [ORIG [IP [source] [destination]] [PROTO [number] [source port] [destination port]]]
#              [REPLY ...the same...] ...
#
# With both tuple headers as expected, fixed offsets are several times as fast as parsing.


class Layout(NamedTuple):
    """Offsets in the payload for one size of addresses."""

    orig: bytes
    """Expected header of the first tuple."""
    reply: bytes
    """Expected header of the second tuple."""
    reply_at: int
    protocol: slice
    destination: slice
    destination_port: slice
    source: slice
    source_port: slice


def _layout(size: int) -> Layout:
    """Return the layout for addresses of `size` bytes."""
    tuple_size = 4 + (4 + 2 * (4 + size)) + (4 + 3 * 8)
    reply = 4 + tuple_size

    def at(offset: int, length: int) -> slice:
        return slice(offset, offset + length)

    number = 2 * size + 24  # from the start of a tuple to its protocol number; then the ports
    return Layout(
        struct.pack("=HH", tuple_size, _CTA_TUPLE_ORIG | NLA_F_NESTED),
        struct.pack("=HH", tuple_size, _CTA_TUPLE_REPLY | NLA_F_NESTED),
        reply,
        protocol=at(4 + number, 1),
        destination=at(4 + size + 16, size),
        destination_port=at(4 + number + 16, 2),
        source=at(reply + 12, size),
        source_port=at(reply + number + 8, 2),
    )


LAYOUTS = {Family.IPV4: _layout(4), Family.IPV6: _layout(16)}
AF_NUMBERS = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}


def entry_keys(payload: bytes, layout: Layout) -> tuple[bytes, bytes]:
    """Return destination and source as `model.conntrack.Stale` packs them.

    Both are b"" for an entry without ports.
    """
    at = layout.reply_at
    if payload[4:8] != layout.orig or payload[at : at + 4] != layout.reply:
        return _parsed_keys(payload)
    return (
        payload[layout.protocol] + payload[layout.destination] + payload[layout.destination_port],
        payload[layout.source] + payload[layout.source_port],
    )


def _parsed_keys(payload: bytes) -> tuple[bytes, bytes]:
    """Return the same from an entry of any layout: of ICMP, in a zone, of a future kernel."""
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


# One connection


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
        for reply in netlink.dump(_listing(flow.family, key)):
            entry = parse_entry(reply.payload)
            if entry and entry[1:5] == wanted:
                state = "replied" if entry.answered else "unreplied"
                found = TrackedConnection(*wanted, *entry[5:9], state)
    return found


def _tuple(data: bytes) -> tuple[int, str, int, str, int] | None:
    """Return protocol, source and destination of a tuple with ports."""
    parts = attributes(data)
    ip, proto = (attributes(parts.get(k, b"")) for k in (_CTA_TUPLE_IP, _CTA_TUPLE_PROTO))
    source = ip.get(_CTA_IP_V4_SRC) or ip.get(_CTA_IP_V6_SRC)
    destination = ip.get(_CTA_IP_V4_DST) or ip.get(_CTA_IP_V6_DST)
    if not source or not destination or _CTA_PROTO_DST_PORT not in proto:
        return None
    return (
        int.from_bytes(proto.get(_CTA_PROTO_NUM, b""), "big"),
        _address(source),
        int.from_bytes(proto.get(_CTA_PROTO_SRC_PORT, b""), "big"),
        _address(destination),
        int.from_bytes(proto[_CTA_PROTO_DST_PORT], "big"),
    )


def _address(packed: bytes) -> str:
    text = str(ip_address(packed))
    return canonical_ip(text) or text  # an IPv4 address in one of IPv6 is not canonical


# -- Lists for people ------------------------------------------------------------------------------
#
# List the tracked connections of Services: who connects, to which endpoint, in which state.
#
# The kernel sends its whole table, about 1 us for each entry here; it selects by protocol only.
# Other entries are skipped as they stream in. It blocks: call it in a thread.

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
    original, reply = (_tuple(values.get(k, b"")) for k in (_CTA_TUPLE_ORIG, _CTA_TUPLE_REPLY))
    protocol = PROTOCOL_BY_NUMBER.get(original[0]) if original else None
    if original is None or reply is None or protocol is None:
        return None
    tcp = attributes(attributes(values.get(_CTA_PROTOINFO, b"")).get(_PROTOINFO_TCP, b""))
    status, left = (int.from_bytes(values.get(k, b""), "big") for k in (CTA_STATUS, CTA_TIMEOUT))
    state = _TCP_STATES.get(next(iter(tcp.get(_PROTOINFO_TCP_STATE, b"")), 0), "")
    return Tracked(protocol, *original[1:], *reply[1:], bool(status & SEEN_REPLY), state, left)


# -- Ports of masqueraded connections --------------------------------------------------------------
#
# An endpoint sees a masqueraded connection come from a port of this node. netfilter chooses a port
# that no entry has towards the same endpoint. If another program masquerades, too, each has to know
# the ports of the other: two connections with the same addresses and ports break each other.

_IPV4_END = 6  # bytes of an address and a port


def masqueraded(netlink: Netlink) -> Iterator[Tracked]:
    """Yield the connections to Services that netfilter masquerades and that have not ended.

    Args:
        netlink: a socket in the network namespace of the entries.

    Raises:
        OSError: the entries cannot be listed.
    """
    masquerade = be32(CTA_STATUS, _SRC_NAT) + be32(CTA_STATUS_MASK, _SRC_NAT)
    with suppress(DumpInterruptedError):  # most of them were seen
        for reply in netlink.dump(Request(CT_GET, bytes(4) + masquerade)):
            layout = LAYOUTS[Family.IPV4 if reply.payload[0] == socket.AF_INET else Family.IPV6]
            destination, endpoint = entry_keys(reply.payload, layout)
            # Most leave the cluster. (IPVS does not set IPS_DST_NAT, so addresses must tell.)
            if destination[1:] == endpoint:
                continue
            entry = parse_entry(reply.payload)
            ended = entry is None or entry.state in ("TIME_WAIT", "CLOSE")
            if entry and not ended and entry[1:3] != entry[7:9]:  # client and seen source
                yield entry


def hold_ports(
    netlink: Netlink, connections: Iterable[tuple[int, bytes, bytes]], seconds: int
) -> None:
    """Keep netfilter from choosing ports of connections that it does not masquerade itself.

    Each gets an entry that no packet uses; call it again to prolong it.

    Args:
        netlink: a socket in the network namespace of the entries.
        connections: protocol number, and the packed address and port of the node and of the
            endpoint.
        seconds: how long it lasts.

    Raises:
        OSError: the kernel tracks no connections, or permission is missing.
    """
    # A full table drops entries that are not assured.
    status = be32(CTA_STATUS, SEEN_REPLY | _ASSURED | _CONFIRMED)
    requests = []
    for protocol, node, endpoint in connections:
        family = Family.IPV4 if len(node) == _IPV4_END else Family.IPV6
        body = _pack_tuple(_CTA_TUPLE_ORIG, family, protocol, node, endpoint)
        body += _pack_tuple(_CTA_TUPLE_REPLY, family, protocol, endpoint, node)
        body += be32(CTA_TIMEOUT, seconds) + status
        header = bytes((AF_NUMBERS[family], 0, 0, 0))
        requests.append(Request(_CT_NEW, header + body, NLM_F_CREATE | NLM_F_ACK))
    for first in range(0, len(requests), _AT_ONCE):
        for error in netlink.batch(requests[first : first + _AT_ONCE]).values():
            # Another entry has the port already: it is as good.
            if error.errno != errno.EEXIST:
                raise error


def _pack_tuple(
    kind: int, family: Family, protocol: int, source: bytes, destination: bytes
) -> bytes:
    ipv4 = family is Family.IPV4
    ends = (_CTA_IP_V4_SRC, _CTA_IP_V4_DST) if ipv4 else (_CTA_IP_V6_SRC, _CTA_IP_V6_DST)
    ip = attr(ends[0], source[:-2]) + attr(ends[1], destination[:-2])
    ports = attr(_CTA_PROTO_SRC_PORT, source[-2:]) + attr(_CTA_PROTO_DST_PORT, destination[-2:])
    proto = u8(_CTA_PROTO_NUM, protocol) + ports
    return nested(kind, nested(_CTA_TUPLE_IP, ip), nested(_CTA_TUPLE_PROTO, proto))
