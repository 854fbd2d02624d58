"""Counters of connections, bytes and dials, per endpoint and in total, for metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass, field

from steersman.model.names import PlanKey
from steersman.model.plan import Endpoint
from steersman.model.stats import ConnectionStats, DialCounters, StatsKey, TrafficCounters

LATENCY_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
"""Upper bounds of the buckets of dial latencies, in seconds; one more bucket is above them."""

MAX_FORMER = 50
"""Former endpoints of a ServicePort whose counters stay: a pod may come back at its address."""
_STEP = 1000
"""Endpoints whose counters are copied in one step: 3 ms."""


@dataclass(slots=True)
class EndpointCounters:
    """The counters of one endpoint of a ServicePort, or the sum of them all."""

    total: EndpointCounters | None = None
    """Counts the same for all endpoints, so that a sum needs no loop; None for the sum itself."""
    connections: int = 0
    """Connections that were made; clients for UDP."""
    failures: int = 0
    """Dials that were refused or timed out."""
    answered_at: float = float("-inf")
    """When the endpoint last answered, by time.monotonic(); known while dials are watched."""
    moved: list[int] = field(default_factory=lambda: [0, 0])
    """Bytes to the endpoint, and back."""
    dial_seconds: float = 0.0
    """Sum of the durations of successful dials."""
    dial_buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS) + 1))

    def dialled(self, seconds: float) -> None:
        """Count a connection that was made."""
        bucket = bisect_left(LATENCY_BUCKETS, seconds)
        for counters in (self, self.total):
            if counters is not None:
                counters.connections += 1
                counters.dial_seconds += seconds
                counters.dial_buckets[bucket] += 1

    def failed(self) -> None:
        """Count a dial that was refused or timed out."""
        self.failures += 1
        if self.total is not None:
            self.total.failed()

    def move(self, direction: int, size: int) -> None:
        """Count bytes that were passed on: direction 0 is to the endpoint, 1 to the client."""
        self.moved[direction] += size
        if self.total is not None:
            self.total.moved[direction] += size


class Traffic:
    """The counters of all endpoints.

    The counters of an endpoint only grow while they exist. The total never falls.
    """

    def __init__(self) -> None:
        self._counters: dict[PlanKey, dict[Endpoint, EndpointCounters]] = {}
        self.total = EndpointCounters()
        """The sum over all endpoints, former ones included."""

    def begin(self, owner: PlanKey) -> None:
        """Keep the counters of a ServicePort from now on, until `forget`."""
        self._counters.setdefault(owner, {})

    def of(self, owner: PlanKey, endpoint: Endpoint) -> EndpointCounters:
        """Return the counters of an endpoint; new ones are kept only while the owner is known."""
        # Connections may outlive their ServicePort; their counters then only feed the total.
        by_endpoint = self._counters.get(owner, {})
        counters = by_endpoint.get(endpoint)
        if counters is None:
            counters = by_endpoint[endpoint] = EndpointCounters(self.total)
        return counters

    def keep(self, owner: PlanKey, endpoints: Collection[Endpoint]) -> None:
        """Drop the counters of a ServicePort's other endpoints, but for the latest former ones."""
        # Dicts keep their order: the first ones have been gone for longest.
        gone = [endpoint for endpoint in self._counters.get(owner, {}) if endpoint not in endpoints]
        for endpoint in gone[: max(len(gone) - MAX_FORMER, 0)]:
            del self._counters[owner][endpoint]

    def forget(self, owner: PlanKey) -> None:
        """Drop the counters of a ServicePort."""
        self._counters.pop(owner, None)

    def stats(self) -> Generator[None, None, ConnectionStats]:
        """Return the counters by ServicePort and endpoint, in steps of a few milliseconds.

        The packets are not known: the kernel splits the bytes.
        """
        connections: dict[StatsKey, int] = {}
        moved: dict[StatsKey, TrafficCounters] = {}
        dials: dict[StatsKey, DialCounters] = {}
        for number, (owner, endpoint, counters) in enumerate(self, 1):
            if number % _STEP == 0:
                yield
            key = (owner.name, str(endpoint))
            connections[key] = counters.connections
            moved[key] = TrafficCounters(0, 0, *counters.moved)
            dials[key] = DialCounters(counters.failures, counters.dial_seconds)
        return ConnectionStats({}, connections, traffic_by_endpoint=moved, dials=dials)

    def __iter__(self) -> Iterator[tuple[PlanKey, Endpoint, EndpointCounters]]:
        for owner, by_endpoint in tuple(self._counters.items()):
            for endpoint, counters in tuple(by_endpoint.items()):
                yield owner, endpoint, counters
