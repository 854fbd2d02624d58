"""Gives each sync to its observers: metrics, health, health checks, conntrack clean-up, logs.

Each report of a sync is given to every observer, in the order of behaviour 7. Observers decide
nothing about traffic, and cannot fail a sync: one that raises is logged, and gets the next report.
They cost what changed; if that is much, they yield to the event loop every few milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import TypeAlias

from steersman.model.names import Family
from steersman.modes.base import Mode
from steersman.run.observe.endpoint_counts import EndpointCounts
from steersman.run.observe.health_checks import HealthCheckUpdater
from steersman.run.observe.metrics import Metrics
from steersman.run.observe.stale_entries import StaleEntryCleaner
from steersman.run.observe.sync_metrics import Objects, SyncMetrics
from steersman.run.serve.health import Moment, ProxyHealth, ServiceHealthServers, now
from steersman.run.sync.in_force import InForce
from steersman.run.sync.runner import Clock, MonotonicClock
from steersman.run.sync.state import SyncReport
from steersman.source.store import Store

log = logging.getLogger(__name__)

_COMPLAINT_SECONDS = 60.0
"""Between two log lines about one observer."""
_LARGE = 1000
"""Kernel objects of a report from which on each observer may take some milliseconds."""
Observer: TypeAlias = Callable[[SyncReport], Awaitable[None] | None]


class SyncObservers:
    """Gives every report to all observers."""

    def __init__(
        self,
        store: Store,
        in_force: InForce,
        metrics: Metrics,
        health: ProxyHealth,
        servers: Mapping[Family, ServiceHealthServers],
        *,
        objects: Callable[[], Objects] = tuple,
        mode: Mode,
        wall: Callable[[], float] = time.time,
        moment: Callable[[], Moment] = now,
        clock: Clock | None = None,
    ) -> None:
        """Create the observers; they do nothing before the first report.

        Args:
            objects: returns every kernel object in force; called only if all are counted.
            mode: its own connection table is cleaned, too, if it has one.
        """
        clock = self._clock = clock or MonotonicClock()
        counts = self.counts = EndpointCounts(in_force)
        self._health = health
        self._moment = moment
        self._quiet_until: dict[str, float] = {}
        self._metrics = SyncMetrics(store, metrics, counts, objects, wall)
        metrics.show(
            Metrics.last_queued_time,
            lambda: [((f.kubernetes,), at.wall / 1e9) for f, at in health.last_queued.items()],
        )
        self.lags = self._metrics.lags
        self.health_checks = HealthCheckUpdater(servers, counts, self._complain)
        self._new_stale_entries = partial(StaleEntryCleaner, metrics, in_force, clock=clock)
        self.stale_entries = self._new_stale_entries(mode=mode)
        """Replaced with the mode: each mode has debts of its own."""
        self.observers: dict[str, Observer] = {
            "plans": counts.observe,
            "latency": self._metrics.observe_latency,
            "metrics": self._metrics.observe_sync,
            "changes": self._metrics.observe_changes,
            "health": lambda report: self.started(report.state.plan.settings.families),
            "health checks": self.health_checks.observe,
            "conntrack": lambda report: self.stale_entries.note(report),  # noqa: PLW0108 - replaced
        }
        self.on_failure: dict[str, Callable[[str], None]] = {}
        """Called with the reason if a sync fails, by name."""

    def use_mode(self, mode: Mode, objects: Callable[[], Objects]) -> None:
        """Observe another mode from now on."""
        self._metrics.use_objects(objects)
        self.stale_entries = self._new_stale_entries(mode=mode)

    def started(self, families: Iterable[Family]) -> None:
        """Record that the loop runs: healthy until a change waits too long (behaviour 7)."""
        for family in families:
            self._health.updated(family, self._moment())

    def queued(self, families: Iterable[Family]) -> None:
        """Record that a change waits to be synced."""
        moment = self._moment()
        for family in families:
            self._health.queued(family, moment)

    def failed(self, families: Iterable[Family], why: str) -> None:
        """Record that a sync failed: what it had to do waits for the next one."""
        self.queued(families)
        for name, call in self.on_failure.items():
            try:
                call(why)
            except Exception:
                self._complain(name)

    async def observe(self, report: SyncReport) -> None:
        """Give a report to every observer."""
        large = report.compared or len(report.written) > _LARGE
        for name, observe in self.observers.items():
            try:
                waiting = observe(report)
                if waiting is not None:
                    await waiting
            except Exception:
                self._complain(name)
            if large:
                await asyncio.sleep(0)  # each may take some milliseconds for everything

    def _complain(self, observer: str) -> None:
        """Log the Exception that is being handled, once a minute for each observer."""
        now = self._clock.time()
        if now >= self._quiet_until.get(observer, now):
            self._quiet_until[observer] = now + _COMPLAINT_SECONDS
            log.exception("%s failed to take a report; syncs are not affected", observer)
