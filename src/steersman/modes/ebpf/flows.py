"""Connections that the packets' programs know (c/flow.h): how old each may get, and who goes.

A packet is noted in the entries of its own way only, but a connection that one way uses is alive:
an entry goes when it and the one of the way back are too old. One that only just ended is another
connection's a moment later: what is deleted is looked at again just before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from steersman.model.conntrack import Stale
from steersman.model.names import Family, Protocol
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.maps import HashMap

OPENING, ESTABLISHED, CLOSING, WAITING, FINISHED = range(5)
INGRESS, EGRESS = range(2)
TO_ENDPOINT, FROM_SERVICE, MASQUERADE, TO_CLIENT = 1, 2, 3, 4
UDP, _SCTP = Protocol.UDP.number, Protocol.SCTP.number
_STATE_AT = layout.OFFSETS["flow"]["state"]
_PROTOCOL_AT, _KIND_AT = layout.OFFSETS["flow_key"]["protocol"], layout.OFFSETS["flow"]["kind"]
_MAPPED = layout.UNSPECIFIED[Family.IPV4][:12]
_PROC = Path("/proc/sys/net/netfilter")

Find: TypeAlias = Callable[[bytes], bytes | None]
"""From the key of an entry to its value; None where there is none."""


class Timeouts(NamedTuple):
    """Seconds without a packet after which a connection is forgotten: those of nf_conntrack."""

    tcp_opening: int = 60
    tcp_established: int = 86400
    tcp_closing: int = 120
    tcp_half_closed: int = 3600
    udp: int = 30
    udp_stream: int = 120
    sctp_opening: int = 3
    sctp_established: int = 210
    sctp_closing: int = 10

    def of(self, protocol: int, state: int) -> int:
        """The timeout of a flow."""
        if protocol == UDP:
            return self.udp_stream if state == ESTABLISHED else self.udp
        if protocol == _SCTP:
            if state == CLOSING:
                return self.sctp_closing
            return self.sctp_established if state == ESTABLISHED else self.sctp_opening
        if state == CLOSING:
            return self.tcp_closing
        if state == FINISHED:
            return self.tcp_half_closed
        return self.tcp_established if state == ESTABLISHED else self.tcp_opening


_SYSCTLS = (
    "nf_conntrack_tcp_timeout_syn_sent",
    "nf_conntrack_tcp_timeout_established",
    "nf_conntrack_tcp_timeout_time_wait",
    "nf_conntrack_tcp_timeout_close_wait",
    "nf_conntrack_udp_timeout",
    "nf_conntrack_udp_timeout_stream",
    "nf_conntrack_sctp_timeout_cookie_wait",
    "nf_conntrack_sctp_timeout_established",
    "nf_conntrack_sctp_timeout_closed",
)
"""Where each timeout is, in the order of Timeouts."""


def read_timeouts(proc: Path = _PROC) -> Timeouts:
    """Timeouts that are in force on this node; the defaults where netfilter is not there."""
    defaults = Timeouts()
    return Timeouts(*(_read(proc / n, d) for n, d in zip(_SYSCTLS, defaults, strict=True)))


def _read(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default


class Removed(NamedTuple):
    """What became of connections that were to go."""

    connections: int
    entries: int
    """How many of the map's; a connection has two or four."""


class Flow(NamedTuple):
    """An entry of the map `flows`."""

    source: bytes
    """Packed address and port, as everywhere here."""
    destination: bytes
    protocol: int
    hook: int
    rewritten: bytes
    """What the source or destination becomes."""
    kind: int

    @classmethod
    def of(cls, key: bytes, value: bytes) -> Flow:
        """Take an entry apart."""
        source, destination, ports, protocol, hook = layout.FLOW_KEY.unpack(key)
        address, _, port, kind, _, _ = layout.FLOW.unpack(value)
        ends = (source + ports[:2], destination + ports[2:])
        return cls(*ends, protocol, hook, address + port, kind)


def _key(source: bytes, destination: bytes, protocol: int, hook: int) -> bytes:
    ports = source[16:] + destination[16:]
    return layout.FLOW_KEY.pack(source[:16], destination[:16], ports, protocol, hook)


def clients(flows: HashMap) -> Iterator[bytes]:
    """Addresses by which the programs mark flows (c/marks.h)."""
    for key, value in flows.items():
        comes = value[_KIND_AT] in (TO_ENDPOINT, MASQUERADE)
        yield key[:16] if comes else key[16:32]


def find_stale(flows: HashMap, stale: Stale) -> tuple[bytes, ...]:
    """Return the keys of the TO_ENDPOINT entries of stale connections."""
    wanted = {(protocol, TO_ENDPOINT) for protocol in stale.protocols}
    return tuple(
        key
        for key, value in flows.items()
        if (key[_PROTOCOL_AT], value[_KIND_AT]) in wanted and is_stale(Flow.of(key, value), stale)
    )


def forget(flows: HashMap, found: Iterable[bytes], stale: Stale) -> Removed:
    """Delete those of the connections found that are stale, all entries of each."""
    now = ((key, Flow.of(key, value)) for key in found if (value := flows.get(key)))
    doomed = [(k, flow) for k, flow in now if flow.kind == TO_ENDPOINT and is_stale(flow, stale)]
    keys = (each for key, flow in doomed for each in (key, *_others(flows, flow)))
    return Removed(len(doomed), flows.delete_all(keys))


def is_stale(flow: Flow, stale: Stale) -> bool:
    """Whether the endpoint of a TO_ENDPOINT entry is one that its Service no longer has."""
    return stale.contains(bytes((flow.protocol,)) + plain(flow.destination), plain(flow.rewritten))


def plain(packed: bytes) -> bytes:
    """Address and port with four bytes for an address of IPv4, as model/conntrack.py has it."""
    return packed[12:] if packed.startswith(_MAPPED) else packed


def _others(flows: HashMap, flow: Flow) -> Iterator[bytes]:
    """The other keys of a connection whose TO_ENDPOINT entry is given."""
    client, endpoint, protocol = flow.source, flow.rewritten, flow.protocol
    yield _key(endpoint, client, protocol, EGRESS if flow.hook == INGRESS else INGRESS)
    key = _key(client, endpoint, protocol, EGRESS)
    value = flows.get(key)
    if value:
        yield key
        yield _key(endpoint, Flow.of(key, value).rewritten, protocol, INGRESS)


def count_open(flows: HashMap, timeouts: Timeouts) -> int:
    """How many connections there are that have not ended."""
    every, now = dict(flows.items()), time.monotonic_ns()
    return sum(
        value[_KIND_AT] == TO_ENDPOINT
        and value[_STATE_AT] in (OPENING, ESTABLISHED, FINISHED)
        and not over(key, every.get, timeouts, now)
        for key, value in every.items()
    )


def over(key: bytes, find: Find, timeouts: Timeouts, now: int) -> tuple[bytes, ...]:
    """Keys of an entry and of that of the way back, where both are too old; () if not.

    Args:
        key: of the entry.
        find: gives the value of a key.
        timeouts: how old each may get.
        now: CLOCK_MONOTONIC, ns.
    """
    value = find(key)
    if not value:
        return ()
    protocol, state, age = key[_PROTOCOL_AT], value[_STATE_AT], _age(value, now)
    limit, half = timeouts.of(protocol, state), timeouts.tcp_half_closed
    if age <= limit and age <= half:
        return ()
    back = _way_back(key, value)
    other = find(back)
    if not other or _way_back(back, other) != key:
        return (key,) if age > limit else ()
    also = timeouts.of(protocol, other[_STATE_AT])
    if FINISHED in (state, other[_STATE_AT]):
        limit = also = half
    return (key, back) if age > limit and _age(other, now) > also else ()


def _age(value: bytes, now: int) -> float:
    """Seconds since the last packet of an entry's own way."""
    last: int = layout.FLOW.unpack(value)[1]
    return (now - last) / 1_000_000_000


def _way_back(key: bytes, value: bytes) -> bytes:
    """The key of the entry by which answers to this one's packets are rewritten."""
    source, destination, ports, protocol, hook = layout.FLOW_KEY.unpack(key)
    address, _, port, kind, _, _ = layout.FLOW.unpack(value)
    if kind in (TO_ENDPOINT, TO_CLIENT):
        ends = address, source, port + ports[:2]
    else:
        ends = destination, address, ports[2:] + port
    return layout.FLOW_KEY.pack(*ends, protocol, EGRESS if hook == INGRESS else INGRESS)


_AT_ONCE = 16
"""Connections between the second look at the first of them and its end: some 0.1 ms."""


class Looked(NamedTuple):
    """What a look at all flows has found."""

    entries: int
    """Those that are left."""
    expired: int


def collect(flows: HashMap, timeouts: Timeouts) -> Looked:
    """Delete the flows that are too old.

    The list is a while old when an entry's turn comes, and its connection may have been opened
    again: only an entry that has not changed since is deleted. With every packet one changes.
    """
    every = dict(flows.items())
    now = time.monotonic_ns()
    pairs: dict[bytes, tuple[bytes, ...]] = {}
    for key in every:
        if key not in pairs and (keys := over(key, every.get, timeouts, now)):
            pairs.update(dict.fromkeys(keys, keys))
    old, gone = list(dict.fromkeys(pairs.values())), 0
    for start in range(0, len(old), _AT_ONCE):
        unchanged = (
            keys
            for keys in old[start : start + _AT_ONCE]
            if all(flows.get(key) == every[key] for key in keys)
        )
        gone += flows.delete_all(key for keys in unchanged for key in keys)
    return Looked(len(every) - gone, gone)
