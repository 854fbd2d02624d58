"""The process's own servers: health, metrics and health check node ports; and its Events."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from steersman.config import ProxyConfig, configz, enabled, flagz
from steersman.config.arguments import Value
from steersman.host.facts import hostname
from steersman.model.addresses import split_host_port
from steersman.model.kube import Node, ObjectMeta
from steersman.model.names import Family
from steersman.model.plan import ServicePlan
from steersman.run.observe.events import EventPoster, Recorder
from steersman.run.observe.metrics import Metrics
from steersman.run.observe.mode_metrics import ModeMetrics
from steersman.run.observe.prometheus import Metric
from steersman.run.observe.scraped import (
    conntrack_usage,
    feature_gates,
    process_state,
    source_state,
)
from steersman.run.pages.node_state import NodeStates
from steersman.run.pages.state_page import state_json
from steersman.run.process.event_loop import MeasuredLoop
from steersman.run.process.instance import Instance, MachineInstance
from steersman.run.process.klog import ProcessLog
from steersman.run.process.machine import Machine
from steersman.run.serve.health import ProxyHealth, ServiceHealthServers, now, proxy_health_app
from steersman.run.serve.http import App, Page, keep_serving
from steersman.run.serve.metrics_server import Pages, metrics_app
from steersman.run.sync.sync import Sync
from steersman.source.pace import Timing
from steersman.source.stats import SourceStats

_LAST_EVENTS = 5.0  # seconds that a failing process waits until its Events are posted
_ANY = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}


class Servers:
    """Builds the servers of a process."""

    def __init__(
        self,
        config: ProxyConfig,
        flags: Mapping[str, Value],
        node_name: str,
        sync: Sync,
        *,
        stats: SourceStats | None,
        poster: EventPoster,
        logs: ProcessLog,
        machine: Machine,
    ) -> None:
        """Create the servers; nothing is bound before `tasks`.

        Args:
            stats: connection to the API server; None with manifests.
            poster: creates Events.
            logs: its verbosity can be set by a request.
            machine: tells how full the conntrack table is.
        """
        self.config = config
        self._flags = flags
        self._sync = sync
        self._logs = logs
        self._without_node = None if stats else Node(ObjectMeta(name=node_name))
        timing = Timing()
        self.recorder = Recorder(
            poster,
            node_name,
            hostname=hostname(),
            spread=lambda: min(stats.nodes * timing.list_spacing, timing.longest) if stats else 0.0,
        )
        self.health = ProxyHealth(2 * config.sync_period.seconds)
        self.states = NodeStates(
            lambda: self._sync, lambda: self.config, stats, lambda: self.health.healthy(now())
        )
        self.health_checks = {
            family: ServiceHealthServers(
                partial(self._listening_addresses, family),
                lambda: self.health.healthy(now()),
                self.recorder.health_check_failed,
            )
            for family in Family
        }
        self._mode_metrics = ModeMetrics(
            sync.mode, self._plans, lambda: self.config.steersman.metrics_per_service
        )
        self.metrics = Metrics(config.mode)
        if sys.platform != "win32":
            self.metrics.on_scrape(lambda: conntrack_usage(machine.conntrack_usage))
        if stats is not None:
            self.metrics.on_scrape(lambda: source_state(stats, time.monotonic()))
        self.metrics.on_scrape(lambda: feature_gates(self.config.feature_gates))
        self._has_socket = isinstance(machine.instance, Instance | MachineInstance)
        """Whether this process is the instance of its node, which has the local socket."""
        self.pages: dict[tuple[str, str], Page] = {}
        """Of the local socket, by method and path; complete before `tasks`."""
        self.background: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        """Work of pages that goes on as long as the process, by name."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, MeasuredLoop):
            self.metrics.on_scrape(loop.holds.collect)

    def use(self, config: ProxyConfig) -> None:
        """Use a changed configuration: it is shown, and sets the timeout of health."""
        self.config = config
        self.health.timeout = 2 * config.sync_period.seconds

    def use_sync(self, sync: Sync) -> None:
        """Show another mode, and the State of its syncs."""
        self._sync = sync
        self._mode_metrics.use_mode(sync.mode)
        self.metrics.use_mode(sync.mode.name)

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return coroutines that run as long as the process, by name."""
        config = self.config
        servers = {
            "healthz": (config.healthz_bind_address, self._health_app, "ProxierHealthcheck"),
            "metrics": (config.metrics_bind_address, self._metrics_app, "MetricServer"),
        }
        work: dict[str, Coroutine[Any, Any, None]] = {"events": self.recorder.run()}
        state = config.steersman.state
        if self._has_socket:
            work["local socket"] = _local_server(self.pages)
        if state.bind_address:
            from steersman.run.serve.state_server import serve_state  # noqa: PLC0415 - few have one

            reason, action = "FailedToStartStateServer", "StartStateServer"
            work["state server"] = serve_state(
                state,
                self.pages,
                on_failure=partial(self.recorder.node, "Warning", reason, action),
                hard_fail=config.bind_address_hard_fail,
            )
        if self._has_socket or state.bind_address:
            work |= {name: begin() for name, begin in self.background.items()}
        for name, (address, app, word) in servers.items():
            if address:
                host, port = split_host_port(address)
                reason, action = f"FailedToStart{word}", f"Start{word}"
                work[name] = keep_serving(
                    app,
                    host,
                    port,
                    what=f"{name} server",
                    on_failure=partial(self.recorder.node, "Warning", reason, action),
                    hard_fail=config.bind_address_hard_fail,
                )
        return work

    async def flush_events(self) -> None:
        """Wait a little until every Event is posted: one may tell why the process fails."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_EVENTS):
                await self.recorder.flush()

    async def close(self) -> None:
        """Stop listening on health check node ports."""
        for checks in self.health_checks.values():
            await checks.close()

    def _plans(self) -> Collection[ServicePlan]:
        return self._sync.state.plan.services.values()

    def _health_app(self) -> App:
        counters = {"healthz": self.metrics.healthz, "livez": self.metrics.livez}
        return proxy_health_app(
            self.health,
            lambda: self._sync.store.snapshot.node or self._without_node,
            ready=lambda: self._sync.state.result is not None,
            count=lambda name, code: counters[name](str(code)).inc(),
        )

    def _metrics_app(self) -> App:
        config = self.config
        flagz_on = enabled(config.feature_gates, "ComponentFlagz")
        return metrics_app(
            Pages(
                self.metrics,
                lambda: self._sync.mode.name,
                configz=lambda: configz(self.config),
                flags=(lambda: flagz(self._flags)) if flagz_on else None,
                state=lambda: state_json(self.states.now(), self._sync.state),
                more=self._more_metrics,
                services=self._mode_metrics.services,
                healthy=lambda: self.health.healthy(now()),
                statusz=enabled(config.feature_gates, "ComponentStatusz"),
                profiling=config.enable_profiling,
                set_verbosity=self._logs.set_verbosity,
                started=self.states.started,
            )
        )

    async def _more_metrics(self) -> Iterable[Metric]:
        """Collect what only the event loop may read: the registry is read in a thread."""
        found = process_state(self.states.now(), self.health.waiting(now()))
        return (*found, *await self._mode_metrics.default())

    def _listening_addresses(self, family: Family) -> list[str]:
        """Return the addresses for health check node ports of a family (behaviour 13)."""
        settings = self._sync.state.plan.settings
        if family not in settings.families:
            return []
        addresses = settings.family(family).node_port_addresses
        return [_ANY[family]] if addresses is None else list(addresses)


def _local_server(pages: Mapping[tuple[str, str], Page]) -> Coroutine[Any, Any, None]:
    """Return the work of the server for commands on this node; only its own system's is loaded."""
    if sys.platform == "win32":
        from steersman.run.serve.local_port import ControlPort  # noqa: PLC0415

        return ControlPort(pages).run()
    from steersman.run.serve.control import ControlSocket  # noqa: PLC0415

    return ControlSocket(pages).run()
