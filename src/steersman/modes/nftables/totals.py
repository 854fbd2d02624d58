"""Connections by ServicePort, which never fall, from the counters of elements. Pure.

Frontends of a ServicePort come and go while its endpoints stay, so the increase of each counter
since the last time is added to the totals of its endpoint and its frontend. Totals of 0 are not
held: a node meets few of a cluster's endpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from steersman.model.addresses import join_host_port
from steersman.model.names import ServicePortName
from steersman.model.plan import Frontend, ServicePlan
from steersman.model.stats import ConnectionStats, StatsKey, frontend_label, increase
from steersman.modes.nftables.layout import (
    PROTOCOLS,
    Kind,
    base_name,
    element_key,
    kind_of,
    named,
    own_set_name,
    pack_address,
    pack_port,
    prefix,
    split_counted_key,
    unpack_endpoint,
)

Count: TypeAlias = tuple[bytes, int]
"""What an element counts (`layout.counted_key`), and how many connections so far."""


class ConnectionTotals:
    """Connections so far."""

    def __init__(self) -> None:
        self._last: dict[bytes, Count] = {}
        self._frontends: Mapping[StatsKey, int] = {}
        self._endpoints: Mapping[StatsKey, int] = {}

    def update(
        self, counts: Mapping[bytes, Count], plans: Iterable[ServicePlan]
    ) -> ConnectionStats:
        """Add the increase since the last time; forget frontends and endpoints that are gone.

        Args:
            counts: by element; one that is 0 or, except of members, left out is as it was.
            plans: all plans that are in force.
        """
        increases = self._increases(counts)
        # 1. The totals so far of frontends and endpoints that are planned.
        owners: dict[bytes, _Owner] = {}
        frontends, endpoints = dict[StatsKey, int](), dict[StatsKey, int]()
        for plan in self._concerned(tuple(plans), increases):
            owners |= (own := dict(_owners_of(plan)))
            for frontend in (each.frontend for each in own.values() if each.frontend):
                frontends[frontend] = self._frontends.get(frontend, 0)
            for label in ((plan.key.name, str(end)) for end in plan.reachable):
                endpoints[label] = self._endpoints.get(label, 0)
        # 2. Each increase goes to its frontend or its endpoint; that of a relay to both.
        for counted, more in increases.items():
            key, endpoint = split_counted_key(counted)
            if (owner := owners.get(key)) is None:
                continue
            relayed = kind_of(counted) == Kind.RELAY
            if owner.frontend and (relayed or not endpoint):
                frontends[owner.frontend] += more
            if endpoint and (relayed or owner.counts_connections_to(endpoint, counts)):
                label = owner.label_of(endpoint)
                if label in endpoints:
                    endpoints[label] += more
        # 3. A count that is missing may come back: lists of elements that change are not complete.
        for element, (counted, _) in list(self._last.items()):
            key, endpoint = split_counted_key(counted)
            owner = owners.get(key)
            if owner is None or (endpoint and owner.label_of(endpoint) not in endpoints):
                del self._last[element]
        self._last |= {element: count for element, count in counts.items() if count[1]}
        self._frontends = {label: count for label, count in frontends.items() if count}
        self._endpoints = {label: count for label, count in endpoints.items() if count}
        return ConnectionStats(self._frontends, self._endpoints)

    def _increases(self, counts: Mapping[bytes, Count]) -> dict[bytes, int]:
        """Return the increase of each counter. An element that was replaced has started at zero."""
        increases: dict[bytes, int] = {}
        for element, (counted, count) in counts.items():
            before, last = self._last.get(element, (counted, 0))
            (more,) = increase((last,) if before == counted else (), (count,))
            if more:
                increases[counted] = increases.get(counted, 0) + more
        return increases

    def _concerned(
        self, plans: Sequence[ServicePlan], increases: Iterable[bytes]
    ) -> Iterator[ServicePlan]:
        """Yield the plans of which something was counted, now or before."""
        counted = {name for name, _ in (*self._frontends, *self._endpoints)}
        owners = {split_counted_key(key)[0] for key in increases}
        for plan in plans:
            if (
                plan.key.name in counted
                or (owners and plan.affinity_seconds)
                or any(_frontend_key(plan, frontend) in owners for frontend in plan.frontends)
            ):
                yield plan


class _Owner(NamedTuple):
    """What has counters: a frontend of a ServicePort, or a set of its endpoints."""

    name: ServicePortName
    frontend: StatsKey | None
    """None for a set."""
    sticky: bool
    """Whether the ServicePort has session affinity: then its sets count, where connections are
    learned, and its frontends' endpoints are not to be counted once more."""
    other_set: bytes = b""
    """For the set of Pool.LOCAL: that of Pool.CLUSTER, which counts the endpoints of both."""

    def label_of(self, endpoint: bytes) -> StatsKey:
        """Return the label of an endpoint."""
        return self.name, join_host_port(*unpack_endpoint(endpoint))

    def counts_connections_to(self, endpoint: bytes, counts: Mapping[bytes, Count]) -> bool:
        """Return whether no other counter has the same connections."""
        if self.frontend:
            return not self.sticky
        return not self.other_set or element_key(self.other_set, endpoint) not in counts


def _owners_of(plan: ServicePlan) -> Iterator[tuple[bytes, _Owner]]:
    """Yield what has counters of a plan, by the keys that `split_counted_key` returns."""
    name, family = plan.key
    sticky = bool(plan.affinity_seconds)
    for frontend in plan.frontends:
        label = (name, frontend_label(frontend))
        yield _frontend_key(plan, frontend), _Owner(name, label, sticky)
    if sticky:
        base = base_name(plan.key)
        cluster, local = (
            named(Kind.MEMBERS, family, own_set_name(Kind.MEMBERS, base, pool))
            for pool in (False, True)
        )
        yield cluster, _Owner(name, None, sticky)
        yield local, _Owner(name, None, sticky, cluster)


def _frontend_key(plan: ServicePlan, frontend: Frontend) -> bytes:
    """Return the key of a frontend's element in `service-ips` or `service-nodeports`."""
    name, family = plan.key
    rest = PROTOCOLS[name.protocol] + pack_port(frontend.port)
    if not frontend.address:
        return prefix(Kind.SERVICE_NODEPORTS, family) + rest
    return prefix(Kind.SERVICE_IPS, family) + pack_address(frontend.address) + rest
