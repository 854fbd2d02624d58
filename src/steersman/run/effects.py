"""What the world outside is told after each sync: metrics, health, health checks, conntrack.

In SPEC 7's order. Nothing here decides about traffic, and nothing here can fail a sync.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from steersman.compile.conntrack import closes_connections
from steersman.model.kube import Service
from steersman.model.names import Family, ObjectName
from steersman.model.plan import Severity
from steersman.modes.iptables.count import Rules, count_rules, count_written
from steersman.run.health import Moment, ProxyHealth
from steersman.run.health_server import ServiceHealthServers, now
from steersman.run.metrics import Metrics
from steersman.run.outcome import (
    Tally,
    clean_conntrack,
    deleting,
    health_counts,
    programming_seconds,
)
from steersman.run.state import State, Synced, SyncResult
from steersman.source.store import Store

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
        allow_external_ips: bool = True,
        mode: object = None,
        wall: Callable[[], float] = time.time,
        moment: Callable[[], Moment] = now,
    ) -> None:
        """Take who is to be told; `servers` serve the health check node ports of each family.

        `mode` is asked to forget stale connections, where it has some (modes/base.py).
        """
        self._store = store
        self._metrics = metrics
        self._health = health
        self._servers = servers
        self._allow_external_ips = allow_external_ips
        self._delete = deleting(mode)
        self._wall = wall
        self._moment = moment
        self._started = wall()
        self._tally = Tally()
        self._rules: Rules = Counter()
        self._seen: Counter[str] = Counter()
        self._synced: Counter[str] = Counter()
        self._to_clean = asyncio.Event()
        self._stale: set[ObjectName] | None = set()
        """Services whose conntrack entries are to be looked at; None for all."""
        self._state = State()

    def queued(self, families: Iterable[Family]) -> None:
        """Note that a change waits to be synced."""
        for family in families:
            self._health.queued(family, self._moment())
            label = family.kubernetes
            name = "sync_proxy_rules_last_queued_timestamp_seconds"
            self._metrics.set(name, self._wall(), label)
        self._count_changes()

    def started(self, families: Iterable[Family]) -> None:
        """Note that the loop runs: healthy until a change waits too long (SPEC 7)."""
        for family in families:
            self._health.updated(family, self._moment())

    def refused(self, families: Iterable[Family], partial: bool) -> None:
        """Count a batch that the kernel refused; `partial`: one of only what had changed."""
        for family in families:
            self._metrics.count_refusal(family, partial=partial)

    async def after(self, synced: Synced, objects: Iterable[tuple[Any, Any]]) -> None:
        """Tell of a successful sync; `objects` is everything in force (read when needed)."""
        families = synced.state.plan.settings.families
        for change in synced.plans:
            self._tally.update(change.changed, change.removed)
        self._latency(synced, families)
        if synced.result is not None:
            self._gauges(synced, synced.result, families, objects)
        self._synced = Counter(self._store.seen)
        self._count_changes()
        for family in families:
            self._health.updated(family, self._moment())
        await self._health_checks(synced)
        self._note_conntrack(synced)

    def _latency(self, synced: Synced, families: Iterable[Family]) -> None:
        for changes in synced.changes:
            seconds = programming_seconds(changes.trigger_times, self._wall(), self._started)
            for value in seconds:
                for family in families:
                    name = "network_programming_duration_seconds"
                    self._metrics.observe(name, value, family.kubernetes)

    def _gauges(
        self,
        synced: Synced,
        result: SyncResult,
        families: Iterable[Family],
        objects: Iterable[tuple[Any, Any]],
    ) -> None:
        metrics = self._metrics
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
            self._count_rules(synced, objects)
        self._ours(synced, result)

    def _count_rules(self, synced: Synced, objects: Iterable[tuple[Any, Any]]) -> None:
        written, growth = count_written(synced.written)
        if synced.whole:
            self._rules = count_rules(objects)
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
            seen = self._store.seen[kind]
            name = f"sync_proxy_rules_{word}_changes"
            self._metrics.add(f"{name}_total", amount=seen - self._seen[kind])
            self._metrics.set(f"{name}_pending", seen - self._synced[kind])
            self._seen[kind] = seen

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

    async def _health_checks(self, synced: Synced) -> None:
        node_name = synced.state.plan.settings.node_name
        for family, servers in self._servers.items():
            ports = self._tally.health_ports(family)
            counts = health_counts(synced.state.snapshot, ports, family, node_name)
            await servers.sync(ports, counts)

    # Conntrack: in a task of its own, as a large table takes longer than a sync may

    def _note_conntrack(self, synced: Synced) -> None:
        """Have stale entries deleted now that the rules are in (SPEC 12).

        Where connections end in this process, entries lead to it; the mode looks after them.
        """
        if synced.state.plan.settings.traits.hides_clients:
            return
        if synced.result is not None and synced.result.reason == "start":
            self._stale = None
        elif self._stale is not None:
            services = synced.state.snapshot.services
            for changes in synced.changes:
                self._stale.update(
                    name
                    for name in changes.services
                    if changes.udp or _closes_connections(services.get(name))
                )
        if self._stale is None or self._stale:
            self._state = synced.state
            self._to_clean.set()

    async def clean_conntrack(self) -> None:
        """Delete stale entries whenever a sync asked for it, until cancelled."""
        while True:
            await self._to_clean.wait()
            self._to_clean.clear()
            names, self._stale = self._stale, set()
            await clean_conntrack(
                self._state.snapshot,
                self._state.plan.settings.families,
                self._metrics,
                names=names,
                allow_external_ips=self._allow_external_ips,
                delete=self._delete,
            )


def _closes_connections(service: Service | None) -> bool:
    return service is not None and closes_connections(service)
