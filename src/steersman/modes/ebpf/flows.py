"""Flows, the connections of the packet programs (c/flow.h): which have ended, and which are stale.

A connection has two entries in the map `flows`, and four if its source is masqueraded:

    ingress  client > frontend   TO_ENDPOINT    the destination becomes the endpoint
    egress   client > endpoint   MASQUERADE     the source becomes the node
    ingress  endpoint > node     TO_CLIENT      the destination becomes the client
    egress   endpoint > client   FROM_SERVICE   the source becomes the frontend

The packets of the node itself have TO_ENDPOINT at egress, and FROM_SERVICE at ingress.

A packet updates the entry of its own direction only, but keeps the whole connection alive: an
entry is deleted once it and the one of the opposite direction are too old. The client may reuse
its port for another connection a moment after one has ended, so each entry is read again just
before it is deleted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from steersman.model.connections import ConnectionSearch, ConnectionState, OpenConnection
from steersman.model.conntrack import Stale
from steersman.model.names import PROTOCOL_BY_NUMBER, Protocol
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.bpf import HashMap

OPENING, ESTABLISHED, CLOSING, WAITING, FINISHED, REFUSED, ANSWERED, RESET = range(8)
INGRESS, EGRESS = range(2)
TO_ENDPOINT, FROM_SERVICE, MASQUERADE, TO_CLIENT = 1, 2, 3, 4
UDP, _SCTP = Protocol.UDP.number, Protocol.SCTP.number
_PROC = Path("/proc/sys/net/netfilter")

Find: TypeAlias = Callable[[bytes], bytes | None]
"""Returns the value of a key; None if there is no entry."""


class Timeouts(NamedTuple):
    """Seconds without a packet after which a connection has ended, as in nf_conntrack."""

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
        """Return the timeout of a flow."""
        if protocol == UDP:
            return self.udp_stream if state == ESTABLISHED else self.udp
        if protocol == _SCTP:
            if state in (CLOSING, RESET):
                return self.sctp_closing
            return self.sctp_established if state == ESTABLISHED else self.sctp_opening
        if state in (CLOSING, RESET):
            return self.tcp_closing
        if state == FINISHED:
            return self.tcp_half_closed
        return self.tcp_established if state == ESTABLISHED else self.tcp_opening


# Sysctl of each timeout, in the order of Timeouts.
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


def read_timeouts(proc: Path = _PROC) -> Timeouts:
    """Return the timeouts of this node; the defaults if netfilter is not loaded."""
    found = []
    for name, default in zip(_SYSCTLS, Timeouts(), strict=True):
        try:
            found.append(int((proc / name).read_text()))
        except (OSError, ValueError):
            found.append(default)
    return Timeouts(*found)


class FlowEntry(NamedTuple):
    """An entry of the map `flows`; ends are packed endpoints."""

    source: bytes
    destination: bytes
    protocol: int
    hook: int
    rewritten: bytes
    """The end that replaces the source or the destination."""
    kind: int

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> FlowEntry:
        """Take an entry apart."""
        source, destination, source_port, destination_port, protocol, hook = layout.FLOW_KEY.unpack(
            key
        )
        address, _, port, kind, _, _ = layout.FLOW.unpack(value)
        ends = source + source_port, destination + destination_port
        return cls(*ends, protocol, hook, address + port, kind)

    def is_stale(self, stale: Stale) -> bool:
        """Whether a TO_ENDPOINT entry leads to an endpoint that its Service no longer has."""
        frontend = bytes((self.protocol,)) + layout.without_prefix(self.destination)
        return stale.contains(frontend, layout.without_prefix(self.rewritten))


class Removed(NamedTuple):
    """Counts of deleted connections."""

    connections: int
    entries: int
    """A connection has two or four."""


class Collected(NamedTuple):
    """Counts of a pass over all flows."""

    entries: int
    """Entries that are left."""
    expired: int


def clients_of(flows: HashMap) -> Iterator[bytes]:
    """Yield the packed address of each flow's client, for the presence filter (c/presence.h)."""
    for key, value in flows.items():
        source, destination, *_ = layout.FLOW_KEY.unpack(key)
        to_endpoint = layout.flow_kind(value) in (TO_ENDPOINT, MASQUERADE)
        yield source if to_endpoint else destination


def find_stale(flows: HashMap, stale: Stale) -> Generator[None, None, list[bytes]]:
    """Return the keys of the TO_ENDPOINT entries of stale connections, in steps."""
    protocols, found = stale.protocols, []
    for batch in flows.batches():
        found += [
            key
            for key, value in batch
            if layout.flow_kind(value) == TO_ENDPOINT
            and layout.flow_protocol(key) in protocols
            and FlowEntry.unpack(key, value).is_stale(stale)
        ]
        yield
    return found


def delete_stale(flows: HashMap, found: Iterable[bytes], stale: Stale) -> Removed:
    """Delete all entries of those connections that are still stale.

    Args:
        flows: the map.
        found: keys that `find_stale` has returned.
        stale: endpoints that Services no longer have, as of now.
    """
    now = ((key, FlowEntry.unpack(key, value)) for key in found if (value := flows.get(key)))
    doomed = [(key, flow) for key, flow in now if flow.kind == TO_ENDPOINT and flow.is_stale(stale)]
    keys = [each for key, flow in doomed for each in connection_keys(flows, key, flow)]
    return Removed(len(doomed), flows.delete_all(keys))


def connection_keys(flows: HashMap, key: bytes, flow: FlowEntry) -> list[bytes]:
    """Return the keys of all entries of a connection, given that of TO_ENDPOINT."""
    client, endpoint, protocol = flow.source, flow.rewritten, flow.protocol
    # The entry of answers, and the two of masquerading, if there are any.
    answers_at = EGRESS if flow.hook == INGRESS else INGRESS
    keys = [key, layout.flow_key(endpoint, client, protocol, answers_at)]
    masqueraded = layout.flow_key(client, endpoint, protocol, EGRESS)
    if value := flows.get(masqueraded):
        node = FlowEntry.unpack(masqueraded, value).rewritten
        keys += [masqueraded, layout.flow_key(endpoint, node, protocol, INGRESS)]
    return keys


def delete_unanswered(flows: HashMap, endpoints: Collection[tuple[int, bytes]]) -> Removed:
    """Delete connections that endpoints have not answered, so that the next packet begins again.

    Args:
        flows: the map.
        endpoints: protocol number and packed endpoint of each.
    """
    keys, connections = [], 0
    for back, value in flows.items():
        if layout.flow_kind(value) != FROM_SERVICE or layout.flow_state(value) != OPENING:
            continue
        answers = FlowEntry.unpack(back, value)
        if (answers.protocol, answers.source) in endpoints:
            key = _opposite(back, value)
            if there := flows.get(key):
                keys += connection_keys(flows, key, FlowEntry.unpack(key, there))
                connections += 1
    return Removed(connections, flows.delete_all(keys))


def count_open(flows: HashMap, timeouts: Timeouts) -> Generator[None, None, int]:
    """Count the connections that have not ended, in steps."""
    count = 0
    for batch in flows.batches():
        now = time.monotonic_ns()
        count += sum(
            layout.flow_kind(value) == TO_ENDPOINT
            and layout.flow_state(value) in (OPENING, ESTABLISHED, FINISHED)
            and not expired_entries(key, value, flows.get, timeouts, now)
            for key, value in batch
        )
        yield
    return count


def find_connections(
    flows: HashMap, search: ConnectionSearch, timeouts: Timeouts
) -> Generator[None, None, None]:
    """Add the connections whose packets are rewritten, in steps."""
    for batch in flows.batches():
        now = time.monotonic_ns()
        for key, value in batch:
            if layout.flow_kind(value) != TO_ENDPOINT:
                continue
            flow = FlowEntry.unpack(key, value)
            frontend = bytes((flow.protocol,)) + layout.without_prefix(flow.destination)
            if search.wants(frontend) and not expired_entries(key, value, flows.get, timeouts, now):
                search.add(_open_connection(flows, key, value, now))
        yield


def _open_connection(flows: HashMap, key: bytes, value: bytes, now: int) -> OpenConnection:
    """Return a TO_ENDPOINT entry, and those that belong to it, as a connection."""
    flow = FlowEntry.unpack(key, value)
    states, ages = {layout.flow_state(value)}, [_age(value, now)]
    if answers := flows.get(_opposite(key, value)):
        states.add(layout.flow_state(answers))
        ages.append(_age(answers, now))
    if states & {CLOSING, RESET, REFUSED}:
        state = ConnectionState.ENDED
    elif FINISHED in states:
        state = ConnectionState.CLOSING
    elif ESTABLISHED in states:
        state = ConnectionState.OPEN
    else:
        state = ConnectionState.OPENING
    source = flows.get(layout.flow_key(flow.source, flow.rewritten, flow.protocol, EGRESS))
    return OpenConnection(
        endpoint=layout.print_endpoint(flow.rewritten),
        client=layout.print_endpoint(flow.source),
        frontend=layout.print_endpoint(flow.destination),
        protocol=PROTOCOL_BY_NUMBER[flow.protocol].value,
        state=state,
        source=layout.print_endpoint(FlowEntry.unpack(key, source).rewritten) if source else "",
        idle=min(ages),
    )


def expired_entries(
    key: bytes, value: bytes, find: Find, timeouts: Timeouts, now: int
) -> dict[bytes, bytes]:
    """Return an entry and its opposite if both are too old; nothing if not.

    Args:
        key: of the entry.
        value: of the entry.
        find: returns the value of a key.
        timeouts: maximum ages.
        now: CLOCK_MONOTONIC, ns.
    """
    protocol, state = layout.flow_protocol(key), layout.flow_state(value)
    age = _age(value, now)
    limit, half_closed = timeouts.of(protocol, state), timeouts.tcp_half_closed
    # Most entries end here. After a FIN of the other direction the limit may be the shorter one.
    if age <= limit and age <= half_closed:
        return {}
    opposite = _opposite(key, value)
    other = find(opposite)
    # The opposite entry may be evicted, or belong to another connection.
    if not other or _opposite(opposite, other) != key:
        return {key: value} if age > limit else {}
    other_limit = timeouts.of(protocol, layout.flow_state(other))
    if FINISHED in (state, layout.flow_state(other)):
        limit = other_limit = half_closed
    ended = age > limit and _age(other, now) > other_limit
    return {key: value, opposite: other} if ended else {}


def _age(value: bytes, now: int) -> float:
    """Return the seconds since the last packet in an entry's own direction."""
    last: int = layout.FLOW.unpack(value)[1]
    return (now - last) / 1_000_000_000


def _opposite(key: bytes, value: bytes) -> bytes:
    """Return the key of the entry that rewrites the answers to an entry's packets."""
    source, destination, source_port, destination_port, protocol, hook = layout.FLOW_KEY.unpack(key)
    address, _, port, kind, _, _ = layout.FLOW.unpack(value)
    if kind in (TO_ENDPOINT, TO_CLIENT):
        ends = address, source, port, source_port
    else:
        ends = destination, address, destination_port, port
    return layout.FLOW_KEY.pack(*ends, protocol, EGRESS if hook == INGRESS else INGRESS)


def collect(flows: HashMap, timeouts: Timeouts) -> Generator[None, None, Collected]:
    """Delete the flows that are too old, in steps.

    A connection may be open again since its entries were read. Every packet changes an entry, so
    only entries that have not changed are deleted.
    """
    left = deleted = 0
    for batch in flows.batches():
        now = time.monotonic_ns()
        doomed: dict[bytes, None] = {}
        for key, value in batch:
            if key not in doomed and (
                entries := expired_entries(key, value, flows.get, timeouts, now)
            ):
                unchanged = all(flows.get(each) == old for each, old in entries.items())
                doomed.update(dict.fromkeys(entries if unchanged else ()))
        left += sum(key not in doomed for key, _ in batch)
        deleted += flows.delete_all(doomed)
        yield
    return Collected(left, deleted)
