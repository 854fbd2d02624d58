"""Which endpoint a client gets: round robin, fewest connections, affinity, failed ones last.

A Balancer is shared by all listeners of a ServicePort in one family; it is given the time as an
argument. A Route connects one listener with its Balancer, the counters and the descriptor budget.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence

from steersman.model.addresses import canonical_ip
from steersman.model.plan import Endpoint, Verdict
from steersman.proxy.budget import DescriptorBudget, Reservation
from steersman.proxy.dials import DialRegistry
from steersman.proxy.listeners import ListenerPlan
from steersman.proxy.traffic import EndpointCounters, Traffic

PENALTY = 10.0
"""Seconds for which an endpoint that could not be reached is tried last."""

MAX_AFFINITIES = 65_536
"""Clients of a ServicePort whose endpoint is remembered; above that the oldest are forgotten."""


class Balancer:
    """Orders the endpoints for each new connection, and remembers the outcome."""

    __slots__ = ("_affinity", "_failed", "_next", "active", "dialling")

    def __init__(self) -> None:
        self._next = 0
        self._affinity: OrderedDict[str, tuple[Endpoint, float]] = OrderedDict()
        """By client: its endpoint and the time of its last connection, oldest first."""
        self._failed: dict[Endpoint, float] = {}
        """Endpoints that could not be reached, and until when they are tried last."""
        self.active: Counter[Endpoint] = Counter()
        """Connections to each endpoint now."""
        self.dialling = 0
        """Clients that wait for an endpoint to answer."""

    def order(
        self,
        client: str,
        endpoints: Sequence[Endpoint],
        now: float,
        *,
        affinity_seconds: float = 0,
        least_connections: bool = False,
        most: int = 4,
    ) -> list[Endpoint]:
        """Return the endpoints to try for a new connection, in this order, each once.

        Args:
            client: address of the client.
            endpoints: the endpoints to choose from, in a stable order.
            now: seconds, on a clock that never goes back.
            affinity_seconds: how long a client keeps its endpoint; 0 for no affinity.
            least_connections: prefer the endpoints with the fewest connections.
            most: how many to return.
        """
        if not endpoints:
            return []
        # Round robin: start with the next endpoint.
        start, count = self._next % len(endpoints), len(endpoints)
        self._next += 1
        ranked: list[Endpoint]
        if self._failed or least_connections:
            ranked = [*endpoints[start:], *endpoints[:start]]
            # Stable sorts: of equal endpoints the round robin decides. Failed ones are last.
            if least_connections:
                ranked.sort(key=self.active.__getitem__)
            ranked.sort(key=lambda endpoint: self._failed.get(endpoint, now) > now)
        else:  # the common case does not copy thousands of endpoints
            ranked = [endpoints[(start + i) % count] for i in range(min(most, count))]
        # Affinity: the client's last endpoint is the first, unless it has failed or is gone.
        if affinity_seconds:
            sticky, used = self._affinity.get(client, (None, 0.0))
            if (
                sticky is not None
                and now - used < affinity_seconds
                and self._failed.get(sticky, now) <= now
                and sticky in endpoints
            ):
                ranked = [sticky, *(endpoint for endpoint in ranked if endpoint != sticky)]
        return ranked[:most]

    def reached(
        self, client: str, endpoint: Endpoint, now: float, affinity_seconds: float = 0
    ) -> None:
        """Note a connection that was made. It counts until `ended` and renews the affinity."""
        self.active[endpoint] += 1
        self._failed.pop(endpoint, None)
        if not affinity_seconds:
            return
        self._affinity.pop(client, None)  # so that the order is by last use
        self._affinity[client] = (endpoint, now)
        while self._affinity:
            oldest, (_, used) = next(iter(self._affinity.items()))
            if used > now - affinity_seconds and len(self._affinity) <= MAX_AFFINITIES:
                break
            del self._affinity[oldest]

    def failed(self, endpoint: Endpoint, now: float) -> None:
        """Note an endpoint that could not be reached."""
        self._failed = {e: until for e, until in self._failed.items() if until > now}
        self._failed[endpoint] = now + PENALTY

    def forget_failures(self, kept: Collection[Endpoint]) -> None:
        """Forget the failures of all other endpoints."""
        self._failed = {e: until for e, until in self._failed.items() if e in kept}

    def ended(self, endpoint: Endpoint) -> None:
        """Note the end of a connection."""
        self.active[endpoint] -= 1
        if self.active[endpoint] <= 0:
            del self.active[endpoint]


class Route:
    """The way from one listener to its endpoints."""

    def __init__(
        self,
        plan: ListenerPlan,
        balancer: Balancer,
        traffic: Traffic,
        budget: DescriptorBudget,
        *,
        dials: DialRegistry,
        destination: tuple[str, int],
    ) -> None:
        """Make the way of a listener.

        Args:
            plan: the listener's plan; it may be replaced at any time.
            balancer: shared by the ServicePort's listeners.
            traffic: the counters of all endpoints.
            budget: the descriptors of all connections.
            dials: the dials of all listeners.
            destination: address ("" for any) and port that clients use.
        """
        self.plan = plan
        self.balancer = balancer
        self.budget = budget
        self.dials = dials
        self.destination = destination
        self._traffic = traffic
        self.shared = False
        """Another process accepts from the same socket: clients that wait there are not lost."""

    def endpoints(self, client: str, interface: str = "") -> list[Endpoint]:
        """Return the endpoints to try for a client, in order; [] to refuse it."""
        plan = self.plan
        address = canonical_ip(client) or client
        decision = plan.decide(address, interface)
        if decision.verdict is not Verdict.FORWARD:
            return []
        return self.balancer.order(
            address,
            decision.endpoints,
            time.monotonic(),
            affinity_seconds=plan.affinity_seconds,
            least_connections=plan.least_connections,
        )

    def begin_dialling(self) -> bool:
        """Count a client that waits for endpoints, at the Balancer; False if there are too many.

        After True the caller takes one from `Balancer.dialling` in the end.
        """
        allowed = self.balancer.dialling < self.budget.dial_limit
        self.budget.refused += not allowed
        self.balancer.dialling += allowed
        return allowed

    def serves(self, endpoint: Endpoint) -> bool:
        """Whether the plan has an endpoint, for any client."""
        plan = self.plan
        return any(endpoint in d.endpoints for d in (plan.external, plan.node, plan.pod))

    def reached(self, client: str, endpoint: Endpoint, seconds: float) -> EndpointCounters:
        """Note a connection that was made in so many seconds; return the counters for its bytes."""
        now = time.monotonic()
        address = canonical_ip(client) or client
        self.balancer.reached(address, endpoint, now, self.plan.affinity_seconds)
        counters = self._traffic.of(self.plan.owner, endpoint)
        counters.dialled(seconds)
        return counters

    def answered(self, endpoint: Endpoint, counters: EndpointCounters) -> None:
        """Note that an endpoint took a connection, or replied to a client's first datagram."""
        if (watch := self.dials.watch) is not None:
            counters.answered_at = time.monotonic()
            watch.answered(self.plan.owner, endpoint)

    def failed(self, endpoint: Endpoint, client: str, error: OSError) -> None:
        """Note an endpoint that could not be reached for a client."""
        if self.serves(endpoint):  # one that has left the plan starts afresh if it comes back
            self.balancer.failed(endpoint, time.monotonic())
        counters = self._traffic.of(self.plan.owner, endpoint)
        counters.failed()
        if (watch := self.dials.watch) is not None:
            watch.failed(self.plan.owner, endpoint, client, error, counters.answered_at)

    def ended(self, balancer: Balancer, endpoint: Endpoint, reservation: Reservation) -> None:
        """Note the end of a connection, at the Balancer that chose its endpoint."""
        balancer.ended(endpoint)
        self.budget.release(reservation)
