"""The process's own servers: health, metrics and health check node ports; and its Events."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily

from steersman.config import ProxyConfig, configz, enabled, flagz
from steersman.config.arguments import Value
from steersman.host.facts import hostname
from steersman.model.addresses import split_host_port
from steersman.model.kube import Node, ObjectMeta
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.run.events import Recorder
from steersman.run.health import ProxyHealth
from steersman.run.health_server import ServiceHealthServers, now, proxy_health_app
from steersman.run.http import keep_serving
from steersman.run.klog import Logging
from steersman.run.loop import MeasuredLoop
from steersman.run.machine import Machine
from steersman.run.metrics import Metrics, conntrack_usage, nfacct_packets
from steersman.run.metrics_server import Pages, metrics_app
from steersman.run.mode_metrics import ModeMetrics
from steersman.run.report import state_json
from steersman.run.startup import cluster_access
from steersman.run.sync import Sync
from steersman.source.poster import ApiEventPoster, NoEvents
from steersman.source.stats import SourceStats
from steersman.source.store import Store

_LAST_EVENTS = 5.0  # seconds that a process which fails waits for them to be posted
_ANY = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}


class Servers:
    """Builds the servers, and serves what the State says."""

    def __init__(
        self,
        config: ProxyConfig,
        flags: Mapping[str, Value],
        node_name: str,
        store: Store,
        logs: Logging,
        *,
        machine: Machine,
    ) -> None:
        """Take the configuration; nothing is bound before `tasks`."""
        self.config = config
        self._flags = flags
        self._node_name = node_name
        self._store = store
        self._logs = logs
        self._started = time.time()
        self._checks: dict[Family, ServiceHealthServers] = {}
        self.metrics = Metrics(config.mode)
        if sys.platform != "win32":
            self.metrics.ask(conntrack_usage(machine.conntrack_usage))
        self.health = ProxyHealth(2 * config.sync_period.seconds)
        standalone = bool(config.steersman.manifests)
        poster = NoEvents() if standalone else ApiEventPoster(cluster_access(config))
        self.recorder = Recorder(poster, node_name, hostname=hostname())
        self._without_node = Node(ObjectMeta(name=node_name)) if standalone else None

    def use(self, config: ProxyConfig) -> None:
        """Take a changed configuration: shown, and what of it decides about health."""
        self.config = config
        self.health.timeout = 2 * config.sync_period.seconds

    def watch(self, sync: Sync, stats: SourceStats | None) -> None:
        """Take whose State is served."""
        self._sync = sync
        self._stats = stats
        if stats is not None:
            self.metrics.ask(partial(_watch_errors, stats))
        self._mode_metrics = ModeMetrics(
            sync.mode, self._plans, lambda: self.config.steersman.metrics_per_service
        )
        self.metrics.ask(nfacct_packets(sync.mode.packets))
        loop = asyncio.get_running_loop()
        if isinstance(loop, MeasuredLoop):
            self.metrics.ask(loop.holds.collect)

    def health_checks(
        self, settings: Callable[[], NodeSettings]
    ) -> Mapping[Family, ServiceHealthServers]:
        """Build the servers of the health check node ports, by family."""
        self._checks = {
            family: ServiceHealthServers(
                partial(_listening_addresses, family, settings),
                lambda: self.health.healthy(now()),
                self.recorder.health_check_failed,
            )
            for family in Family
        }
        return self._checks

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return what is to run for as long as the process does, by name."""
        config = self.config
        servers = {
            "healthz": (config.healthz_bind_address, self._health_app, "ProxierHealthcheck"),
            "metrics": (config.metrics_bind_address, self._metrics_app, "MetricServer"),
        }
        work: dict[str, Coroutine[Any, Any, None]] = {"events": self.recorder.run()}
        for name, (address, app, word) in servers.items():
            if address:
                host, port = split_host_port(address)
                work[name] = keep_serving(
                    app,
                    host,
                    port,
                    what=f"{name} server",
                    on_failure=partial(self._bind_failed, f"FailedToStart{word}", f"Start{word}"),
                    hard_fail=config.bind_address_hard_fail,
                )
        return work

    async def tell_the_rest(self) -> None:
        """Wait a little until every Event is posted: why the process fails is one of them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_EVENTS):
                await self.recorder.flush()

    async def close(self) -> None:
        """Stop listening on health check node ports."""
        for checks in self._checks.values():
            await checks.close()

    def _bind_failed(self, reason: str, action: str, message: str) -> None:
        self.recorder.node("Warning", reason, action, message)

    def _node(self) -> Node | None:
        return self._store.snapshot.node or self._without_node

    def _health_app(self) -> Any:
        return proxy_health_app(
            self.health,
            self._node,
            ready=lambda: self._sync.state.result is not None,
            count=lambda name, code: self.metrics.add(f"proxy_{name}_total", str(code)),
        )

    def _metrics_app(self) -> Any:
        config = self.config
        flags = self._flags
        return metrics_app(
            Pages(
                self.metrics,
                config.mode,
                configz=lambda: configz(self.config),
                flags=(lambda: flagz(flags))
                if enabled(config.feature_gates, "ComponentFlagz")
                else None,
                state=self._state,
                more=self._mode_metrics.default,
                services=self._mode_metrics.services,
                healthy=lambda: self.health.healthy(now()),
                statusz=enabled(config.feature_gates, "ComponentStatusz"),
                profiling=config.enable_profiling,
                set_verbosity=self._set_verbosity,
                started=self._started,
            )
        )

    def _plans(self) -> Collection[ServicePlan]:
        return self._sync.state.plan.services.values()

    def _state(self) -> Iterator[bytes]:
        return state_json(self._sync.state, self._stats, time.time(), self._started)

    def _set_verbosity(self, verbosity: int) -> None:
        self._logs.verbosity = verbosity


def _listening_addresses(family: Family, settings: Callable[[], NodeSettings]) -> list[str]:
    """Where health check node ports of a family are served (behaviour 13)."""
    if family not in settings().families:
        return []
    addresses = settings().family(family).node_port_addresses
    return [_ANY[family]] if addresses is None else list(addresses)


def _watch_errors(stats: SourceStats) -> Iterable[Metric]:
    family = CounterMetricFamily(
        "steersman_watch_errors",
        "Number of failed requests and watches.",
        labels=("kind", "reason"),
    )
    for kind, counts in tuple(stats.kinds.items()):
        for reason, count in tuple(counts.errors.items()):
            family.add_metric((kind, reason), count)
    yield family
