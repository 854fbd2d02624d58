"""The running process: one TaskGroup that holds the source, the sync loop and the watchers."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from steersman.compile.plan import Planner
from steersman.config import ConfigError, Parsed, applied, reload_file, reload_plan
from steersman.config import findings as config_findings
from steersman.host.exec import SubprocessExec
from steersman.host.facts import read_facts, watch_addresses
from steersman.host.process import set_oom_score_adjustment
from steersman.model.config import DetectLocalMode, NodeConfig
from steersman.model.kube import Node
from steersman.model.plan import Finding, Severity
from steersman.modes.base import Draining, Watchful
from steersman.run import fallback
from steersman.run.collector import collect_seldom, keep_what_is_there
from steersman.run.effects import Effects
from steersman.run.klog import Logging
from steersman.run.node import NodeTimeoutError, react, wait_for_node
from steersman.run.reload import file_changes
from steersman.run.runner import Runner
from steersman.run.servers import Servers
from steersman.run.startup import (
    StartError,
    allow_localhost_node_ports,
    choose_mode,
    make_source,
    node_config,
    set_conntrack,
)
from steersman.run.state import Synced
from steersman.run.switch import clean_leftovers, others
from steersman.run.sync import Sync
from steersman.run.tasks import Wake, guarded
from steersman.source.apiserver import ApiServerSource
from steersman.source.store import Store

log = logging.getLogger("steersman")

_MAX_INTERVAL = 3600.0  # seconds; SPEC 7
_RETRY = 5.0  # seconds, after rtnetlink failed


class Daemon:
    """Everything that runs in `steersman run`."""

    def __init__(self, parsed: Parsed, logs: Logging) -> None:
        """Take what the command line asked for; nothing happens before `run`."""
        self._parsed = parsed
        self._file = parsed.config_file
        self._config = parsed.config
        self._logs = logs
        self._stop = asyncio.Event()
        self._serving = asyncio.Event()
        self._news = Wake()
        self._failed = ""
        self._due = False
        self._drift = False
        self._synced: list[Synced] = []
        self._reported: frozenset[Finding] = frozenset()
        self._started_with: Node | None = None
        self._said = ""

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT; the rules stay in force.

        Raises:
            StartError: it cannot run here, or has to be started afresh.
            SysctlError: a start-up setting cannot be written (SPEC 1.1).
        """
        collect_seldom()
        self._follow_signals()
        await self._set_up()
        async with asyncio.TaskGroup() as tasks:
            running = self._tasks(tasks)
            await self._stop.wait()
            log.info("stopping; the rules stay in force")
            for task in running:
                task.cancel()
        await self._close()
        if self._failed:
            raise StartError(self._failed)

    async def _close(self) -> None:
        await self._servers.close()
        mode = self._sync.mode
        if isinstance(mode, Draining):
            cut = await mode.close(self._config.steersman.drain_period.seconds)
            if cut:
                log.warning("%d connections were cut; --drain-period gives them more time", cut)

    def stop(self, failed: str = "") -> None:
        """End in order; with a reason, as a failure that a supervisor should answer."""
        self._failed = self._failed or failed
        self._stop.set()

    # Starting

    def _follow_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)

    async def _set_up(self) -> None:
        chosen = await choose_mode(self._config)
        mode = chosen.mode
        config = self._config = msgspec.structs.replace(self._config, mode=mode.name)
        facts = await read_facts()
        self._source = make_source(config, node_config(config).node_name)
        # From here on the machine is changed: what is only misconfigured has failed before.
        node = allow_localhost_node_ports(node_config(config), mode, facts)
        set_conntrack(config)
        self._node_config = node
        self._store = Store(node.node_name, on_change=self._changed)
        self._runner = Runner(
            self._work, config.min_sync_interval.seconds, config.sync_period.seconds, _MAX_INTERVAL
        )
        self._servers = Servers(
            config, self._parsed.values, node.node_name, self._store, self._logs
        )
        fallback.tell(chosen, self._servers.recorder, self._store, self._servers.metrics)
        self._effects = Effects(
            self._store,
            self._servers.metrics,
            self._servers.health,
            self._servers.health_checks(lambda: self._sync.state.plan.settings),
            allow_external_ips=node.allow_service_external_ips,
        )
        self._sync = Sync(
            self._store,
            Planner(node, mode.traits),
            mode,
            facts,
            on_synced=self._synced.append,
            on_refused=self._refused,
        )
        self._servers.watch(self._sync, getattr(self._source, "stats", None))

    def _tasks(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        work: dict[str, Coroutine[Any, Any, None]] = {
            "sync": self._main(),
            "source": self._source.run(self._store),
            "addresses": self._follow_addresses(),
            "drift": self._check_for_drift(),
            "configuration": self._follow_configuration(),
            "conntrack": self._effects.clean_conntrack(),
            "losses": self._heal_losses(),
            "leftovers": self._leave_others(),
            **self._servers.tasks(),
        }
        return [
            tasks.create_task(guarded(name, call, self.stop), name=name)
            for name, call in work.items()
        ]

    async def _main(self) -> None:
        """Wait for this node's object, then sync until cancelled."""
        if warning := self._oom_score():
            log.info("%s", warning)
        if isinstance(self._source, ApiServerSource):
            await self._wait_for_node()
        log.info("Using %s Proxier", self._sync.mode.name)
        self._servers.recorder.starting()
        self._effects.started(self._node_config.families)
        await self._runner.run()

    def _oom_score(self) -> str:
        value = self._config.linux.oom_score_adj
        return set_oom_score_adjustment(value) if value is not None else ""

    async def _wait_for_node(self) -> None:
        try:
            self._started_with = await wait_for_node(
                lambda: self._store.snapshot.node,
                self._node_config.node_name,
                needs_pod_cidrs=self._needs_pod_cidrs(),
                sleep=self._news.sleep,
            )
        except NodeTimeoutError as error:
            self.stop(str(error))

    def _needs_pod_cidrs(self) -> bool:
        return self._node_config.detect_local_mode is DetectLocalMode.NODE_CIDR

    # Running

    def _request(self) -> None:
        self._due = True
        self._runner.request()

    def _changed(self) -> None:
        self._news.up()
        if self._store.synced:  # before, a run would do nothing but put off the first real one
            self._request()
        self._effects.queued(self._node_config.families)
        if self._started_with is not None:
            self._node_changed()

    def _node_changed(self) -> None:
        node = self._store.snapshot.node
        reaction = react(self._started_with, node, needs_pod_cidrs=self._needs_pod_cidrs())
        if reaction.message and reaction.message != self._said:
            log.warning("%s", reaction.message)
        self._said = reaction.message
        if reaction.exits:
            self.stop(reaction.message)

    async def _work(self) -> None:
        first = self._sync.state.result is None
        drift, self._drift = self._drift and not first, False
        due, self._due = self._due, False
        result = await self._sync.check() if drift else None
        if result is None and (due or not drift):
            result = await self._sync.run()
        for synced in self._synced:
            await self._effects.after(synced, self._sync.objects())
            self._tell_findings(synced.state.findings)
        self._synced.clear()
        if result is not None and (not drift or result.added or result.changed or result.removed):
            log.info("%s", result)
        if first and result is not None:
            self._serving.set()
            keep_what_is_there()

    async def _check_for_drift(self) -> None:
        while True:
            await asyncio.sleep(self._config.sync_period.seconds)
            self._drift = True
            self._runner.request()

    async def _heal_losses(self) -> None:
        """Look for drift as soon as the mode hears of it, not only every sync period."""
        mode = self._sync.mode
        while isinstance(mode, Watchful):
            await mode.lost()
            self._drift = True
            self._runner.request()

    async def _leave_others(self) -> None:
        """Remove what other modes left, once ours serve (make before break)."""
        await self._serving.wait()
        mode = self._sync.mode
        variant = str(getattr(mode, "variant", ""))
        for sentence in await clean_leftovers(others(mode.name, SubprocessExec(), variant)):
            log.info("%s", sentence)

    async def _follow_addresses(self) -> None:
        while True:
            try:
                async for facts in watch_addresses():
                    if self._sync.use_facts(facts):
                        self._request()
            except OSError as error:
                log.warning("addresses cannot be watched: %s; next try in %g s", error, _RETRY)
            await asyncio.sleep(_RETRY)

    def _refused(self, partial: bool) -> None:
        self._effects.refused(self._sync.mode.name, self._node_config.families, partial)

    def _tell_findings(self, findings: tuple[Finding, ...]) -> None:
        now = frozenset(findings)
        for finding in sorted(now - self._reported):
            level = logging.ERROR if finding.severity is Severity.ERROR else logging.WARNING
            log.log(level, "%s", finding)
        for finding in sorted(self._reported - now):
            log.info("mended: %s", finding)
        self._reported = now

    # Configuration

    async def _follow_configuration(self) -> None:
        if not self._file:
            return
        try:
            async for _ in file_changes(Path(self._file)):
                self._reload()
        except OSError as error:
            log.warning("%s is not watched: %s; SIGHUP reads it again", self._file, error)

    def _reload(self) -> None:
        """Read the configuration file again and apply what can be applied (SPEC 1.1 step 8)."""
        if not self._file:
            log.info("there is no configuration file to read again")
            return
        try:
            fresh = reload_file(self._parsed)
        except ConfigError as error:
            self._store.report(self._file, config_findings(error, self._file))
            log.error("%s; the configuration of before stays in force", error)
            return
        self._store.report(self._file, ())
        plan = reload_plan(self._config, fresh.config)
        if plan.needs_restart:
            log.warning("takes effect after a restart: %s", ", ".join(plan.needs_restart))
        if plan.applied_live:
            log.info("applied: %s", ", ".join(plan.applied_live))
            self._apply(fresh)

    def _apply(self, fresh: Parsed) -> None:
        self._config = applied(self._config, fresh.config)
        self._logs.verbosity = self._config.logging.verbosity
        set_conntrack(self._config)
        node: NodeConfig = node_config(self._config)
        node = msgspec.structs.replace(
            node,
            localhost_node_ports=node.localhost_node_ports
            and self._node_config.localhost_node_ports,
        )
        self._node_config = node
        self._servers.config = self._config
        self._runner.set_intervals(
            self._config.min_sync_interval.seconds, self._config.sync_period.seconds
        )
        self._sync.use_planner(Planner(node, self._sync.mode.traits))
        self._request()
