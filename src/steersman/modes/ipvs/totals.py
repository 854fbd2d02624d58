"""From counters of virtual and real servers to counts by ServicePort, which never fall. Pure.

The kernel's counters go with the server they are of; what one counts more than last time is added
up. A frontend may be several virtual servers (a node port on each address), and an endpoint a real
server of many.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

from steersman.model.addresses import family_of, join_host_port
from steersman.model.names import ServicePortName
from steersman.model.plan import FrontendKind, ServicePlan
from steersman.model.stats import ConnectionStats, NodeTotals, TrafficCounters, frontend_label
from steersman.modes.ipvs.names import ServerKey, Target
from steersman.modes.ipvs.wire import Stats

Name: TypeAlias = tuple[ServicePortName, str]
Counted: TypeAlias = tuple[ServerKey, Target | None]
"""A virtual server, or a real one of it."""

_NOTHING = Stats(0, 0, 0, 0, 0)


class Owners:
    """Whose virtual servers are whose."""

    def __init__(self, plans: Collection[ServicePlan]) -> None:
        """Take the plans that are in force."""
        self._by_address: dict[ServerKey, Name] = {}
        self._by_port: dict[tuple[object, ...], Name] = {}
        self.endpoints: set[Name] = set()
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

    def of(self, key: ServerKey) -> Name | None:
        """ServicePort and label of the frontend that a virtual server is; None for foreign ones."""
        by_port = (key.protocol, family_of(key.address), key.port)
        return self._by_address.get(key) or self._by_port.get(by_port)

    @property
    def frontends(self) -> set[Name]:
        """All there are."""
        return {*self._by_address.values(), *self._by_port.values()}


class Totals:
    """What was counted so far."""

    def __init__(self) -> None:
        """Begin at zero."""
        self._last: Mapping[Counted, Stats] = {}
        self._frontends: dict[Name, Stats] = {}
        self._endpoints: dict[Name, Stats] = {}

    def update(self, counts: Mapping[Counted, Stats], owners: Owners) -> ConnectionStats:
        """Add what is new; who is gone is forgotten."""
        frontends = {name: self._frontends.get(name, _NOTHING) for name in owners.frontends}
        endpoints = {name: self._endpoints.get(name, _NOTHING) for name in owners.endpoints}
        for counted, stats in counts.items():
            key, target = counted
            owner = owners.of(key)
            if owner is None:
                continue
            name = owner if target is None else (owner[0], join_host_port(*target))
            totals = frontends if target is None else endpoints
            if name in totals:
                more = _more(self._last.get(counted, _NOTHING), stats)
                totals[name] = Stats(*map(sum, zip(totals[name], more, strict=True)))
        self._last, self._frontends, self._endpoints = counts, frontends, endpoints
        return ConnectionStats(
            {name: stats.connections for name, stats in frontends.items()},
            {name: stats.connections for name, stats in endpoints.items()},
            {name: TrafficCounters(*stats[1:]) for name, stats in frontends.items()},
            {name: TrafficCounters(*stats[1:]) for name, stats in endpoints.items()},
        )


def parse_totals(text: str) -> NodeTotals:
    """Read `/proc/net/ip_vs_stats`: two lines of headings, then the sums in hexadecimal."""
    lines = text.splitlines()
    connections, *moved = (int(word, 16) for word in lines[2].split())
    return NodeTotals(connections, TrafficCounters(*moved))


def _more(before: Stats, now: Stats) -> Stats:
    """What was counted in between; a server that was away began anew."""
    if any(after < earlier for earlier, after in zip(before, now, strict=True)):
        return now
    return Stats(*(after - earlier for earlier, after in zip(before, now, strict=True)))
