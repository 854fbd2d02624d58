"""What the world outside is told after each sync: metrics, health, health checks, conntrack.

In the order of behaviour 7. Nothing here decides about traffic, and nothing here can fail a sync:
each observer is called by itself, and one that raises is logged and called again after the next
sync.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Literal

from steersman.model.findings import Severity
from steersman.model.names import Family, ObjectName
from steersman.model.plan import NodeSettings
from steersman.modes.base import Mode
from steersman.netfilter.rule_text import Rules, count_rules, count_written
from steersman.run.cleaner import Cleaner, Delete
from steersman.run.health import Moment, ProxyHealth
from steersman.run.health_server import ServiceHealthServers, now
from steersman.run.metrics import Metrics
from steersman.run.outcome import Tally, programming_seconds
from steersman.run.runner import Clock, MonotonicClock
from steersman.run.state import Synced, SyncResult
from steersman.source.store import Store

log = logging.getLogger(__name__)

_COMPLAINT_SECONDS = 60.0
"""Between two log lines about one observer."""
_SLICE = 1000
"""Plans or kernel objects that are counted before the loop may go on; about 3 ms."""
_POLICIES: tuple[Literal["internal", "external"], ...] = ("internal", "external")


class Effects:
    """Tells metrics, health and the health check servers of each sync, and cleans conntrack."""

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        health: ProxyHealth,
        servers: Mapping[Family, ServiceHealthServers],
        *,
        observers: Mapping[str, Callable[[Synced], None]] | None = None,
        mode: Mode | None = None,
        delete: Delete | None = None,
        wall: Callable[[], float] = time.time,
        moment: Callable[[], Moment] = now,
        clock: Clock | None = None,
    ) -> None:
        """Take who is to be told; nothing is told before the first sync.

        Args:
            store: counts the changes that were seen.
            metrics: told of each sync.
            health: told of each change and each sync.
            servers: of the health check node ports, by family.
            observers: others that are told of each sync, by name.
            mode: its own connection table is cleaned, too, if it has one.
            delete: deletes conntrack entries; None for the kernel's.
            wall: seconds since 1970.
            moment: both clocks.
            clock: times the clean-up of conntrack.
        """
        self._store = store
        self._metrics = metrics
        self._health = health
        self._servers = servers
        self._wall = wall
        self._moment = moment
        self._started = wall()
        self._tally = Tally()
        self._rules: Rules = Counter()
        self._counted: dict[str, tuple[int, int]] = {}
        """Changes seen and changes synced, by kind, as the metrics show them."""
        self._synced: Counter[str] = Counter()
        self._observers = observers or {}
        self._clock = clock or MonotonicClock()
        self._quiet_until: dict[str, float] = {}
        self._checks: Mapping[Family, tuple[Mapping[ObjectName, int], Mapping[ObjectName, int]]]
        """Ports and answers of the health check servers."""
        self._checks_wanted = self._checks_served = (0, NodeSettings())
        self._checks_due = asyncio.Event()
        self.cleaner = Cleaner(metrics, mode=mode, delete=delete, clock=self._clock)

    def queued(self, families: Iterable[Family]) -> None:
        """Note that a change waits to be synced."""
        families = tuple(families)
        with self._isolated("health"):
            for family in families:
                self._health.queued(family, self._moment())
        with self._isolated("metrics"):
            for family in families:
                name = "sync_proxy_rules_last_queued_timestamp_seconds"
                self._metrics.set(name, self._wall(), family.kubernetes)
            self._count_changes()

    def started(self, families: Iterable[Family]) -> None:
        """Note that the loop runs: healthy until a change waits too long (behaviour 7)."""
        for family in families:
            self._health.updated(family, self._moment())

    def refused(self, families: Iterable[Family], partial: bool) -> None:
        """Count a batch that the kernel refused; `partial`: one of only what had changed."""
        with self._isolated("metrics"):
            for family in families:
                self._metrics.count_refusal(family, partial=partial)

    async def after(self, synced: Synced, objects: Iterable[tuple[Any, Any]]) -> None:
        """Tell of a successful sync; `objects` is everything in force (read when needed)."""
        told: dict[str, Callable[[Synced], Awaitable[None] | None]] = {
            "plans": self._plans,
            "latency": self._latency,
            "gauges": partial(self._gauges, objects=objects),
            "changes": self._changes_synced,
            "health": self._healthy,
            "health checks": self._health_checks,
            "conntrack": self.cleaner.note,
            **self._observers,
        }
        large = synced.whole or any(len(change.changed) > _SLICE for change in synced.plans)
        for name, tell in told.items():
            with self._isolated(name):
                waiting = tell(synced)
                if waiting is not None:
                    await waiting
            if large:
                await asyncio.sleep(0)  # each may take some milliseconds for everything

    @contextmanager
    def _isolated(self, observer: str) -> Iterator[None]:
        """Keep what an observer raises from everybody else."""
        try:
            yield
        except Exception:
            now = self._clock.time()
            if now >= self._quiet_until.get(observer, now):
                self._quiet_until[observer] = now + _COMPLAINT_SECONDS
                log.exception("%s failed to take a report; syncs are not affected", observer)

    async def _plans(self, synced: Synced) -> None:
        for change in synced.plans:
            self._tally.update({}, change.removed)
            items = iter(change.changed.items())
            while some := dict(islice(items, _SLICE)):
                self._tally.update(some, ())
                if len(some) == _SLICE:
                    await asyncio.sleep(0)

    def _changes_synced(self, _: Synced) -> None:
        self._synced = Counter(self._store.seen)
        self._count_changes()

    def _healthy(self, synced: Synced) -> None:
        for family in synced.state.plan.settings.families:
            self._health.updated(family, self._moment())

    def _latency(self, synced: Synced) -> None:
        families = synced.state.plan.settings.families if synced.result else ()
        for changes in synced.changes:
            seconds = programming_seconds(changes.trigger_times, self._wall(), self._started)
            for value in seconds:
                for family in families:
                    name = "network_programming_duration_seconds"
                    self._metrics.observe(name, value, family.kubernetes)

    async def _gauges(self, synced: Synced, objects: Iterable[tuple[Any, Any]]) -> None:
        metrics, result = self._metrics, synced.result
        if result is None:
            return
        families = synced.state.plan.settings.families
        for family in families:
            label = family.kubernetes
            metrics.set("sync_proxy_rules_last_timestamp_seconds", self._wall(), label)
            extent = "full" if synced.whole else "partial"
            metrics.observe("sync_proxy_rules_duration_seconds", result.seconds, label)
            if metrics.has(name := f"sync_{extent}_proxy_rules_duration_seconds"):
                metrics.observe(name, result.seconds, label)
            for policy in _POLICIES:
                count = self._tally.no_local_endpoints(policy, family)
                metrics.set("sync_proxy_rules_no_local_endpoints_total", count, policy, label)
        if synced.state.mode == "iptables":
            await self._count_rules(synced, objects)
        self._ours(synced, result)

    async def _count_rules(self, synced: Synced, objects: Iterable[tuple[Any, Any]]) -> None:
        if len(synced.written) <= _SLICE:
            written, growth = count_written(synced.written)
        else:
            written, growth = await asyncio.to_thread(count_written, synced.written)
        planned = any(change.changed or change.removed for change in synced.plans)
        if synced.whole and (synced.written or planned or not self._rules):
            rules: Rules = Counter()
            items = iter(objects)
            while some := tuple(islice(items, _SLICE)):
                rules.update(count_rules(some))
                await asyncio.sleep(0)
            self._rules = rules
        else:
            self._rules.update(growth)
        for table in ("nat", "filter"):
            for family in synced.state.plan.settings.families:
                key, labels = (table, family), (table, family.kubernetes)
                name = "sync_proxy_rules_iptables"
                self._metrics.set(f"{name}_total", self._rules[key], *labels)
                self._metrics.set(f"{name}_last", written[key], *labels)

    def _count_changes(self) -> None:
        for kind, word in (("Service", "service"), ("EndpointSlice", "endpoint")):
            seen, synced = self._store.seen[kind], self._synced[kind]
            if self._counted.get(kind) == (seen, synced):
                continue
            before, _ = self._counted.get(kind, (0, 0))
            name = f"sync_proxy_rules_{word}_changes"
            self._metrics.add(f"{name}_total", amount=seen - before)
            self._metrics.set(f"{name}_pending", seen - synced)
            self._counted[kind] = seen, synced

    def _ours(self, synced: Synced, result: SyncResult) -> None:
        metrics = self._metrics
        severities = Counter(finding.severity for finding in synced.state.findings)
        severities.update(synced.state.unlisted)
        for severity in Severity:
            metrics.set("findings", severities[severity], severity.value)
        for phase, seconds in result.phases.items():
            metrics.observe("sync_phase_seconds", seconds, phase)
        metrics.add("syncs_total", result.reason, "refused" if result.refused else "ok")
        metrics.set("kernel_objects", synced.state.objects)
        metrics.set("refused_service_ports", result.refused)
        for word in ("added", "changed", "removed"):
            metrics.add("kernel_writes_total", word, amount=getattr(result, word))

    def _health_checks(self, synced: Synced) -> None:
        """Have the health check servers follow; closing one may have to wait for its clients."""
        self._checks_wanted = (self._tally.health_changes, synced.state.plan.settings)
        if self._checks_served != self._checks_wanted:
            self._checks = {
                family: (self._tally.health_ports(family), self._tally.ready_here(family))
                for family in self._servers
            }
            self._checks_due.set()

    async def serve_health_checks(self) -> None:
        """Follow with the health check servers, until cancelled."""
        while True:
            await self._checks_due.wait()
            self._checks_due.clear()
            wanted, checks = self._checks_wanted, self._checks
            with self._isolated("health checks"):
                for family, servers in self._servers.items():
                    await servers.sync(*checks[family])
                if not any(servers.failing for servers in self._servers.values()):
                    self._checks_served = wanted  # else they are tried again after the next sync

    async def clean_conntrack(self) -> None:
        """Delete stale connections after syncs, until cancelled."""
        await self.cleaner.run()
