"""Metrics about syncs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from steersman.model.findings import Severity
from steersman.model.names import Family
from steersman.modes.specs import spec_of
from steersman.run.observe.endpoint_counts import POLICIES, EndpointCounts
from steersman.run.observe.metrics import Metrics
from steersman.run.observe.prometheus import Declared, Rows
from steersman.run.pages.history import Lags
from steersman.run.sync.state import State, SyncReport
from steersman.source.store import Store

if TYPE_CHECKING:
    from steersman.netfilter.iptables.restore import Rules

_SLICE = 1000
"""Kernel objects that are counted before other tasks may run; about 3 ms."""
Objects: TypeAlias = Iterable[tuple[Any, Any]]


class SyncMetrics:
    """Updates the metrics about syncs."""

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        counts: EndpointCounts,
        objects: Callable[[], Objects],
        wall: Callable[[], float],
    ) -> None:
        self._metrics = metrics
        self._objects = objects
        self._wall = wall
        self._started = wall()
        self.lags = Lags()
        self._rules: Rules = Counter()
        self._state: State | None = None
        """Of the last sync that reached the kernel."""
        self._synced_at = 0.0
        """When the last sync succeeded, in seconds since 1970."""
        self._findings: set[tuple[Severity, str]] = set()
        """Severities and codes that were shown so far."""
        self._synced: Mapping[str, int] = {}
        """Changes synced, by kind."""

        # What is known anyway is looked at when it is scraped: there are many syncs in between.
        def show(kind: str, total: Declared[Any], pending: Declared[Any]) -> None:
            metrics.show(total, lambda: [((), store.seen[kind])])
            metrics.show(pending, lambda: [((), store.seen[kind] - self._synced.get(kind, 0))])

        show("Service", Metrics.service_changes, Metrics.service_changes_pending)
        show("EndpointSlice", Metrics.endpoint_changes, Metrics.endpoint_changes_pending)
        metrics.show(Metrics.last_sync_time, lambda: self._by_family(lambda _: self._synced_at))
        metrics.show(Metrics.without_endpoints, lambda: self._by_family(counts.without_endpoints))
        metrics.show(
            Metrics.no_local_endpoints,
            lambda: [
                ((policy, *labels), count)
                for policy in POLICIES
                for labels, count in self._by_family(partial(counts.no_local_endpoints, policy))
            ],
        )
        metrics.show(Metrics.findings, self._finding_counts)

    def _by_family(self, value: Callable[[Family], float]) -> Iterator[tuple[tuple[str], float]]:
        if (state := self._state) is not None:
            for family in state.plan.settings.families:
                yield (family.kubernetes,), value(family)

    def _finding_counts(self) -> Rows:
        """Count the current problems, and those of before as 0."""
        if (state := self._state) is None:
            return ()
        current = Counter((each.severity, each.code) for each in state.findings)
        # Findings that are not listed have no code.
        current.update({(severity, ""): n for severity, n in state.unlisted.items()})
        self._findings |= {(severity, "") for severity in Severity} | current.keys()
        return [
            ((severity.value, code), current[severity, code]) for severity, code in self._findings
        ]

    def use_objects(self, objects: Callable[[], Objects]) -> None:
        """Count other kernel objects: another mode serves."""
        self._objects = objects
        self._rules = Counter()

    def observe_changes(self, report: SyncReport) -> None:
        """Count the changes that a sync has brought into force; others came while it ran."""
        self._synced = report.seen

    def observe_latency(self, report: SyncReport) -> None:
        """Observe how long endpoint changes took from their cause until they are in force."""
        if not report.result:
            return
        arrivals = report.arrivals
        values = programming_seconds(arrivals.trigger_times, self._wall(), self._started)
        for value in values:
            for family in report.state.plan.settings.families:
                self._metrics.programming_seconds(family.kubernetes).observe(value)
        # The first sync says how long the start took, nothing about changes.
        if report.result.reason != "start" and arrivals.received is not None:
            self.lags.add(time.monotonic(), arrivals.received, values)

    async def observe_sync(self, report: SyncReport) -> None:
        """Count the sync and what it wrote; yields to the loop."""
        metrics, result = self._metrics, report.result
        # Refused batches count even if the sync had nothing to write in the end.
        families = report.state.plan.settings.families
        refused = report.refused_batches
        if any(refused):
            for family in families:
                metrics.count_refused(family, full=refused.full, partial=refused.partial)
        # A change that leaves the rules as they are is synced, too: alerts compare this time with
        # that of the last queued one.
        self._synced_at = self._wall()
        if result is None:
            return
        self._state = report.state
        # Durations, by family.
        extent = Metrics.full_sync_seconds if report.compared else Metrics.partial_sync_seconds
        for family in families:
            label = family.kubernetes
            metrics.sync_seconds(label).observe(result.seconds)
            if (of_extent := metrics.find(extent)) is not None:
                of_extent(label).observe(result.seconds)
        if spec_of(report.state.mode).counts_rules:
            await self._count_rules(report)
        # The outcome of the sync.
        for phase, seconds in result.phases.items():
            metrics.phase_seconds(phase).observe(seconds)
        metrics.syncs(result.reason, "refused" if result.refused else "ok").inc()
        metrics.kernel_objects().set(report.state.objects)
        metrics.refused_service_ports().set(result.refused)
        for change in ("added", "changed", "removed"):
            metrics.kernel_writes(change).inc(getattr(result, change))

    async def _count_rules(self, report: SyncReport) -> None:
        """Count iptables rules by table: all of them after a comparison, else the growth."""
        from steersman.netfilter.iptables import restore  # noqa: PLC0415 - others have no iptables rules

        if len(report.written) <= _SLICE:
            written, growth = restore.count_written(report.written.diff)
        else:
            written, growth = await asyncio.to_thread(restore.count_written, report.written.diff)
        # After a comparison, count all objects in force again: other programs may have changed
        # them. Otherwise the counts grow by the objects written.
        if report.compared and (report.written or not self._rules):
            rules: Rules = Counter()
            items = iter(self._objects())
            while some := tuple(islice(items, _SLICE)):
                rules.update(restore.count_rules(some))
                await asyncio.sleep(0)
            self._rules = rules
        else:
            self._rules.update(growth)
        for table in ("nat", "filter"):
            for family in report.state.plan.settings.families:
                labels = (table, family.kubernetes)
                self._metrics.iptables_rules(*labels).set(self._rules[table, family])
                self._metrics.iptables_rules_written(*labels).set(written[table, family])


def programming_seconds(trigger_times: Iterable[str], now: float, started: float) -> list[float]:
    """Return how long changes took from their `causes` until they are in force.

    Args:
        now: seconds since 1970; a cause that is later (a clock that is ahead) took no time.
    """
    return [max(0.0, now - when) for when in causes(trigger_times, started)]


def causes(trigger_times: Iterable[str], started: float) -> Iterator[float]:
    """Yield when changes were caused, in seconds since 1970.

    Args:
        trigger_times: annotations of slices, RFC 3339; invalid ones are left out (behaviour 4).
        started: when the process started; older causes say nothing about it.
    """
    for text in trigger_times:
        try:
            when = datetime.fromisoformat(text)
        except ValueError:
            continue
        if when.tzinfo is not None and when.timestamp() > started:
            yield when.timestamp()
