"""The observers of syncs: metrics, health, health check node ports, conntrack clean-up, log.

Each report of a sync is given to every observer, in the order of behaviour 7. Observers decide
nothing about traffic, and cannot fail a sync: one that raises is logged, and gets the next report.
They cost what changed; if that is much, they yield to the event loop every few milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from steersman.model.findings import Finding, Severity
from steersman.model.names import Family, ObjectName, PlanKey
from steersman.model.plan import FrontendKind, NodeSettings, ServicePlan, Verdict
from steersman.modes.base import Mode
from steersman.modes.specs import spec_of
from steersman.run.observe.metrics import Metrics
from steersman.run.observe.stale_entries import Delete, StaleEntryCleaner
from steersman.run.pages.history import Lags
from steersman.run.serve.health import Moment, ProxyHealth, ServiceHealthServers, now
from steersman.run.sync.in_force import InForce
from steersman.run.sync.runner import Clock, MonotonicClock
from steersman.run.sync.state import SyncReport
from steersman.source.store import Store

if TYPE_CHECKING:
    from steersman.netfilter.rule_text import Rules

log = logging.getLogger(__name__)

_COMPLAINT_SECONDS = 60.0
"""Between two log lines about one observer."""
_SLICE = 1000
"""Plans or kernel objects that are counted before other tasks may run; about 3 ms."""
_FINDING_LINES = 20
"""New Findings, and resolved ones, that are logged at a time; the rest are counted. The log as a
whole limits its lines per minute (run/process/klog.py)."""

TrafficPolicy: TypeAlias = Literal["internal", "external"]
_POLICIES: tuple[TrafficPolicy, ...] = ("internal", "external")
Objects: TypeAlias = Iterable[tuple[Any, Any]]
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
        others: Mapping[str, Observer] | None = None,
        mode: Mode | None = None,
        delete: Delete | None = None,
        wall: Callable[[], float] = time.time,
        moment: Callable[[], Moment] = now,
        clock: Clock | None = None,
    ) -> None:
        """Create the observers; they do nothing before the first report.

        Args:
            store: counts the changes that were seen.
            in_force: what the observers follow.
            metrics: updated by each report.
            health: updated by each change and each report.
            servers: servers of the health check node ports, by family.
            objects: returns every kernel object in force; called only if all are counted.
            others: more observers, by name.
            mode: its own connection table is cleaned, too, if it has one.
            delete: deletes conntrack entries; None for the kernel's.
            wall: seconds since 1970.
            moment: both clocks.
            clock: times the clean-up of conntrack.
        """
        clock = clock or MonotonicClock()
        counts = self.counts = EndpointCounts(in_force)
        self._health = health
        self._moment = moment
        self._isolated = Isolation(clock).of
        self._metrics = SyncMetrics(store, metrics, counts, objects, wall)
        self.lags = self._metrics.lags
        self.health_checks = HealthCheckUpdater(servers, counts, self._isolated)
        self._new_stale_entries = partial(
            StaleEntryCleaner, metrics, in_force, delete=delete, clock=clock
        )
        self.stale_entries = self._new_stale_entries(mode=mode)
        """Replaced with the mode: each mode has debts of its own."""
        self.observers: dict[str, Observer] = {
            "plans": counts.observe,
            "latency": self._metrics.observe_latency,
            "gauges": self._metrics.observe_gauges,
            "changes": self._metrics.observe_changes,
            "health": lambda report: self.started(report.state.plan.settings.families),
            "health checks": self.health_checks.observe,
            "conntrack": lambda report: self.stale_entries.note(report),  # noqa: PLW0108 - replaced
            **(others or {}),
        }
        self.on_failure: dict[str, Callable[[str], None]] = {}
        """Called with the reason if a sync fails, by name."""

    def use_mode(self, mode: Mode, objects: Callable[[], Objects]) -> None:
        """Observe another mode from now on.

        Args:
            mode: the mode that serves.
            objects: returns its kernel objects in force.
        """
        self._metrics.use_objects(objects)
        self.stale_entries = self._new_stale_entries(mode=mode)

    def started(self, families: Iterable[Family]) -> None:
        """Record that the loop runs: healthy until a change waits too long (behaviour 7)."""
        for family in families:
            self._health.updated(family, self._moment())

    def queued(self, families: Iterable[Family]) -> None:
        """Record that a change waits to be synced."""
        families = tuple(families)
        with self._isolated("health"):
            for family in families:
                self._health.queued(family, self._moment())
        with self._isolated("metrics"):
            self._metrics.queued(families)

    def failed(self, families: Iterable[Family], why: str) -> None:
        """Record that a sync failed: what it had to do waits for the next one."""
        self.queued(families)
        for name, call in self.on_failure.items():
            with self._isolated(name):
                call(why)

    async def observe(self, report: SyncReport) -> None:
        """Give a report to every observer."""
        large = report.compared or len(report.written) > _SLICE
        for name, observe in self.observers.items():
            with self._isolated(name):
                waiting = observe(report)
                if waiting is not None:
                    await waiting
            if large:
                await asyncio.sleep(0)  # each may take some milliseconds for everything


class Isolation:
    """Keeps the failure of an observer from everything else, and logs it once a minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._quiet_until: dict[str, float] = {}

    @contextmanager
    def of(self, observer: str) -> Iterator[None]:
        """Log any Exception of the block, by the name of the observer."""
        try:
            yield
        except Exception:
            now = self._clock.time()
            if now >= self._quiet_until.get(observer, now):
                self._quiet_until[observer] = now + _COMPLAINT_SECONDS
                log.exception("%s failed to take a report; syncs are not affected", observer)


class EndpointCounts:
    """Counts over all ServicePlans, kept up to date by the plans that changed."""

    def __init__(self, in_force: InForce) -> None:
        self._plans = in_force.plans
        self._cursor = in_force.log.cursor()
        self._without_local: dict[PlanKey, tuple[TrafficPolicy, ...]] = {}
        self._counts: Counter[tuple[TrafficPolicy, Family]] = Counter()
        self._without_any: set[PlanKey] = set()
        self._health_ports: dict[PlanKey, int] = {}
        self._ready_here: dict[PlanKey, int] = {}
        self.health_changes = 0
        """How often a health check node port or its answer changed."""

    async def observe(self, _: object = None) -> None:
        """Count the plans in force that changed; yields to the loop."""
        names, revision = self._cursor.changed()
        for number, key in enumerate(names, 1):
            if isinstance(key, PlanKey):
                self.count(key, self._plans.get(key))
            if number % _SLICE == 0:
                await asyncio.sleep(0)
        self._cursor.move(revision)

    def count(self, key: PlanKey, plan: ServicePlan | None) -> None:
        """Count a plan that is new or differs, or forget a removed one."""
        self._without_any.discard(key)
        if plan is None:
            self._put(key, (), 0, 0)
            return
        if not plan.reachable:
            self._without_any.add(key)
        self._put(key, without_local(plan), plan.health_check_node_port, plan.ready_here)

    def _put(
        self, key: PlanKey, policies: tuple[TrafficPolicy, ...], health_port: int, ready: int
    ) -> None:
        self._counts.subtract((p, key.family) for p in self._without_local.pop(key, ()))
        self._counts.update((policy, key.family) for policy in policies)
        if policies:
            self._without_local[key] = policies
        # The answers of health checks change with the port or the number of ready endpoints here.
        before = self._health_ports.pop(key, 0), self._ready_here.pop(key, 0)
        self.health_changes += before != (health_port, ready)
        if health_port:
            self._health_ports[key] = health_port
            self._ready_here[key] = ready

    def no_local_endpoints(self, policy: TrafficPolicy, family: Family) -> int:
        """Count the ServicePorts with endpoints, none here, and a Local policy (behaviour 14)."""
        return self._counts[policy, family]

    def without_endpoints(self, family: Family) -> int:
        """Count the ServicePorts that no endpoint serves, be it here or elsewhere."""
        return sum(key.family is family for key in self._without_any)

    def health_ports(self, family: Family) -> dict[ObjectName, int]:
        """Return the health check node ports by Service, in one family."""
        return _by_service(self._health_ports, family)

    def ready_here(self, family: Family) -> dict[ObjectName, int]:
        """Return the ready endpoints here of those Services, in one family (behaviour 4)."""
        return _by_service(self._ready_here, family)


def _by_service(numbers: Mapping[PlanKey, int], family: Family) -> dict[ObjectName, int]:
    return {key.name.object_name: n for key, n in numbers.items() if key.family is family}


def without_local(plan: ServicePlan) -> tuple[TrafficPolicy, ...]:
    """Return the policies under which a ServicePort has endpoints elsewhere but none here.

    In this case compile drops traffic from outside; otherwise it refuses it.
    """
    dropped = {
        frontend.kind is FrontendKind.CLUSTER_IP
        for frontend in plan.frontends
        if frontend.external.verdict is Verdict.DROP
    }
    return tuple(p for p in _POLICIES if (p == "internal") in dropped)


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
        self._store = store
        self._metrics = metrics
        self._endpoints = counts
        self._objects = objects
        self._wall = wall
        self._started = wall()
        self.lags = Lags()
        self._rules: Rules = Counter()
        self._shown: dict[str, tuple[int, int]] = {}
        """Changes seen and changes synced, by kind, as the metrics show them."""
        self._synced: Counter[str] = Counter()

    def use_objects(self, objects: Callable[[], Objects]) -> None:
        """Count other kernel objects: another mode serves."""
        self._objects = objects
        self._rules = Counter()

    def queued(self, families: Iterable[Family]) -> None:
        """Count the changes that wait."""
        for family in families:
            self._metrics.last_queued_time(family.kubernetes).set(self._wall())
        self._count_changes()

    def observe_changes(self, _: SyncReport) -> None:
        """Count all changes so far as synced."""
        self._synced = Counter(self._store.seen)
        self._count_changes()

    def _count_changes(self) -> None:
        metrics = self._metrics
        for kind, total, pending in (
            ("Service", metrics.service_changes, metrics.service_changes_pending),
            ("EndpointSlice", metrics.endpoint_changes, metrics.endpoint_changes_pending),
        ):
            seen, synced = self._store.seen[kind], self._synced[kind]
            if self._shown.get(kind) == (seen, synced):
                continue
            before, _ = self._shown.get(kind, (0, 0))
            total().inc(seen - before)
            pending().set(seen - synced)
            self._shown[kind] = seen, synced

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

    async def observe_gauges(self, report: SyncReport) -> None:
        """Update everything else; yields to the loop."""
        metrics, result = self._metrics, report.result
        # Refused batches count even if the sync had nothing to write in the end.
        families = report.state.plan.settings.families
        refused = report.refused_batches
        if any(refused):
            for family in families:
                metrics.count_refused(family, full=refused.full, partial=refused.partial)
        if result is None:
            return
        # Durations and times, by family.
        extent = Metrics.full_sync_seconds if report.compared else Metrics.partial_sync_seconds
        for family in families:
            label = family.kubernetes
            metrics.last_sync_time(label).set(self._wall())
            metrics.sync_seconds(label).observe(result.seconds)
            if (of_extent := metrics.find(extent)) is not None:
                of_extent(label).observe(result.seconds)
            metrics.without_endpoints(label).set(self._endpoints.without_endpoints(family))
            for policy in _POLICIES:
                count = self._endpoints.no_local_endpoints(policy, family)
                metrics.no_local_endpoints(policy, label).set(count)
        if spec_of(report.state.mode).counts_rules:
            await self._count_rules(report)
        # The outcome of the sync, and the current problems.
        severities = Counter(finding.severity for finding in report.state.findings)
        severities.update(report.state.unlisted)
        for severity in Severity:
            metrics.findings(severity.value).set(severities[severity])
        for phase, seconds in result.phases.items():
            metrics.phase_seconds(phase).observe(seconds)
        metrics.syncs(result.reason, "refused" if result.refused else "ok").inc()
        metrics.kernel_objects().set(report.state.objects)
        metrics.refused_service_ports().set(result.refused)
        for change in ("added", "changed", "removed"):
            metrics.kernel_writes(change).inc(getattr(result, change))

    async def _count_rules(self, report: SyncReport) -> None:
        """Count iptables rules by table: all of them after a comparison, else the growth."""
        from steersman.netfilter import rule_text  # noqa: PLC0415 - others have no iptables rules

        if len(report.written) <= _SLICE:
            written, growth = rule_text.count_written(report.written.diff)
        else:
            written, growth = await asyncio.to_thread(rule_text.count_written, report.written.diff)
        # After a comparison, count all objects in force again: other programs may have changed
        # them. Otherwise the counts grow by the objects written.
        if report.compared and (report.written or not self._rules):
            rules: Rules = Counter()
            items = iter(self._objects())
            while some := tuple(islice(items, _SLICE)):
                rules.update(rule_text.count_rules(some))
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
    """Return how long changes took from their cause until they are in force.

    Args:
        trigger_times: annotations of slices, RFC 3339; invalid ones are left out (behaviour 4).
        now: seconds since 1970; a cause that is later (a clock that is ahead) took no time.
        started: when the process started; older causes say nothing about it.
    """
    found = []
    for text in trigger_times:
        try:
            when = datetime.fromisoformat(text)
        except ValueError:
            continue
        if when.tzinfo is not None and when.timestamp() > started:
            found.append(max(0.0, now - when.timestamp()))
    return found


class HealthCheckUpdater:
    """Keeps the health check servers up to date, beside the syncs: closing one takes time."""

    def __init__(
        self,
        servers: Mapping[Family, ServiceHealthServers],
        counts: EndpointCounts,
        isolated: Callable[[str], Any],
    ) -> None:
        self._servers = servers
        self._counts = counts
        self._isolated = isolated
        self._wanted = self._served = (0, NodeSettings())
        self._checks: Mapping[Family, tuple[Mapping[ObjectName, int], Mapping[ObjectName, int]]]
        self._checks = {}
        """Ports and ready endpoints by Service."""
        self._due = asyncio.Event()

    def observe(self, report: SyncReport) -> None:
        """Update the servers soon, if something changed for them or a port failed before."""
        self._wanted = (self._counts.health_changes, report.state.plan.settings)
        if self._served != self._wanted:
            self._checks = {
                family: (self._counts.health_ports(family), self._counts.ready_here(family))
                for family in self._servers
            }
            self._due.set()

    async def run(self) -> None:
        """Update the servers until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            wanted, checks = self._wanted, self._checks
            with self._isolated("health checks"):
                for family, servers in self._servers.items():
                    await servers.sync(*checks[family])
                if not any(servers.failing for servers in self._servers.values()):
                    self._served = wanted  # else they are retried after the next sync


class FindingsLog:
    """Logs each Finding once when it appears, and once when it is resolved."""

    def __init__(self) -> None:
        self._listed: frozenset[Finding] = frozenset()
        self._complete = True

    def observe(self, report: SyncReport) -> None:
        """Log the Findings of a report."""
        self.update(report.state.findings, report.state.unlisted)

    def update(
        self, findings: tuple[Finding, ...], unlisted: Mapping[Severity, int] | None = None
    ) -> None:
        """Log the difference to the Findings of the last call.

        Args:
            findings: the listed Findings.
            unlisted: number of further Findings, by severity.
        """
        now, before = frozenset(findings), self._listed
        complete = not unlisted
        gone = "resolved" if complete and self._complete else "no longer listed"
        self._listed, self._complete = now, complete
        if now == before:
            return
        new, old = sorted(now - before), sorted(before - now)
        for finding in new[:_FINDING_LINES]:
            level = logging.ERROR if finding.severity is Severity.ERROR else logging.WARNING
            log.log(level, "%s", finding)
        for finding in old[:_FINDING_LINES]:
            log.info("%s: %s", gone, finding)
        more = len(new[_FINDING_LINES:]), len(old[_FINDING_LINES:])
        if any(more):
            log.warning("%d more new Findings, %d more %s: see /state", *more, gone)
