"""The event loop of the process, which measures for how long its callbacks keep it busy.

Everything of the process waits while a callback runs: health checks, watches, the next sync. An
iteration of the loop lies between two calls of its selector, so it is measured there: exactly,
without a timer, at the cost of reading two clocks.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily, Metric

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Holds:
    """How long iterations of a loop took, by the clock on the wall and in CPU time.

    The CPU time of the loop's thread is what the program is responsible for. Where the other is
    longer, the process waited: for a CPU that others used or that its limit denied it, or in a
    system call.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """Count nothing yet; the clocks are replaced in tests."""
        self._wall, self._cpu = wall, cpu
        self._since: tuple[float, float] | None = None
        self._counts = {clock: [0] * (len(BUCKETS) + 1) for clock in ("wall", "cpu")}
        self._sums = {"wall": 0.0, "cpu": 0.0}

    def begin(self) -> None:
        """Note that callbacks are about to run."""
        self._since = self._wall(), self._cpu()

    def end(self) -> None:
        """Note that they have run."""
        if self._since is not None:
            wall, cpu = self._since
            self._count("wall", self._wall() - wall)
            self._count("cpu", self._cpu() - cpu)

    def _count(self, clock: str, seconds: float) -> None:
        self._counts[clock][bisect_left(BUCKETS, seconds)] += 1
        self._sums[clock] += seconds

    def collect(self) -> Iterator[Metric]:
        """Return them as a histogram."""
        family = HistogramMetricFamily(
            "steersman_event_loop_hold_seconds",
            "How long iterations of the event loop took, during which nothing else was answered",
            labels=("clock",),
        )
        bounds = [*map(str, BUCKETS), "+Inf"]
        for clock, counts in self._counts.items():
            buckets = list(zip(bounds, map(float, accumulate(counts)), strict=True))
            family.add_metric((clock,), buckets, self._sums[clock])
        yield family


class _Selector(selectors.DefaultSelector):
    """Tells when a loop waits and when it works."""

    def __init__(self, holds: Holds) -> None:
        super().__init__()
        self._holds = holds

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._holds.end()
        events = super().select(timeout)
        self._holds.begin()
        return events


class MeasuredLoop(asyncio.SelectorEventLoop):
    """A loop that knows how long it was held."""

    def __init__(self, holds: Holds | None = None) -> None:
        """Make a loop that reports to `holds`."""
        self.holds = holds or Holds()
        super().__init__(_Selector(self.holds))
