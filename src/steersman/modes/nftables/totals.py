"""From counts by element to counts by ServicePort, which never fall. Pure.

Frontends of a ServicePort come and go while its endpoints stay: so what an element counts more
than last time is added up, by endpoint and by frontend. Nothing is held for what has counted
nothing: a node meets few of a cluster's endpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from steersman.model.addresses import join_host_port
from steersman.model.names import Family, ServicePortName
from steersman.model.plan import Frontend, ServicePlan
from steersman.model.stats import ConnectionStats, frontend_label
from steersman.modes.nftables.affinity import base_name, members_name
from steersman.modes.nftables.layout import (
    PROTOCOLS,
    Kind,
    named,
    pack_address,
    pack_port,
    prefix,
)
from steersman.modes.nftables.text import address

Name: TypeAlias = tuple[ServicePortName, str]
_ENDPOINTS_OF = {
    Kind.SERVICE_ENDPOINTS: Kind.SERVICE_IPS,
    Kind.NODEPORT_ENDPOINTS: Kind.SERVICE_NODEPORTS,
    Kind.RELAY: Kind.SERVICE_NODEPORTS,
}
NOTHING: Mapping[bytes, int] = {}


class Totals:
    """What was counted so far."""

    def __init__(self) -> None:
        """Begin at zero."""
        self._last: Mapping[bytes, int] = {}
        self._frontends: Mapping[Name, int] = {}
        self._endpoints: Mapping[Name, int] = {}

    def update(
        self,
        counts: Mapping[bytes, int],
        plans: Iterable[ServicePlan],
        before: Mapping[bytes, int] = NOTHING,
    ) -> ConnectionStats:
        """Add what is new in the counts (counters.py says by which keys); forget who is gone.

        What has counted nothing may be left out of the counts. `before` is how much of them was
        counted by what has been replaced.
        """
        plans = tuple(plans)
        news = dict(self._news(counts, before))
        known = self._known(self._concerned(plans, news))
        for key, more in news.items():
            size = _size(key)
            owner = known.owners.get(_owner(key, size))
            if owner is None or known.counted_elsewhere(key, size, counts):
                continue
            name = (owner[0], _endpoint(key, size)) if size else owner
            totals = known.endpoints if size else known.frontends
            if name in totals:
                totals[name] += more
            if key[0] == Kind.RELAY:  # no element counts its frontend
                known.frontends[owner] += more
        self._last = counts
        self._frontends = {name: count for name, count in known.frontends.items() if count}
        self._endpoints = {name: count for name, count in known.endpoints.items() if count}
        return ConnectionStats(self._frontends, self._endpoints)

    def _news(
        self, counts: Mapping[bytes, int], before: Mapping[bytes, int]
    ) -> Iterator[tuple[bytes, int]]:
        """How much more is counted than last time."""
        for key, count in counts.items():
            more = count - self._last.get(key, 0)
            if more < 0:  # it was away, and began anew
                more = count - before.get(key, 0)
            if more:
                yield key, more

    def _concerned(
        self, plans: Sequence[ServicePlan], news: Iterable[bytes]
    ) -> Iterator[ServicePlan]:
        """Those of which something was counted, now or before."""
        before = {name for name, _ in (*self._frontends, *self._endpoints)}
        owners = {_owner(key, _size(key)) for key in news}
        for plan in plans:
            if (
                plan.key.name in before
                or (owners and plan.affinity_seconds)
                or any(_key(plan, frontend) in owners for frontend in plan.frontends)
            ):
                yield plan

    def _known(self, plans: Iterable[ServicePlan]) -> _Known:
        """What there is of these, with the totals of before."""
        known = _Known({}, {}, {}, {})
        for plan in plans:
            for frontend in plan.frontends:
                name = (plan.key.name, frontend_label(frontend))
                known.owners[_key(plan, frontend)] = name
                known.frontends[name] = self._frontends.get(name, 0)
            for name in ((plan.key.name, str(end)) for end in plan.reachable):
                known.endpoints[name] = self._endpoints.get(name, 0)
            if plan.affinity_seconds:
                known.add_members(plan)
        return known


class _Known(NamedTuple):
    """Who counts what, and for whom."""

    owners: dict[bytes, Name]
    """By the keys of frontends, and by the sets of members of those with session affinity."""
    frontends: dict[Name, int]
    endpoints: dict[Name, int]
    sets: dict[bytes, bytes]
    """By the keys of sticky frontends nothing; by sets of Pool.LOCAL that of Pool.CLUSTER."""

    def add_members(self, plan: ServicePlan) -> None:
        """All of a sticky ServicePort's connections are counted where they are learned."""
        base, family = base_name(plan.key), plan.key.family
        cluster, local = (
            named(Kind.MEMBER, family, members_name(base, pool)) for pool in (False, True)
        )
        self.owners[cluster] = self.owners[local] = (plan.key.name, "")
        self.sets[local] = cluster
        self.sets.update((_key(plan, frontend), b"") for frontend in plan.frontends)

    def counted_elsewhere(self, key: bytes, size: int, counts: Mapping[bytes, int]) -> bool:
        """Whether another element counts the same connections of an endpoint."""
        if not size or key[0] == Kind.RELAY:
            return False
        other = self.sets.get(_owner(key, size))
        if other is None:
            return False
        return not other or other + b"\0" + key[-size:] in counts


def _key(plan: ServicePlan, frontend: Frontend) -> bytes:
    name, family = plan.key
    rest = PROTOCOLS[name.protocol] + pack_port(frontend.port)
    if not frontend.address:
        return prefix(Kind.SERVICE_NODEPORTS, family) + rest
    return prefix(Kind.SERVICE_IPS, family) + pack_address(frontend.address) + rest


def _size(key: bytes) -> int:
    """Length of the endpoint at the end of a key; 0 for a frontend's."""
    of_endpoint = key[0] in _ENDPOINTS_OF or key[0] == Kind.MEMBER
    return Family(key[1]).bits // 8 + 4 if of_endpoint else 0


def _owner(key: bytes, size: int) -> bytes:
    """Key of the frontend, or the set of members, that an endpoint is counted in."""
    if not size:
        return key
    if key[0] == Kind.MEMBER:
        return key[: -size - 1]
    return prefix(_ENDPOINTS_OF[Kind(key[0])], Family(key[1])) + key[2 : -size - 4]


def _endpoint(key: bytes, size: int) -> str:
    data = key[-size:]
    return join_host_port(address(data[:-4]), int.from_bytes(data[-4:-2], "big"))
