"""The values of the metrics that the program counts.

Several `Metrics` can live in one process. Values that are known elsewhere (conntrack, kernel
counters) are collected when scraped (scraped.py): register a function with `Metrics.on_scrape`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from steersman import __version__
from steersman.model.names import Family
from steersman.modes.specs import SPECS, spec_of
from steersman.run.observe.metric_table import DECLARED, MetricTable
from steersman.run.observe.prometheus import (
    ChildT,
    Counted,
    Declared,
    Labelled,
    Metric,
    Rows,
)
from steersman.run.observe.scraped import process_metrics

OF_SOME_MODES = frozenset(name for spec in SPECS.values() for name in spec.metrics)
"""Names of the metrics that only some modes have."""
COUNTED = tuple(metric for metric in DECLARED if isinstance(metric, Counted))
"""The metrics that the program counts."""


class Metrics(MetricTable):
    """The metrics of one process in one mode."""

    def __init__(self, mode: str, families: Sequence[Family] = tuple(Family)) -> None:
        """Create all metrics of a mode, at zero.

        Args:
            families: the families served; their series exist from the start.
        """
        self._families = families
        self.by_name: dict[str, Labelled[Any]] = {}
        self._scraped: list[Callable[[], Iterable[Metric]]] = []
        self.use_mode(mode)

    def use_mode(self, mode: str) -> None:
        """Have the metrics of this mode; those of all modes keep their values."""
        self._spec = spec_of(mode)
        for metric in COUNTED:
            if metric.name in OF_SOME_MODES.difference(self._spec.metrics):
                self.by_name.pop(metric.name, None)
            elif metric.name not in self.by_name:
                self.by_name[metric.name] = self._at_zero(metric)

    def _at_zero(self, metric: Counted[ChildT]) -> Labelled[ChildT]:
        labelled = Labelled(metric)
        if metric.labels == ("ip_family",) and metric.kind != "gauge":  # it would show a false 0
            for family in self._families:
                labelled(family.kubernetes)
        return labelled

    def find(self, metric: Counted[ChildT]) -> Labelled[ChildT] | None:
        """Return the values of `Metrics.NAME`; None if the mode does not have the metric."""
        return self.by_name.get(metric.name)

    def count_refused(self, family: Family, *, full: int, partial: int) -> None:
        """Count batches that the kernel refused in the failure metrics that the mode declares.

        Args:
            full: number of batches of the difference to the whole kernel.
            partial: number of batches that held only changes.
        """
        for name, amount in (
            (self._spec.failure_metric, full + partial),
            (self._spec.partial_failure_metric, partial),
        ):
            if name:
                self.by_name[name](family.kubernetes).inc(amount)

    def show(self, metric: Declared[Any], rows: Callable[[], Rows]) -> None:
        """Show these rows of a metric at each scrape."""
        self.on_scrape(lambda: (metric.of(rows()),))

    def on_scrape(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Collect further metrics at each scrape."""
        self._scraped.append(collect)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, those of all Kubernetes components and of the process included."""
        for metric in tuple(self.by_name.values()):
            yield metric.collect()
        yield MetricTable.build_info.of([((__version__,), 1)])
        yield from process_metrics()
        for collect in self._scraped:
            yield from collect()
