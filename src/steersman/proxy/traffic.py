"""What went through the proxy, per endpoint and altogether, for metrics.

Counts of an endpoint grow as long as they are kept; the sum over all of them never falls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from steersman.model.names import PlanKey
from steersman.model.plan import Endpoint

LATENCY_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
"""Upper ends of the buckets of dial latencies, in seconds; one more bucket is above them."""

GONE_KEPT = 50
"""Endpoints of a ServicePort that are gone and counted still: pods come back, or come anew."""


@dataclass(slots=True)
class EndpointCounters:
    """The counts of one endpoint of a ServicePort, or of all of them."""

    total: EndpointCounters | None = None
    """Counts the same for all endpoints together, so that nobody has to add them up."""
    connections: int = 0
    """Connections made; clients for UDP."""
    failures: int = 0
    """DialRegistry that were refused or not answered in time."""
    moved: list[int] = field(default_factory=lambda: [0, 0])
    """Bytes from clients to the endpoint, and back."""
    dial_seconds: float = 0.0
    """Time that successful dials took, together."""
    dial_buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS) + 1))

    def dialled(self, seconds: float) -> None:
        """Note a connection that was made."""
        self.connections += 1
        self.dial_seconds += seconds
        bucket = sum(seconds > end for end in LATENCY_BUCKETS)
        self.dial_buckets[bucket] += 1
        if self.total is not None:
            self.total.dialled(seconds)

    def failed(self) -> None:
        """Count a dial that was refused or not answered."""
        self.failures += 1
        if self.total is not None:
            self.total.failed()

    def move(self, direction: int, size: int) -> None:
        """Count bytes that were passed on: direction 0 is to the endpoint, 1 is to the client."""
        self.moved[direction] += size
        if self.total is not None:
            self.total.moved[direction] += size


class Traffic:
    """The counts of all endpoints."""

    def __init__(self) -> None:
        self._tallies: dict[PlanKey, dict[Endpoint, EndpointCounters]] = {}
        self.total = EndpointCounters()
        """The counts of all endpoints, those that are forgotten included."""

    def begin(self, owner: PlanKey) -> None:
        """Count for a ServicePort from now on, until `forget`."""
        self._tallies.setdefault(owner, {})

    def of(self, owner: PlanKey, endpoint: Endpoint) -> EndpointCounters:
        """The counts of an endpoint, from zero if need be; kept while its ServicePort is there."""
        return self._tallies.get(owner, {}).setdefault(endpoint, EndpointCounters(self.total))

    def keep(self, owner: PlanKey, endpoints: Collection[Endpoint]) -> None:
        """Drop the counts of other endpoints of a ServicePort; the latest may come back."""
        gone = [endpoint for endpoint in self._tallies.get(owner, {}) if endpoint not in endpoints]
        for endpoint in gone[: max(len(gone) - GONE_KEPT, 0)]:
            del self._tallies[owner][endpoint]

    def forget(self, owner: PlanKey) -> None:
        """Drop the counts of a ServicePort that is gone."""
        self._tallies.pop(owner, None)

    def __iter__(self) -> Iterator[tuple[PlanKey, Endpoint, EndpointCounters]]:
        for owner, tallies in tuple(self._tallies.items()):
            for endpoint, counters in tuple(tallies.items()):
                yield owner, endpoint, counters
