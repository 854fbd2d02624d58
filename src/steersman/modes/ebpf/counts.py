"""Connections and counters of the programs: expired and stale connections, and totals for metrics.

The programs count in per-CPU maps: `counters` by event, `reached` by frontend, `used` by
ServicePort and endpoint. Entries of the last two appear with the first connection.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Generator
from typing import NamedTuple

from steersman.host.netlink import NETLINK_NETFILTER, Netlink
from steersman.model.connections import ConnectionSearch
from steersman.model.conntrack import Stale
from steersman.model.names import ServicePortName
from steersman.model.plan import ServicePlan
from steersman.model.stats import ConnectionStats, NodeTotals, TrafficCounters, frontend_label
from steersman.modes.ebpf import layout, render
from steersman.modes.ebpf.bpf import HashMap, SumMap
from steersman.modes.ebpf.flows import (
    clients_of,
    collect,
    count_open,
    delete_stale,
    find_connections,
    find_stale,
    read_timeouts,
)
from steersman.modes.ebpf.loader import LoadedObject
from steersman.modes.ebpf.ports import ports_in_use, reserve_ports
from steersman.modes.ebpf.sockets import Peer, read_peers, stale_peers
from steersman.modes.ebpf.sockets import find_connections as find_peers
from steersman.modes.ebpf.tables import Tables
from steersman.netfilter.conntrack.ports import hold_ports

log = logging.getLogger("steersman.ebpf")
_HOLD_SECONDS = 120  # the watcher prolongs it every 30
# Plans that `stats` visits in a step: a millisecond.
_PLANS_AT_ONCE = 256


class StaleConnections(NamedTuple):
    """Connections that were stale when the maps were read."""

    peers: tuple[Peer, ...]
    flows: tuple[bytes, ...]
    """Keys of the map `flows`."""

    def __bool__(self) -> bool:
        return bool(self.peers or self.flows)


class Tracking:
    """Connections and counters in the maps of one object."""

    def __init__(self, loaded: LoadedObject, tables: Tables) -> None:
        """Open maps that stay with their owner."""
        self._tables = tables
        self._flows = HashMap(loaded.maps["flows"])
        self._events = SumMap(loaded.maps["counters"])
        self._reached, self._used = SumMap(loaded.maps["reached"]), SumMap(loaded.maps["used"])
        self._maps = loaded.maps
        self._entries = self._evicted = 0
        """Flows after the last pass, and those that the kernel has evicted from the full map."""

    def expire(self) -> Generator[None, None, None]:
        """Delete expired connections and counts without owners, and renew the filter, in steps."""
        made = self._event("flows_made")
        self._entries, deleted = yield from collect(self._flows, read_timeouts())
        self._add_expired(deleted)
        # Entries that are missing were evicted. The pass takes long, so it may or may not have seen
        # those that were made meanwhile.
        gone = self._event("flows_ended") + self._event("flows_expired")
        self._evicted = max(made - gone - self._entries, self._evicted)
        self._delete_unplanned()
        yield from self._tables.presence.renew(lambda: clients_of(self._flows))

    def _event(self, name: str) -> int:
        """Return how often an event of layout.COUNTERS has happened."""
        return self._events.sum(_event_key(name))

    def _add_expired(self, entries: int) -> None:
        """Count deleted flows; no program writes that counter."""
        total = self._event("flows_expired") + entries
        value = total.to_bytes(8, layout.BYTE_ORDER).ljust(self._events.value_size, b"\0")
        self._events.put(_event_key("flows_expired"), value)

    def _delete_unplanned(self) -> None:
        """Delete the counts of endpoints and frontends that are gone."""
        services = self._tables.services
        present = set(services.numbers.values())
        # By ServicePort, so that its endpoints are read once.
        used: dict[int, set[bytes]] = {}
        for key, _ in self._used.items():
            number, end = layout.MEMBER_KEY.unpack(key)
            used.setdefault(number, set()).add(end)
        for number, ends in used.items():
            kept = set(services.read(number).endpoints()) if number in present else set()
            self._used.delete_all(layout.MEMBER_KEY.pack(number, end) for end in ends - kept)
        frontends = self._tables.frontends.map
        self._reached.delete_all([k for k, _ in self._reached.items() if not frontends.get(k)])

    def trust_filter(self) -> None:
        """Make programs rely on the presence filter: all of them write it now."""
        self._tables.presence.trust(clients_of(self._flows))

    def stats(self, plans: Collection[ServicePlan]) -> Generator[None, None, ConnectionStats]:
        """Return the counts by ServicePort, without zeros, in steps."""
        reached: dict[bytes, int] = {}
        for batch in self._reached.batches():
            reached |= {key: self._reached.total(value)[0] for key, value in batch}
            yield
        used: dict[int, dict[bytes, tuple[int, ...]]] = {}
        for batch in self._used.batches():
            for key, value in batch:
                number, end = layout.MEMBER_KEY.unpack(key)
                used.setdefault(number, {})[end] = self._used.total(value)
            yield
        # The maps have entries for used endpoints only, often few: visit plans with these.
        numbers = self._tables.services.numbers
        frontends: Counter[tuple[ServicePortName, str]] = Counter()
        endpoints: dict[tuple[ServicePortName, str], tuple[int, ...]] = {}
        for place, plan in enumerate(plans if used or reached else ()):
            name = plan.key.name
            for frontend in plan.frontends if reached else ():
                if count := reached.get(render.frontend_key(plan, frontend)):
                    frontends[name, frontend_label(frontend)] += count
            number = numbers.get(layout.service_name(plan.key)) if used else None
            tallies = used.get(number) if number is not None else None
            for endpoint in plan.reachable if tallies else ():
                if tallies and (own := tallies.get(layout.pack_endpoint(endpoint))):
                    endpoints[name, str(endpoint)] = own
            if place % _PLANS_AT_ONCE == 0:
                yield
        return ConnectionStats(
            frontends,
            {name: tally[0] for name, tally in endpoints.items()},
            traffic_by_endpoint={
                name: TrafficCounters(*tally[1:]) for name, tally in endpoints.items()
            },
        )

    def totals(self) -> NodeTotals:
        """Return the counts of the whole node."""
        events = {name: self._event(name) for name in layout.COUNTERS}
        return NodeTotals(
            events=events | {"flows_evicted": self._evicted},
            tables={"flows": (self._entries, self._flows.capacity)},
        )

    def count_open(self) -> Generator[None, None, int]:
        """Count the connections that have not ended, in steps."""
        return count_open(self._flows, read_timeouts())

    def reserve_ports(self) -> None:
        """Keep programs from choosing ports of connections that netfilter masquerades."""
        try:
            with Netlink(NETLINK_NETFILTER) as netlink:
                reserve_ports(self._flows, netlink)
        except OSError as error:  # without conntrack, netfilter masquerades nothing
            log.debug("ebpf: the connections of netfilter cannot be listed: %s", error)

    def hold_ports(self) -> Generator[None, None, None]:
        """Keep netfilter from choosing ports of masqueraded connections, in steps."""
        for batch in self._flows.batches():
            with Netlink(NETLINK_NETFILTER) as netlink:
                hold_ports(netlink, ports_in_use(batch), _HOLD_SECONDS)
            yield

    def find_connections(self, search: ConnectionSearch) -> Generator[None, None, None]:
        """Add the connections that a search wants, in steps."""
        yield from find_connections(self._flows, search, read_timeouts())
        find_peers(self._maps, search)

    def find_stale(self, stale: Stale) -> Generator[None, None, StaleConnections]:
        """Find stale connections, in steps."""
        peers = tuple(stale_peers(read_peers(self._maps), stale))
        yield
        return StaleConnections(peers, tuple((yield from find_stale(self._flows, stale))))

    def delete_stale(
        self, found: StaleConnections, stale: Stale
    ) -> tuple[int, set[tuple[int, bytes]]]:
        """Delete connections that are still stale; return their number, and sockets to destroy."""
        sockets = {(peer.cookie, peer.endpoint) for peer in stale_peers(found.peers, stale)}
        removed = delete_stale(self._flows, found.flows, stale)
        self._add_expired(removed.entries)
        return removed.connections, sockets


def _event_key(name: str) -> bytes:
    return layout.number_key(layout.COUNTERS.index(name))
