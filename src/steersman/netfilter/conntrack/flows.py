"""List the tracked connections of Services: who connects, to which endpoint, in which state.

The kernel sends its whole table, about 1 us for each entry here; it selects by protocol only.
Other entries are skipped as they stream in. Everything blocks: call it in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Mapping
from contextlib import suppress
from typing import NamedTuple

from steersman.host.netlink import NETLINK_NETFILTER, DumpInterruptedError, Netlink
from steersman.host.nlmsg import Request, attributes
from steersman.host.sysctl import SysctlError, read
from steersman.model.addresses import join_host_port
from steersman.model.connections import ConnectionSearch, ConnectionState, OpenConnection
from steersman.model.conntrack import pack_socket
from steersman.model.names import PROTOCOL_BY_NUMBER, Family, Protocol
from steersman.model.tracing import TrackedConnection, WatchedFlow
from steersman.netfilter.conntrack.wire import (
    AF_NUMBERS,
    ASSURED,
    CT_GET,
    CTA_PROTOINFO,
    CTA_STATUS,
    CTA_TIMEOUT,
    CTA_TIMESTAMP,
    CTA_TIMESTAMP_START,
    CTA_TUPLE_ORIG,
    CTA_TUPLE_REPLY,
    SEEN_REPLY,
    entry_keys,
    is_of,
    list_request,
    listed_keys,
    parse_tuple,
)

_PROTOINFO_TCP, _PROTOINFO_TCP_STATE = 1, 1
_TCP_STATES = {
    **{1: "SYN_SENT", 2: "SYN_RECV", 3: "ESTABLISHED", 4: "FIN_WAIT", 5: "CLOSE_WAIT"},
    **{6: "LAST_ACK", 7: "TIME_WAIT", 8: "CLOSE", 9: "SYN_SENT2"},
}
_STATES: Mapping[str, ConnectionState] = {
    **dict.fromkeys(("SYN_SENT", "SYN_RECV", "SYN_SENT2"), ConnectionState.OPENING),
    **dict.fromkeys(("FIN_WAIT", "CLOSE_WAIT", "LAST_ACK"), ConnectionState.CLOSING),
    **dict.fromkeys(("TIME_WAIT", "CLOSE"), ConnectionState.ENDED),
}
_AT_ONCE = 512  # entries in a step: some milliseconds


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
    began: int = 0
    """Seconds since 1970; 0 if net.netfilter.nf_conntrack_timestamp was off."""
    assured: bool = False
    """Whether it has lasted, so that a full table does not evict it."""


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
    stamps = attributes(values.get(CTA_TIMESTAMP, b""))
    began = int.from_bytes(stamps.get(CTA_TIMESTAMP_START, b""), "big") // 1_000_000_000
    answered, assured = bool(status & SEEN_REPLY), bool(status & ASSURED)
    return Tracked(protocol, *original[1:], *reply[1:], answered, state, left, began, assured)


def find_connections(search: ConnectionSearch) -> Generator[None, None, None]:
    """Add the tracked connections that a search wants, in steps.

    Raises:
        OSError: the table cannot be listed.
    """
    limits: dict[str, int | None] = {}
    with Netlink(NETLINK_NETFILTER) as netlink:
        for family in sorted(search.families):
            for key in listed_keys(family, search.keys(family)):
                with suppress(DumpInterruptedError):  # most of it was seen
                    replies = netlink.dump(list_request(family, key))
                    for number, reply in enumerate(replies, 1):
                        destination, source = entry_keys(reply.payload)
                        translated = destination[1:] != source
                        wanted = is_of(key, destination)
                        if wanted and search.wants(destination, translated=translated):
                            search.add(_open_connection(parse_entry(reply.payload), limits))
                        if number % _AT_ONCE == 0:
                            yield


def _open_connection(entry: Tracked | None, limits: dict[str, int | None]) -> OpenConnection:
    """Return an entry as the connection that it is.

    Args:
        entry: of conntrack.
        limits: timeouts of the kernel that were read already, by the name of their setting.
    """
    assert entry is not None  # it has ports, or no search wants it
    client = join_host_port(entry.client, entry.client_port)
    frontend = join_host_port(entry.address, entry.port)
    endpoint = join_host_port(entry.endpoint, entry.endpoint_port)
    source = join_host_port(entry.seen_source, entry.seen_port)
    answered = ConnectionState.OPEN if entry.answered else ConnectionState.OPENING
    name = _timeout_name(entry)
    if name not in limits:
        try:
            limits[name] = read(f"proc/sys/net/netfilter/nf_conntrack_{name}")
        except SysctlError:  # another kernel, or a state that has no such setting
            limits[name] = None
    limit = limits[name]
    return OpenConnection(
        endpoint=endpoint if endpoint != frontend else "",
        client=client,
        frontend=frontend,
        protocol=entry.protocol.value,
        state=_STATES.get(entry.state, answered),
        source=source if source != client else "",
        age=max(0.0, time.time() - entry.began) if entry.began else None,
        idle=None if limit is None else float(max(0, limit - entry.seconds_left)),
    )


def _timeout_name(entry: Tracked) -> str:
    """Return the setting that limits the time without a packet; "" if it is not known."""
    if entry.protocol is Protocol.TCP:
        return f"tcp_timeout_{entry.state.lower().removesuffix('2')}"
    if entry.protocol is Protocol.UDP:
        return "udp_timeout_stream" if entry.assured else "udp_timeout"
    return ""  # the entry does not tell the state of SCTP


def find_connection(flow: WatchedFlow) -> TrackedConnection | None:
    """Return the entry of a flow with a known client; None if there is none. It blocks.

    Raises:
        OSError: the entries cannot be listed.
    """
    key = bytes((flow.protocol.number,)) + pack_socket(flow.destination, flow.port)
    wanted = flow.source, flow.source_port, flow.destination, flow.port
    found: TrackedConnection | None = None
    with Netlink(NETLINK_NETFILTER, buffer=1 << 20) as netlink, suppress(DumpInterruptedError):
        for reply in netlink.dump(list_request(flow.family, key)):
            entry = parse_entry(reply.payload)
            if entry and entry[1:5] == wanted:
                state = "replied" if entry.answered else "unreplied"
                found = TrackedConnection(*wanted, *entry[5:9], state)
    return found
