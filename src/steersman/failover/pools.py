"""Which endpoints are served: by pool, owner and node; and which a pool can do without."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from itertools import chain, islice
from typing import Generic, NamedTuple, TypeVar

from steersman.failover import tuning
from steersman.failover.endpoint import Endpoint
from steersman.failover.states import Healthy, Waiting, suspected_at
from steersman.model.failover import Backend, Ejection
from steersman.model.names import Protocol

Pool = TypeVar("Pool", bound=Hashable)


class Served(NamedTuple):
    """What serving a pool changes."""

    is_new: bool
    """Whether its members are others than before."""
    joined: list[Endpoint]
    """Endpoints that were in no pool."""
    left: list[tuple[Endpoint, str]]
    """Endpoints that left a node, and its name; they are on another one, or in no pool now."""


class Pools(Generic[Pool]):
    """The members of each pool; an endpoint may be in several."""

    def __init__(self) -> None:
        self.endpoints: dict[Backend, Endpoint] = {}
        self._members: dict[Pool, tuple[Endpoint, ...]] = {}
        self._owners: dict[Pool, str] = {}
        self._on_node: defaultdict[str, dict[Backend, Endpoint]] = defaultdict(dict)
        self._rotation = 0

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._members)

    def members(self, pool: Pool) -> tuple[Endpoint, ...]:
        """Return the members of a pool."""
        return self._members.get(pool, ())

    def on_node(self, node: str) -> list[Endpoint]:
        """Return the endpoints of a node, by address."""
        return [endpoint for _, endpoint in sorted(self._on_node.get(node, {}).items())]

    def owners_of(self, endpoint: Endpoint) -> set[str]:
        """Return whose pools an endpoint is in."""
        return {self._owners[pool] for pool in endpoint.pools}

    def mates_of(self, endpoint: Endpoint) -> list[Endpoint]:
        """Return the other members of an endpoint's pools; some twice."""
        members = chain.from_iterable(self._members[pool] for pool in endpoint.pools)
        return [each for each in members if each is not endpoint]

    def serve(self, pool: Pool, members: Mapping[Backend, str], owner: str) -> Served:
        """Replace the members of a pool (`Policy.serve`)."""
        before = self._members.pop(pool, ())
        self._owners.pop(pool, None)
        served = Served({each.backend for each in before} != members.keys(), [], [])
        for endpoint in before:
            if endpoint.backend not in members:
                endpoint.pools.discard(pool)
                if not endpoint.pools:
                    self._leave_node(endpoint)
                    served.left.append((endpoint, endpoint.node))
                    del self.endpoints[endpoint.backend]
        for backend, node in members.items():
            known = self.endpoints.get(backend)
            endpoint = known or Endpoint(backend, node)
            if known is None:
                self.endpoints[backend] = endpoint
                served.joined.append(endpoint)
            elif known.node != node:
                self._leave_node(known)
                served.left.append((known, known.node))
            endpoint.node = node
            self._on_node[node][backend] = endpoint
            endpoint.pools.add(pool)
        if members:
            self._members[pool] = tuple(self.endpoints[each] for each in members)
            self._owners[pool] = owner
        return served

    def _leave_node(self, endpoint: Endpoint) -> None:
        on_node = self._on_node[endpoint.node]
        del on_node[endpoint.backend]
        if not on_node:
            del self._on_node[endpoint.node]

    def witnesses_of(self, endpoint: Endpoint) -> list[Endpoint]:
        """Return up to three others of each pool that are well, on other nodes if possible.

        Another one each time. If the endpoint is alone in its pools, they are of any pool.
        """
        self._rotation += 1
        # Some Services have the same endpoints; more than four are not asked for.
        groups = [self._members[pool] for pool in islice(endpoint.pools, 4)]
        if all(len(members) == 1 for members in groups):
            groups = [tuple(islice(self.endpoints.values(), 64))]
        chosen: dict[Backend, Endpoint] = {}
        for members in groups:
            start = self._rotation % len(members)
            turned = chain(islice(members, start, None), islice(members, start))
            well = [
                mate
                for mate in islice(turned, 64)
                if isinstance(mate.state, Healthy | Waiting) and mate is not endpoint
                if mate.backend.protocol is Protocol.TCP
            ]
            # One of each other node, then any.
            first = {mate.node: mate for mate in well if mate.node != endpoint.node}
            ordered = {mate.backend: mate for mate in (*first.values(), *well)}
            chosen.update(islice(ordered.items(), 3))
        return list(chosen.values())

    def in_force(self, pool: Pool, confirmed_share: float) -> tuple[Ejection, ...]:
        """Return the ejections in force in a pool (`Policy.ejected`)."""
        members = self.members(pool)
        down = [each for each in members if each.ejection]
        if not down or len(down) == len(members):
            return ()
        answered = max(each.probed_at for each in members if not each.ejection)
        confirmed = _limit(len(members), confirmed_share)
        unconfirmed = _limit(len(members), tuning.UNCONFIRMED_SHARE)
        ejections = sorted(
            ((ejection, each.state) for each in down if (ejection := each.ejection)),
            key=lambda each: (not each[0].confirmed, each[0].since, each[0].backend),
        )
        return tuple(
            ejection
            for number, (ejection, state) in enumerate(ejections)
            if number < (confirmed if ejection.confirmed else unconfirmed)
            if ejection.backend.protocol is Protocol.UDP or suspected_at(state) <= answered
        )


def _limit(members: int, share: float) -> int:
    """Return how many members may be ejected: one at least, and never all."""
    return min(members - 1, max(1, int(members * share)))
