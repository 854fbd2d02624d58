"""Connections by ServicePort, which never fall, from the counters of elements. Pure.

Frontends of a ServicePort come and go while its endpoints stay, so the increase of each counter
since the last time is added to the totals of its endpoint and its frontend. Totals of 0 are not
held: a node meets few of a cluster's endpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from steersman.model.addresses import join_host_port
from steersman.model.plan import Frontend, ServicePlan
from steersman.model.stats import ConnectionStats, StatsKey, frontend_label, increase
from steersman.modes.nftables.layout import (
    PROTOCOLS,
    Kind,
    base_name,
    element_key,
    kind_of,
    members_set_name,
    named,
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
        # 1. The increase of each counter. An element that was replaced has started at zero.
        increases: dict[bytes, int] = {}
        for key, (counted, count) in counts.items():
            before, last = self._last.get(key, (counted, 0))
            (more,) = increase((last,) if before == counted else (), (count,))
            if more:
                increases[counted] = increases.get(counted, 0) + more
        # 2. The totals so far of frontends and endpoints that are planned.
        owners = _Owners({}, {}, {}, {})
        for plan in self._concerned(tuple(plans), increases):
            owners.add(plan, self._frontends, self._endpoints)
        # 3. Each increase goes to its endpoint or frontend.
        for key, more in increases.items():
            owner, endpoint = split_counted_key(key)
            frontend = owners.frontend_of.get(owner)
            if frontend is None or owners.is_counted_elsewhere(key, owner, endpoint, counts):
                continue
            if endpoint:
                label = _label(frontend, endpoint)
                if label in owners.endpoints:
                    owners.endpoints[label] += more
            else:
                owners.frontends[frontend] += more
            if kind_of(key) == Kind.RELAY:  # no element counts its frontend
                owners.frontends[frontend] += more
        # 4. A count that is missing may come back: lists of elements that change are not complete.
        self._last = dict(owners.planned(self._last))
        self._last |= {key: count for key, count in counts.items() if count[1]}
        self._frontends = {label: count for label, count in owners.frontends.items() if count}
        self._endpoints = {label: count for label, count in owners.endpoints.items() if count}
        return ConnectionStats(self._frontends, self._endpoints)

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


class _Owners(NamedTuple):
    """Frontends, endpoints and members by the keys of their counters, and their totals."""

    frontend_of: dict[bytes, StatsKey]
    """By keys of frontends; and by keys of sets of members, with "" in the place of a frontend."""
    frontends: dict[StatsKey, int]
    endpoints: dict[StatsKey, int]
    counting_set: dict[bytes, bytes]
    """Maps a set of Pool.LOCAL's members to that of Pool.CLUSTER, which counts the same
    connections; maps a sticky frontend to b""."""

    def add(
        self,
        plan: ServicePlan,
        frontends: Mapping[StatsKey, int],
        endpoints: Mapping[StatsKey, int],
    ) -> None:
        """Add a plan with the totals it had before."""
        name, family = plan.key
        for frontend in plan.frontends:
            label = (name, frontend_label(frontend))
            self.frontend_of[_frontend_key(plan, frontend)] = label
            self.frontends[label] = frontends.get(label, 0)
        for label in ((name, str(end)) for end in plan.reachable):
            self.endpoints[label] = endpoints.get(label, 0)
        if plan.affinity_seconds:
            base = base_name(plan.key)
            cluster, local = (
                named(Kind.MEMBERS, family, members_set_name(base, pool)) for pool in (False, True)
            )
            self.frontend_of[cluster] = self.frontend_of[local] = (name, "")
            self.counting_set[local] = cluster
            for frontend in plan.frontends:
                self.counting_set[_frontend_key(plan, frontend)] = b""

    def planned(self, counts: Mapping[bytes, Count]) -> Iterator[tuple[bytes, Count]]:
        """Yield the counts of frontends and endpoints that are planned."""
        for key, count in counts.items():
            owner, endpoint = split_counted_key(count[0])
            frontend = self.frontend_of.get(owner)
            if frontend is None:
                continue
            if not endpoint or _label(frontend, endpoint) in self.endpoints:
                yield key, count

    def is_counted_elsewhere(
        self, key: bytes, owner: bytes, endpoint: bytes, counts: Mapping[bytes, Count]
    ) -> bool:
        """Return whether another element counts the same connections of an endpoint.

        All connections of a sticky ServicePort are counted where they are learned; an endpoint of
        both pools in the set of Pool.CLUSTER.
        """
        if not endpoint or kind_of(key) == Kind.RELAY:
            return False
        other = self.counting_set.get(owner)
        if other is None:
            return False
        return not other or element_key(other, endpoint) in counts


def _label(frontend: StatsKey, endpoint: bytes) -> StatsKey:
    return frontend[0], join_host_port(*unpack_endpoint(endpoint))


def _frontend_key(plan: ServicePlan, frontend: Frontend) -> bytes:
    """Return the key of a frontend's element in `service-ips` or `service-nodeports`."""
    name, family = plan.key
    rest = PROTOCOLS[name.protocol] + pack_port(frontend.port)
    if not frontend.address:
        return prefix(Kind.SERVICE_NODEPORTS, family) + rest
    return prefix(Kind.SERVICE_IPS, family) + pack_address(frontend.address) + rest
