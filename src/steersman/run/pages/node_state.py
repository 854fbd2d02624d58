"""Makes the NodeState of this process, the one description that pages and metrics show."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

import msgspec

from steersman import __version__
from steersman.compile.node import zone_of
from steersman.config import ProxyConfig
from steersman.host.usage import cpu_seconds, resident_bytes
from steersman.model.drift import Drift
from steersman.model.findings import Finding, Severity, worst
from steersman.model.node_state import NodeState, SourceStatus
from steersman.run.pages.conditions import ConditionLog
from steersman.run.pages.history import Lags
from steersman.run.sync.state import SyncResult
from steersman.run.sync.sync import Sync
from steersman.source.stats import SourceStats

_FINDINGS = (50, 16_000)
"""Number and characters of the listed Findings."""
_LONGEST_FAILURE = 1000
"""Characters of the last failure."""
_CPU_SAMPLES = 3
"""Samples of the CPU time that are kept."""
_CORES = os.cpu_count() or 1


class NodeStates:
    """Describes the process whenever a page asks. A page sets the parts that it alone knows."""

    def __init__(
        self,
        sync: Callable[[], Sync],
        config: Callable[[], ProxyConfig],
        stats: SourceStats | None,
        healthy: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = cpu_seconds,
    ) -> None:
        """Describe a process that starts now.

        Args:
            stats: of the connection to the API server; None with manifests.
            clock: monotonic seconds, also that of `stats`.
        """
        self._sync = sync
        self._config = config
        self._stats = stats
        self._healthy = healthy
        self._clock = clock
        self._cpu = cpu
        self.started = time.time()
        self._conditions = ConditionLog(self.started)
        self._cpu_samples = deque([(clock(), cpu())], _CPU_SAMPLES)
        self._worst: tuple[tuple[Finding, ...], tuple[int, int], tuple[Finding, ...]] = (
            (),
            (0, 0),
            (),
        )
        """All Findings of the last state, its limits, and the worst of them within these."""
        self.failure = ""
        """Why the last sync failed; "" if it did not."""
        self.lags = Lags()
        self.drift: Callable[[], tuple[int, Drift | None]] = lambda: (0, None)
        """Returns how often drift was repaired, and the last one."""
        self.trouble: Callable[[], tuple[Mapping[Severity, int], tuple[Finding, ...]]]
        self.trouble = lambda: ({}, ())
        """Returns the number of Services in trouble by severity, and the worst of them."""
        self.rates: Callable[[], tuple[float | None, float | None]] = lambda: (None, None)
        """Returns new and failed connections per second, as far as counted already."""

    def failed(self, why: str) -> None:
        """Show that the last sync failed, until one succeeds."""
        self.failure = why

    def sample_cpu(self) -> None:
        """Measure the share of a core from the sample before the last one on."""
        self._cpu_samples.append((self._clock(), self._cpu()))

    def now(self, limits: tuple[int, int] = _FINDINGS) -> NodeState:
        """Return the state now.

        Args:
            limits: number and characters of the Findings that it lists, the worst ones.
        """
        sync, config = self._sync(), self._config()
        state, store, settings = sync.state, sync.store, sync.state.plan.settings
        result = state.result or SyncResult()
        repairs, drift = self.drift()
        trouble_counts, troubled = self.trouble()
        connections, failed = self.rates()
        now, (at, before) = self._clock(), self._cpu_samples[0]
        # Before the first sync there are only the Findings of the sources.
        findings = state.findings if state.result else store.findings
        if (findings, limits) != self._worst[:2]:  # sorted only if they are others
            self._worst = findings, limits, worst(findings, *limits)
        counts = Counter(finding.severity for finding in findings)
        counts.update(state.unlisted)
        made = NodeState(
            node=sync.planner.config.node_name,
            mode=state.mode,
            variant=sync.mode.variant,
            version=__version__,
            pid=os.getpid(),
            started=self.started,
            now=time.time(),
            revision=state.revision,
            synced_at=state.at,
            sync_reason=result.reason,
            sync_seconds=round(result.seconds, 6),
            phases={phase: round(seconds, 6) for phase, seconds in result.phases.items()},
            lag=self.lags.last,
            lag_p99=self.lags.p99(now),
            owes=sync.owes,
            waiting=self._waiting(),
            failure=self.failure[:_LONGEST_FAILURE],
            healthy=self._healthy(),
            source=self._source(now),
            services=len(store.snapshot.services),
            service_ports=len(state.plan.services),
            endpoint_slices=store.slices,
            objects=state.objects,
            refused=result.refused,
            findings=self._worst[2],
            finding_counts=counts,
            troubled=troubled,
            trouble_counts=trouble_counts,
            drift=drift,
            repairs=repairs,
            cpu=round((self._cpu() - before) / (now - at), 4) if now > at else 0.0,
            cores=_CORES,
            memory=resident_bytes(),
            connections=connections,
            failed=failed,
            families=tuple(family.kubernetes for family in settings.families),
            zone=zone_of(store.snapshot.node),
            sync_period=config.sync_period.seconds,
            min_sync_period=config.min_sync_interval.seconds,
        )
        return msgspec.structs.replace(made, conditions=self._conditions.update(made))

    def _source(self, now: float) -> SourceStatus:
        if (stats := self._stats) is None:
            return SourceStatus()
        return SourceStatus(
            "apiserver",
            stats.server,
            stats.connected,
            stats.failovers,
            dict(stats.errors()),
            None if stats.last_event is None else now - stats.last_event,
        )

    def _waiting(self) -> str:
        """Say what the first sync waits for; "" once it has reached the kernel."""
        sync, stats = self._sync(), self._stats
        if sync.state.result is not None or self.failure:
            return ""
        if stats is not None and not stats.connected:
            return f"the API server {stats.server}"
        if stats is not None and sync.store.snapshot.node is None:
            name = sync.planner.config.node_name
            return f'node "{name}" to exist (--hostname-override gives its name)'
        if not sync.store.synced:
            return "the first lists of Services and EndpointSlices"
        return "the addresses or PodCIDRs of this node, or for the first sync to end"
