"""Connections and counters of the programs: expired and stale connections, and totals for metrics.

The programs count in per-CPU maps: `counters` by event, `reached` by frontend, `used` by
ServicePort and endpoint. Entries of the last two appear with the first connection.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

from steersman.model.conntrack import Stale
from steersman.model.names import Protocol, ServicePortName
from steersman.model.plan import ServicePlan
from steersman.model.stats import ConnectionStats, NodeTotals, TrafficCounters, frontend_label
from steersman.modes.ebpf import layout, render
from steersman.modes.ebpf.bpf import HashMap, SumMap
from steersman.modes.ebpf.loader import LoadedObject
from steersman.modes.ebpf.sockets import Peer, read_peers, stale_peers
from steersman.modes.ebpf.tables import Tables

# -- Flows -----------------------------------------------------------------------------------------
#
# Flows, the connections of the packet programs (c/flow.h): which have ended, and which are stale.
#
# A connection has two entries in the map `flows`, and four if its source is masqueraded:
#
#     ingress  client > frontend   TO_ENDPOINT    the destination becomes the endpoint
#     egress   client > endpoint   MASQUERADE     the source becomes the node
#     ingress  endpoint > node     TO_CLIENT      the destination becomes the client
#     egress   endpoint > client   FROM_SERVICE   the source becomes the frontend
#
# The packets of the node itself have TO_ENDPOINT at egress, and FROM_SERVICE at ingress.
#
# A packet updates the entry of its own direction only, but keeps the whole connection alive: an
# entry is deleted once it and the one of the opposite direction are too old. The client may reuse
# its port for another connection a moment after one has ended, so each entry is read again just
# before it is deleted.

OPENING, ESTABLISHED, CLOSING, WAITING, FINISHED, REFUSED, ANSWERED, RESET = range(8)
INGRESS, EGRESS = range(2)
TO_ENDPOINT, FROM_SERVICE, MASQUERADE, TO_CLIENT = 1, 2, 3, 4
UDP, _SCTP = Protocol.UDP.number, Protocol.SCTP.number
# Connections that are read again, then deleted in one call: about 0.1 ms.
_AT_ONCE = 16
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


def noted(flows: HashMap) -> Iterator[tuple[bytes, bytes]]:
    """Yield client and key of each flow, for the presence filter (c/presence.h)."""
    for key, value in flows.items():
        source, destination, *_ = layout.FLOW_KEY.unpack(key)
        to_endpoint = layout.flow_kind(value) in (TO_ENDPOINT, MASQUERADE)
        yield source if to_endpoint else destination, key


def find_stale(flows: HashMap, stale: Stale) -> tuple[bytes, ...]:
    """Return the keys of the TO_ENDPOINT entries of stale connections."""
    protocols = stale.protocols
    return tuple(
        key
        for key, value in flows.items()
        if layout.flow_kind(value) == TO_ENDPOINT
        and layout.flow_protocol(key) in protocols
        and FlowEntry.unpack(key, value).is_stale(stale)
    )


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


def count_open(flows: HashMap, timeouts: Timeouts) -> int:
    """Count the connections that have not ended."""
    every, now = dict(flows.items()), time.monotonic_ns()
    return sum(
        layout.flow_kind(value) == TO_ENDPOINT
        and layout.flow_state(value) in (OPENING, ESTABLISHED, FINISHED)
        and not expired_keys(key, every.get, timeouts, now)
        for key, value in every.items()
    )


def expired_keys(key: bytes, find: Find, timeouts: Timeouts, now: int) -> tuple[bytes, ...]:
    """Return the keys of an entry and of its opposite if both are too old; () if not.

    Args:
        key: the entry.
        find: returns the value of a key.
        timeouts: maximum ages.
        now: CLOCK_MONOTONIC, ns.
    """
    value = find(key)
    if not value:
        return ()
    protocol, state = layout.flow_protocol(key), layout.flow_state(value)
    age = _age(value, now)
    limit, half_closed = timeouts.of(protocol, state), timeouts.tcp_half_closed
    # Most entries end here. After a FIN of the other direction the limit may be the shorter one.
    if age <= limit and age <= half_closed:
        return ()
    opposite = _opposite(key, value)
    other = find(opposite)
    # The opposite entry may be evicted, or belong to another connection.
    if not other or _opposite(opposite, other) != key:
        return (key,) if age > limit else ()
    other_limit = timeouts.of(protocol, layout.flow_state(other))
    if FINISHED in (state, layout.flow_state(other)):
        limit = other_limit = half_closed
    return (key, opposite) if age > limit and _age(other, now) > other_limit else ()


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


def collect(flows: HashMap, timeouts: Timeouts) -> Collected:
    """Delete the flows that are too old.

    The list may be a second old when an entry's turn comes, and its connection open again. Every
    packet changes an entry, so only entries that have not changed are deleted.
    """
    # Decide by a list of all entries.
    every = dict(flows.items())
    now = time.monotonic_ns()
    expired: dict[bytes, tuple[bytes, ...]] = {}
    for key in every:
        if key not in expired and (keys := expired_keys(key, every.get, timeouts, now)):
            expired.update(dict.fromkeys(keys, keys))

    # Delete, in batches that are read again just before.
    connections, deleted = list(dict.fromkeys(expired.values())), 0
    for start in range(0, len(connections), _AT_ONCE):
        unchanged = [
            keys
            for keys in connections[start : start + _AT_ONCE]
            if all(flows.get(key) == every[key] for key in keys)
        ]
        deleted += flows.delete_all(key for keys in unchanged for key in keys)
    return Collected(len(every) - deleted, deleted)


# -- Connections and counters ----------------------------------------------------------------------


class FlowTable(NamedTuple):
    """The state of the map `flows` after a pass over it."""

    entries: int = 0
    evicted: int = 0
    """Entries that the kernel has evicted from the full map since it was created."""


class Counts:
    """The maps in which programs count."""

    def __init__(self, maps: Mapping[str, int]) -> None:
        """Open the maps by descriptors; these stay with their owner."""
        self._events = SumMap(maps["counters"])
        self._reached = SumMap(maps["reached"])
        self._used = SumMap(maps["used"])

    def event(self, name: str) -> int:
        """Return how often an event of layout.COUNTERS has happened."""
        return self._events.sum(_event_key(name))

    def add_expired(self, entries: int) -> None:
        """Count deleted flows; no program writes that counter."""
        total = self.event("flows_expired") + entries
        value = total.to_bytes(8, layout.BYTE_ORDER).ljust(self._events.value_size, b"\0")
        self._events.put(_event_key("flows_expired"), value)

    def after_pass(self, entries: int, made: int, before: FlowTable) -> FlowTable:
        """Return the state of the map; entries that are missing have been evicted.

        Args:
            entries: how many are left.
            made: how many had been made when the pass began. It takes long, so it may or may not
                have seen later ones.
            before: the state after the previous pass.
        """
        gone = self.event("flows_ended") + self.event("flows_expired")
        return FlowTable(entries, max(made - gone - entries, before.evicted))

    def delete_unplanned(self, tables: Tables) -> None:
        """Delete the counts of endpoints and frontends that are gone."""
        services, present = tables.services, set(tables.services.numbers.values())
        # By ServicePort, so that its endpoints are read once.
        used: dict[int, set[bytes]] = {}
        for key, _ in self._used.items():
            number, end = layout.MEMBER_KEY.unpack(key)
            used.setdefault(number, set()).add(end)
        for number, ends in used.items():
            kept = set(services.read(number).endpoints()) if number in present else set()
            self._used.delete_all(layout.MEMBER_KEY.pack(number, end) for end in ends - kept)
        gone = [key for key, _ in self._reached.items() if not tables.frontends.map.get(key)]
        self._reached.delete_all(gone)


def _event_key(name: str) -> bytes:
    return layout.number_key(layout.COUNTERS.index(name))


class StaleConnections(NamedTuple):
    """Connections that were stale when the maps were read."""

    peers: tuple[Peer, ...]
    flows: tuple[bytes, ...]
    """Keys of the map `flows`."""

    def __bool__(self) -> bool:
        return bool(self.peers or self.flows)


class Expired(NamedTuple):
    """Result of deleting expired connections."""

    made: int
    """Connections made before the pass."""
    collected: Collected


class Tracking:
    """Connections and counters in the maps of one object."""

    def __init__(self, loaded: LoadedObject, tables: Tables) -> None:
        """Open maps that stay with their owner."""
        self._tables = tables
        self._counts = Counts(loaded.maps)
        self._flows = HashMap(loaded.maps["flows"])
        self._maps = loaded.maps
        self._state = FlowTable()

    def prepare_expiry(self) -> Callable[[], Expired]:
        """Return a function that deletes the expired connections.

        It may take a second if there are many, and has its own descriptor: syncs may run at the
        same time, and the mode may be closed.
        """
        made, copy = self._counts.event("flows_made"), HashMap(os.dup(self._flows.fd))

        def expire() -> Expired:
            try:
                return Expired(made, collect(copy, read_timeouts()))
            finally:
                copy.close()

        return expire

    def note_expired(self, expired: Expired) -> None:
        """Count expired connections, delete counts without owners, and renew the filter."""
        entries, deleted = expired.collected
        self._counts.add_expired(deleted)
        self._state = self._counts.after_pass(entries, expired.made, self._state)
        self._counts.delete_unplanned(self._tables)
        self._tables.presence.renew(lambda: noted(self._flows), entries)

    def trust_filter(self) -> None:
        """Make programs rely on the presence filter: all of them write it now."""
        self._tables.presence.trust(noted(self._flows))

    def prepare_stats(self, plans: Collection[ServicePlan]) -> Callable[[], ConnectionStats]:
        """Return a function that reads the counts by ServicePort, without zeros.

        It has its own descriptors, as that of `prepare_expiry`.
        """
        services = self._tables.services
        reached_map = SumMap(os.dup(self._maps["reached"]))
        used_map = SumMap(os.dup(self._maps["used"]))

        def read() -> ConnectionStats:
            try:
                reached = {key: values[0] for key, values in reached_map.sums()}
                used: dict[int, dict[bytes, tuple[int, ...]]] = {}
                for key, tally in used_map.sums():
                    number, end = layout.MEMBER_KEY.unpack(key)
                    used.setdefault(number, {})[end] = tally
            finally:
                reached_map.close()
                used_map.close()
            # The maps have entries for used endpoints only, often few: visit plans with these.
            frontends: Counter[tuple[ServicePortName, str]] = Counter()
            endpoints: dict[tuple[ServicePortName, str], tuple[int, ...]] = {}
            for plan in plans if used or reached else ():
                name = plan.key.name
                for frontend in plan.frontends if reached else ():
                    if count := reached.get(render.frontend_key(plan, frontend)):
                        frontends[name, frontend_label(frontend)] += count
                number = services.numbers.get(layout.service_name(plan.key)) if used else None
                tallies = used.get(number) if number is not None else None
                for endpoint in plan.reachable if tallies else ():
                    if tallies and (own := tallies.get(layout.pack_endpoint(endpoint))):
                        endpoints[name, str(endpoint)] = own
            return ConnectionStats(
                frontends,
                {name: tally[0] for name, tally in endpoints.items()},
                traffic_by_endpoint={
                    name: TrafficCounters(*tally[1:]) for name, tally in endpoints.items()
                },
            )

        return read

    def totals(self) -> NodeTotals:
        """Return the counts of the whole node."""
        events = {name: self._counts.event(name) for name in layout.COUNTERS}
        return NodeTotals(
            events=events | {"flows_evicted": self._state.evicted},
            tables={"flows": (self._state.entries, self._flows.capacity)},
        )

    def count_open(self) -> int:
        """Count the connections that have not ended."""
        return count_open(self._flows, read_timeouts())

    def find_stale(self, stale: Stale) -> StaleConnections:
        """Find stale connections."""
        peers = tuple(stale_peers(read_peers(self._maps), stale))
        return StaleConnections(peers, find_stale(self._flows, stale))

    def delete_stale(
        self, found: StaleConnections, stale: Stale
    ) -> tuple[int, set[tuple[int, bytes]]]:
        """Delete connections that are still stale; return their number, and sockets to destroy."""
        sockets = {(peer.cookie, peer.endpoint) for peer in stale_peers(found.peers, stale)}
        removed = delete_stale(self._flows, found.flows, stale)
        self._counts.add_expired(removed.entries)
        return removed.connections, sockets
