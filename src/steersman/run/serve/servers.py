"""The process's own servers: health, metrics and health check node ports; and its Events."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from steersman.config import ProxyConfig, configz, enabled, flagz
from steersman.config.arguments import Value
from steersman.host.facts import hostname
from steersman.model.addresses import split_host_port
from steersman.model.errors import BusyError
from steersman.model.findings import listed
from steersman.model.kube import Node, ObjectMeta
from steersman.model.names import Family, ObjectName
from steersman.model.plan import ServicePlan
from steersman.run.observe.events import Recorder
from steersman.run.observe.metrics import Metrics
from steersman.run.observe.mode_metrics import ModeMetrics
from steersman.run.observe.prometheus import Metric
from steersman.run.observe.scraped import (
    conntrack_usage,
    nfacct_packets,
    process_state,
    source_state,
)
from steersman.run.pages.names_page import names
from steersman.run.pages.node_state import NodeStates
from steersman.run.pages.state_page import state_json
from steersman.run.pages.stats_wire import encode_stats
from steersman.run.pages.world_wire import Head, concerning, encode_world
from steersman.run.process.event_loop import MeasuredLoop
from steersman.run.process.klog import ProcessLog
from steersman.run.process.machine import Machine
from steersman.run.process.startup import cluster_access
from steersman.run.serve.control import ControlSocket
from steersman.run.serve.health import ProxyHealth, ServiceHealthServers, now, proxy_health_app
from steersman.run.serve.http import Answer, App, Page, Request, keep_serving
from steersman.run.serve.metrics_server import Pages, metrics_app
from steersman.run.serve.state_server import serve_state
from steersman.run.sync.sync import Sync
from steersman.source.apiserver import ApiEventPoster, NoEvents, fetch_nodes
from steersman.source.base import SourceStats, Timing
from steersman.source.kubeconfig import KubeconfigError
from steersman.source.packed import unpacked
from steersman.source.trimmed import trimmed_node
from steersman.source.wire import ApiError

_LAST_EVENTS = 5.0  # seconds that a failing process waits until its Events are posted
_NO_SERVICE = (
    "there is no Service {} on this node; it serves none that is headless or another proxy's\n"
)
_JSON, _MSGPACK = "application/json", "application/msgpack"
_ANY = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}


class Servers:
    """Builds the servers, and serves the State."""

    def __init__(
        self,
        config: ProxyConfig,
        flags: Mapping[str, Value],
        node_name: str,
        sync: Sync,
        *,
        stats: SourceStats | None,
        logs: ProcessLog,
        machine: Machine,
    ) -> None:
        """Create the servers; nothing is bound before `tasks`.

        Args:
            config: the configuration in force.
            flags: the flags of the command line, for `/flagz`.
            node_name: this node.
            sync: has the State that is served.
            stats: connection to the API server; None with manifests.
            logs: its verbosity can be set by a request.
            machine: tells how full the conntrack table is.
        """
        self.config = config
        self._flags = flags
        self._sync = sync
        self._stats = stats
        self._logs = logs
        standalone = bool(config.steersman.manifests)
        poster = NoEvents() if standalone else ApiEventPoster(cluster_access(config))
        self._without_node = Node(ObjectMeta(name=node_name)) if standalone else None
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
            sync.mode,
            self._plans,
            lambda: self.config.steersman.metrics_per_service,
        )
        self.metrics = Metrics(config.mode)
        if sys.platform != "win32":
            self.metrics.on_scrape(conntrack_usage(machine.conntrack_usage))
        if stats is not None:
            self.metrics.on_scrape(source_state(stats, time.monotonic))
        self.metrics.on_scrape(nfacct_packets(lambda: self._sync.mode.packets()))  # noqa: PLW0108
        self._has_socket = machine.instance is not None
        """Whether this process is the instance of its node, which has the local socket."""
        self.pages: dict[tuple[str, str], Page] = {
            ("GET", "/world"): self._world,
            ("GET", "/state"): self._state,
            ("GET", "/names"): self._names,
            ("GET", "/nodes"): self._nodes,
            ("GET", "/stats"): self._counts,
        }
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
            work["local socket"] = ControlSocket(self.pages).run()
        if state.bind_address:
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
                state=self._state_pieces,
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

    def _state_pieces(self) -> Iterator[bytes]:
        return state_json(self.states.now(), self._sync.state)

    # The local socket

    def _state(self, _: Request) -> Answer:
        return Answer(pieces=self._state_pieces(), content_type=_JSON)

    async def _names(self, request: Request) -> Answer:
        store = self._sync.store
        services = [*store.snapshot.services, *store.unserved]
        slices = map(unpacked, store.packed_slices())
        plans = tuple(self._plans())
        kind = request.query.get("kind", "")
        found = await asyncio.to_thread(names, kind, services, slices, store.nodes, plans)
        return Answer(msgspec.json.encode(found), content_type=_JSON)

    def _world(self, request: Request) -> Answer:
        """Answer with the World, or with the part about each `?service=NAMESPACE/NAME` only.

        The pieces are encoded in a thread, of copies made here.
        """
        sync, state = self._sync, self._sync.state
        snapshot, store = sync.store.snapshot, sync.store
        plans = list(state.plan.services.values())
        findings, plan_findings = state.findings, state.plan.findings
        services, slices, unserved = snapshot.services, snapshot.slices, store.unserved
        wanted: set[ObjectName] | None = None
        if texts := [text for name, text in request.arguments if name == "service"]:
            wanted = {ObjectName(*text.partition("/")[::2]) for text in texts}
            services = {name: services[name] for name in wanted if name in services}
            unserved = {name: unserved[name] for name in wanted if name in unserved}
            if not (services or unserved):
                return Answer(_NO_SERVICE.format(listed(sorted(texts))), 404)
            plans = [plan for plan in plans if plan.key.name.object_name in wanted]
            objects = {f"Service {name}" for name in wanted}
            for name in wanted:
                objects |= {f"EndpointSlice {name.namespace}/{n}" for n in slices.get(name, ())}
            findings = concerning(objects, findings)
            plan_findings = concerning(objects, plan_findings)
        head = Head(
            config=sync.planner.config,
            facts=store.facts,
            node=snapshot.node,
            service_cidrs=snapshot.service_cidrs,
            ejected=tuple(snapshot.ejected.items()),
            settings=state.plan.settings,
            plan_findings=plan_findings,
            unlisted=state.unlisted,
            findings=findings,
            nodes=store.nodes,
            process=self.states.now(),
        )
        pieces = encode_world(
            head,
            list(services.values()),
            store.packed_slices(wanted),
            list(unserved.values()),
            plans,
        )
        return Answer(pieces=pieces, content_type=_MSGPACK)

    async def _counts(self, request: Request) -> Answer:
        """Answer with the connections so far of all plans, or of `?service=NAMESPACE/NAME`."""
        wanted = request.query.get("service")
        plans = [plan for plan in self._plans() if wanted in (None, str(plan.key.name.object_name))]
        at = time.monotonic()
        try:
            stats = await self._sync.mode.stats(plans)
        except BusyError as error:
            return Answer(f"connections cannot be counted now: {error}", 503)
        body = await asyncio.to_thread(encode_stats, at, stats)
        return Answer(body, content_type=_MSGPACK)

    async def _nodes(self, _: Request) -> Answer:
        """Answer with all Nodes: this process holds its own one, and asks for the others now."""
        nodes: Sequence[Node] = self._sync.store.nodes
        if self._stats is not None:
            try:
                nodes = [
                    trimmed_node(node) for node in await fetch_nodes(cluster_access(self.config))
                ]
            except (ApiError, KubeconfigError) as error:
                return Answer(str(error), 502)
        return Answer(msgspec.json.encode(nodes), content_type=_JSON)

    def _listening_addresses(self, family: Family) -> list[str]:
        """Return the addresses for health check node ports of a family (behaviour 13)."""
        settings = self._sync.state.plan.settings
        if family not in settings.families:
            return []
        addresses = settings.family(family).node_port_addresses
        return [_ANY[family]] if addresses is None else list(addresses)
