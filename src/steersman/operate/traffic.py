"""Traffic for pages: rates of a Service over the last minutes. Pure.

The running process only tells its counts of now (`TopSample`). A RateHistory keeps the rates of
one Service for as long as somebody looks; it is bounded in time, samples and endpoints.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from steersman.model.top import TopRow, TopSample
from steersman.operate.answer import Chart, Series, View

KEPT_SECONDS = 600.0
MOST_SAMPLES = 300
LEAST_APART = 1.5  # seconds; samples that come earlier are left out
_GAP = 15.0
_MOST_ENDPOINTS = 20
"""Endpoints of a sample that are kept, the busiest first."""
_DRAWN = 7
"""Lines of endpoints in a chart; one more is the sum."""
_ROWS = 200
"""Endpoints that a page lists."""

NOT_COUNTED = (
    "the mode of this node does not count connections, so there are no rates; `steersman top` and"
    " docs/metrics.md say which modes do"
)


class Rate(NamedTuple):
    """New and failed connections per second; None if the mode does not know."""

    connections: float | None
    failures: float | None


_UNKNOWN = Rate(None, None)


class _Sample(NamedTuple):
    at: float
    total: Rate
    rates: Mapping[str, Rate] = {}
    """Of endpoints, by name."""


class RateHistory:
    """The rates of one Service, seen by one node, in the last minutes."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=MOST_SAMPLES)

    def add(self, at: float, sample: TopSample) -> None:
        """Add the counts of the Service's endpoints.

        Args:
            at: seconds since 1970.
            sample: of the Service; its rows are endpoints, the busiest first.
        """
        while self._samples and self._samples[0].at < at - KEPT_SECONDS:
            self._samples.popleft()
        if not sample.interval:  # the first count gives no rates
            return
        before = self._samples[-1] if self._samples else _Sample(at - _GAP, _UNKNOWN)
        if at - before.at < LEAST_APART:
            return
        if at - before.at > _GAP:  # nobody looked: the chart has no line there
            self._samples.append(_Sample(at - LEAST_APART, _UNKNOWN))
        total = Rate(
            _sum(row.rate for row in sample.rows), _sum(row.failure_rate for row in sample.rows)
        )
        kept = sample.rows[:_MOST_ENDPOINTS]
        rates = {row.name: Rate(row.rate, row.failure_rate) for row in kept}
        self._samples.append(_Sample(at, total, rates))

    def chart(self, kind: Literal["connections", "failures"]) -> Chart | None:
        """Return a chart of all endpoints together and of the busiest ones; None if not known."""
        index = Rate._fields.index(kind)
        if all(sample.total[index] is None for sample in self._samples):
            return None
        sums: dict[str, float] = {}
        for sample in self._samples:
            for name, rate in sample.rates.items():
                sums[name] = sums.get(name, 0.0) + (rate[index] or 0.0)
        busiest = sorted(sums, key=lambda name: (-sums[name], name))[:_DRAWN]
        series = [Series("all endpoints", [_round(s.total[index]) for s in self._samples])]
        for name in sorted(busiest):  # the same order, so the same colours, whoever is ahead
            series.append(
                Series(name, [_round(s.rates.get(name, _UNKNOWN)[index]) for s in self._samples])
            )
        return Chart([round(s.at, 1) for s in self._samples], series, "/s")


class ServiceRates(View, frozen=True, kw_only=True):
    """Connections to the endpoints of a Service through one node."""

    service: str
    node: str
    at: float = 0.0
    """Seconds since 1970."""
    rows: tuple[TopRow, ...] = ()
    """The endpoints, the busiest first."""
    endpoints: int = 0
    """Number of all."""
    connections: Chart | None = None
    failures: Chart | None = None
    pods: Mapping[str, str] = {}
    """The pod of each endpoint, by the name of its row."""
    problem: str = ""
    """Why there are no rates."""


def service_rates(service: str, at: float, sample: TopSample, history: RateHistory) -> ServiceRates:
    """Return the rates of a Service, and charts of the last minutes.

    Args:
        service: `namespace/name`.
        at: seconds since 1970.
        sample: the counts of its endpoints.
        history: of the Service; the sample is in it.
    """
    problem = sample.problem
    if not problem and not sample.counted:
        problem = NOT_COUNTED
    return ServiceRates(
        service=service,
        node=sample.status.node,
        at=at,
        rows=sample.rows[:_ROWS],
        endpoints=sample.matching,
        connections=history.chart("connections"),
        failures=history.chart("failures"),
        problem=problem,
    )


def _sum(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
