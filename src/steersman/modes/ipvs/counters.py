"""Counters of virtual and real servers, added up by ServicePort; read at each scrape.

The kernel's counter of a server disappears with the server, and starts at zero with the next one of
that key. So increases since the last scrape are added to totals that never fall. A frontend may be
several virtual servers (a node port on each address), an endpoint a real server of many.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from operator import add
from pathlib import Path
from typing import TypeAlias

from steersman.host.netlink import NETLINK_GENERIC, Netlink
from steersman.model.addresses import family_of, join_host_port
from steersman.model.errors import BusyError
from steersman.model.plan import FrontendKind, ServicePlan
from steersman.model.stats import (
    ConnectionStats,
    NodeTotals,
    StatsKey,
    TrafficCounters,
    frontend_label,
    increase,
)
from steersman.modes.ipvs.backends import busy
from steersman.modes.ipvs.objects import ServerKey, Target
from steersman.modes.ipvs.wire import ServerStats, list_destinations, list_services, resolve

_STATS = Path("/proc/thread-self/net/ip_vs_stats")
STEP = 20
"""Virtual servers in one step: some milliseconds."""
_ZERO = ServerStats(0, 0, 0, 0, 0)

Counted: TypeAlias = tuple[ServerKey, Target | None]
"""A virtual server, or one of its real servers."""


class ServerOwners:
    """The ServicePorts that virtual servers belong to."""

    def __init__(self, plans: Collection[ServicePlan]) -> None:
        """Index the plans that are in force."""
        self._by_address: dict[ServerKey, StatsKey] = {}
        self._by_port: dict[tuple[object, ...], StatsKey] = {}
        self.endpoints: set[StatsKey] = set()
        for plan in plans:
            name, family = plan.key
            self.endpoints.update((name, str(endpoint)) for endpoint in plan.reachable)
            for frontend in plan.frontends:
                port = frontend.port
                if frontend.kind is FrontendKind.NODE_PORT:
                    self._by_port[name.protocol, family, port] = (name, frontend_label(frontend))
                else:
                    key = ServerKey(name.protocol, frontend.address, port)
                    self._by_address[key] = (name, frontend_label(frontend))

    def of(self, key: ServerKey) -> StatsKey | None:
        """Return the ServicePort and frontend of a virtual server; None if it is foreign."""
        by_port = (key.protocol, family_of(key.address), key.port)
        return self._by_address.get(key) or self._by_port.get(by_port)

    @property
    def frontends(self) -> set[StatsKey]:
        """All frontends."""
        return {*self._by_address.values(), *self._by_port.values()}


class MonotonicStats:
    """Totals that never fall for as long as their frontend or endpoint is planned."""

    def __init__(self) -> None:
        """Start at zero."""
        self._last: Mapping[Counted, ServerStats] = {}
        self._frontends: dict[StatsKey, ServerStats] = {}
        self._endpoints: dict[StatsKey, ServerStats] = {}

    def update(
        self, counts: Mapping[Counted, ServerStats], owners: ServerOwners
    ) -> ConnectionStats:
        """Add the increases since the last call; drop keys that are no longer planned."""
        frontends = {name: self._frontends.get(name, _ZERO) for name in owners.frontends}
        endpoints = {name: self._endpoints.get(name, _ZERO) for name in owners.endpoints}
        for counted, now in counts.items():
            key, target = counted
            owner = owners.of(key)
            if owner is None:
                continue
            name = owner if target is None else (owner[0], join_host_port(*target))
            totals = frontends if target is None else endpoints
            if name in totals:
                more = increase(self._last.get(counted, _ZERO), now)
                totals[name] = ServerStats(*map(add, totals[name], more))
        self._last, self._frontends, self._endpoints = counts, frontends, endpoints
        return ConnectionStats(
            {name: stats.connections for name, stats in frontends.items()},
            {name: stats.connections for name, stats in endpoints.items()},
            {name: TrafficCounters(*stats[1:]) for name, stats in frontends.items()},
            {name: TrafficCounters(*stats[1:]) for name, stats in endpoints.items()},
        )


class ServerCounters:
    """Reads the kernel's counters; one scrape at a time."""

    def __init__(self) -> None:
        """Start at zero."""
        self._running = False
        self._totals = MonotonicStats()

    def stats(self, plans: Collection[ServicePlan]) -> Generator[None, None, ConnectionStats]:
        """Return the counts by frontend and endpoint of these plans.

        Counts between the last call and the deletion of a server are missed.

        Raises:
            BusyError: the kernel does not answer.
        """

        while self._running:  # counts would seem to fall
            yield
        self._running = True
        try:
            with busy("the counters of IPVS cannot be read"):
                owners = ServerOwners(plans)
                return self._totals.update((yield from self._read(owners)), owners)
        finally:
            self._running = False

    def _read(self, owners: ServerOwners) -> Generator[None, None, dict[Counted, ServerStats]]:
        counts: dict[Counted, ServerStats] = {}
        with Netlink(NETLINK_GENERIC, buffer=1 << 20) as netlink:
            family = resolve(netlink)
            for number, listed in enumerate(list_services(netlink, family)):
                if number % STEP == 0:
                    yield
                # If a virtual server has counted nothing, none of its real servers has.
                if any(listed.stats) and owners.of(listed.key) is not None:
                    counts[listed.key, None] = listed.stats
                    for target, stats in list_destinations(netlink, family, listed.key):
                        counts[listed.key, target] = stats
        return counts

    def totals(self) -> NodeTotals:
        """Return the kernel's sums over all virtual servers, foreign ones included."""
        try:
            return parse_totals(_STATS.read_text())
        except (OSError, IndexError, ValueError) as error:
            raise BusyError(f"{_STATS} cannot be read: {error}") from error


def parse_totals(text: str) -> NodeTotals:
    """Parse /proc/net/ip_vs_stats: two lines of headings, then the sums in hexadecimal."""
    #    Total Incoming Outgoing         Incoming         Outgoing
    #    Conns  Packets  Packets            Bytes            Bytes
    #       1F       20       30             4000         1FFFFFFF
    lines = text.splitlines()
    connections, *traffic = (int(word, 16) for word in lines[2].split())
    return NodeTotals(connections, TrafficCounters(*traffic))
