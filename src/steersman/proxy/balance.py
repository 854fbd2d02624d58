"""Which endpoint is next: round robin, fewest connections, affinity, failed ones last.

One Balancer per ServicePort and family, for all its listeners. Takes the time as an argument.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from steersman.model.plan import Endpoint

PENALTY = 10.0
"""Seconds for which an endpoint that could not be reached is tried last."""

MOST_STICKY = 65_536
"""Clients of a ServicePort whose endpoint is remembered; beyond that the oldest are forgotten."""


class Balancer:
    """Remembers what was chosen for whom, and what became of it."""

    __slots__ = ("_failed", "_next", "_sticky", "active", "dialling")

    def __init__(self) -> None:
        self._next = 0
        self._sticky: OrderedDict[str, tuple[Endpoint, float]] = (
            OrderedDict()
        )  # least recently used first
        self._failed: dict[Endpoint, float] = {}
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
        """Return the endpoints to try for a new connection, in this order; each once.

        Args:
            client: address of the client.
            endpoints: those to choose from, in a stable order.
            now: seconds, on a clock that never goes back.
            affinity_seconds: how long a client keeps its endpoint; 0 for no affinity.
            least_connections: prefer those with the fewest connections.
            most: how many to return.
        """
        if not endpoints:
            return []
        start, count = self._next % len(endpoints), len(endpoints)
        self._next += 1
        ranked: list[Endpoint]
        if self._failed or least_connections:
            ranked = [*endpoints[start:], *endpoints[:start]]
            if least_connections:
                ranked.sort(key=self.active.__getitem__)
            ranked.sort(key=lambda endpoint: self._failed.get(endpoint, now) > now)
        else:
            ranked = [endpoints[(start + i) % count] for i in range(min(most, count))]
        kept = self._kept(client, endpoints, now, affinity_seconds) if affinity_seconds else None
        if kept is not None:
            ranked = [kept, *(endpoint for endpoint in ranked if endpoint != kept)]
        return ranked[:most]

    def _kept(
        self, client: str, endpoints: Sequence[Endpoint], now: float, seconds: float
    ) -> Endpoint | None:
        endpoint, used = self._sticky.get(client, (None, 0.0))
        if endpoint is None or now - used >= seconds or self._failed.get(endpoint, now) > now:
            return None
        return endpoint if endpoint in endpoints else None

    def reached(
        self, client: str, endpoint: Endpoint, now: float, affinity_seconds: float = 0
    ) -> None:
        """Note a connection that was made: it counts until `ended`, and renews the affinity."""
        self.active[endpoint] += 1
        self._failed.pop(endpoint, None)
        if affinity_seconds:
            self._sticky.pop(client, None)
            self._sticky[client] = (endpoint, now)
            self._forget(now - affinity_seconds)

    def _forget(self, before: float) -> None:
        while self._sticky:
            oldest, (_, used) = next(iter(self._sticky.items()))
            if used > before and len(self._sticky) <= MOST_STICKY:
                break
            del self._sticky[oldest]

    def failed(self, endpoint: Endpoint, now: float) -> None:
        """Note an endpoint that could not be reached."""
        self._failed = {e: until for e, until in self._failed.items() if until > now}
        self._failed[endpoint] = now + PENALTY

    def ended(self, endpoint: Endpoint) -> None:
        """Note the end of a connection."""
        self.active[endpoint] -= 1
        if self.active[endpoint] <= 0:
            del self.active[endpoint]
