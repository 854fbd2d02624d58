"""The running process: one TaskGroup that holds the source, the sync loop and the watchers.

    source --> Store --changed--> Runner --> Sync --SyncReport--> SyncObservers
                                    ^
              addresses, drift, external changes, configuration request a run, too

Every part comes from run/process/assemble.py. The process ends in order when `Stop` is requested:
by a signal, by a task that crashed, by another instance that takes over.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from steersman.config import ConfigError, ProxyConfig, in_mode, to_mode_options
from steersman.host.exec import SubprocessExec
from steersman.host.facts import watch_addresses
from steersman.host.process import notify_supervisor
from steersman.model.errors import BusyError
from steersman.model.inputs import NodeConfig
from steersman.model.switch import SwitchRequest, SwitchResult, Tell
from steersman.modes.base import Mode, release
from steersman.run.observe.drift import DriftLog
from steersman.run.observe.failover import Failover
from steersman.run.observe.findings_log import FindingsLog
from steersman.run.observe.observers import SyncObservers
from steersman.run.process.config_reloader import ConfigReloader
from steersman.run.process.event_loop import guarded, on_signal, until
from steersman.run.process.klog import ProcessLog, v
from steersman.run.process.machine import Machine
from steersman.run.process.mode_transition import other_modes, remove_leftovers
from steersman.run.process.node_watcher import NodeWatcher
from steersman.run.process.startup import StartError, new_mode, node_config
from steersman.run.process.switcher import Switcher
from steersman.run.serve.servers import Servers
from steersman.run.sync.engine import Engine
from steersman.run.sync.runner import MonotonicClock, Runner
from steersman.run.sync.state import SyncReport
from steersman.run.sync.sync import Sync
from steersman.source.apiserver import ApiServerSource
from steersman.source.base import Source

log = logging.getLogger("steersman")

_MAX_INTERVAL = 3600.0  # seconds; behaviour 7
_FIRST_RETRY = 0.25  # seconds, after a sync failed; doubles up to the sync period
_RETRY = 5.0  # seconds, after netlink failed
_HANDOFF = 60.0  # seconds that the next instance has to take our sockets


class Stop:
    """The request to end the process."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.failure = ""
        """The first reason given; with one, the process fails and a supervisor restarts it."""

    def request(self, failure: str = "") -> None:
        """End the process in order; as a failure if a reason is given."""
        self.failure = self.failure or failure
        self.requested.set()


@dataclass(kw_only=True, eq=False, repr=False)
class Daemon:
    """Runs the assembled parts."""

    machine: Machine
    logs: ProcessLog
    stop: Stop
    engine: Engine
    """The mode that serves; `switch` replaces it."""
    source: Source
    servers: Servers
    observers: SyncObservers
    findings: FindingsLog
    drift: DriftLog
    failover: Failover
    node_watcher: NodeWatcher
    reloader: ConfigReloader

    def __post_init__(self) -> None:
        config = self.reloader.current
        least = config.min_sync_interval.seconds
        self._runner = Runner(
            self._sync_once,
            least,
            config.sync_period.seconds,
            max(least, _MAX_INTERVAL),
            first_retry=_FIRST_RETRY,
        )
        self.turn = asyncio.Lock()
        self.switcher = Switcher(self)
        self._switches: set[asyncio.Task[SwitchResult]] = set()
        self.serving = asyncio.Event()
        """The first sync reached the kernel."""
        self._reconfigured = asyncio.Event()

    @property
    def sync(self) -> Sync:
        """The body of the sync loop, of the mode that serves."""
        return self.engine.sync

    async def run(self) -> None:
        """Run until a stop is requested; the rules stay in force."""
        if hasattr(signal, "SIGHUP"):
            on_signal(signal.SIGHUP, self._reload)
        work: dict[str, Coroutine[Any, Any, None]] = {
            "sync": self._sync_forever(),
            "source": self.source.run(self.sync.store),
            "addresses": self._follow_addresses(),
            "drift": self._check_for_drift(),
            "configuration": self._follow_configuration(),
            "conntrack": self._with_engine(lambda _: self.observers.stale_entries.run()),
            "health checks": self.observers.health_checks.run(),
            "failover": self._with_engine(self.failover.run),
            "external changes": self._with_engine(self._watch_for_external_changes),
            "leftovers": self._remove_leftovers(),
            "hand-over": self._hand_over(),
            **self.servers.tasks(),
        }
        # `guarded` turns the crash of a task into a request to stop, so the group never fails.
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(guarded(name, call, self.stop.request), name=name)
                for name, call in work.items()
            ]
            await self.stop.requested.wait()
            if self.stop.failure:
                await self.servers.flush_events()
            log.info("stopping; the rules stay in force")
            notify_supervisor("STOPPING=1")
            for task in (*tasks, *self._switches):
                task.cancel()
        await asyncio.gather(*self._switches, return_exceptions=True)
        # All tasks have ended: nothing is written any more. Connections may drain beside the next
        # instance.
        self.machine.instance.release()
        await self.servers.close()
        drain = self.reloader.current.steersman.drain_period.seconds
        ends = (release(self.engine.mode, drain), self.switcher.aclose(drain))
        if cut := sum(await asyncio.gather(*ends)):
            log.warning("%d connections were cut; --drain-period gives them more time", cut)

    async def _with_engine(self, work: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
        """Do some work with the engine that serves, and begin again with each new one."""
        while True:
            engine = self.engine
            await until(engine.replaced, work(engine), patience=None)
            await engine.replaced.wait()

    async def _hand_over(self) -> None:
        """Stop when another instance takes over, once it has the sockets that only we can give."""
        while True:
            newcomer = await asyncio.shield(self.machine.instance.newcomer)
            mode = self.engine.mode
            log.warning("another instance is taking over: %s", newcomer)
            if mode.handover is None or newcomer.mode != mode.name or self.switcher.running:
                break  # the lock is released only when nothing is written any more
            # The newcomer starts to serve beside this process, and fetches the sockets.
            self.machine.instance.release()
            with suppress(TimeoutError):
                async with asyncio.timeout(_HANDOFF):
                    await mode.handover.wait()
                    break
            try:
                await self.machine.instance.claim()
            except StartError:  # it runs, and needs nothing of ours
                break
            log.warning("the other instance is gone; this one continues")
        self.stop.request()

    # Sync

    async def _sync_forever(self) -> None:
        """Wait for this node's object, then sync until cancelled."""
        score = self.reloader.current.oom_score_adj
        if score is not None and (warning := self.machine.set_oom_score(score)):
            log.info("%s", warning)
        if isinstance(self.source, ApiServerSource):
            await self.node_watcher.wait()
        log.info("Using %s Proxier", self.sync.mode.name)
        self.servers.recorder.starting()
        self.observers.started(self.engine.node.families)
        await self._runner.run()

    async def _sync_once(self) -> bool:
        """Sync, and give the report to the observers; return whether there was work."""
        async with self.turn:
            sync = self.sync
            first = sync.state.result is None
            try:
                report = await sync.run()
            except Exception as error:  # rules may be missing: health must tell in time
                if sync.drift is not None:
                    self.drift.unrepaired(sync.drift)
                why = str(error) or type(error).__name__
                self.observers.failed(self.engine.node.families, why)
                raise
            self.servers.states.failure = ""
            result = None
            if report is not None:
                await self.observers.observe(report)
                result = report.result
                del report  # it holds the objects that are packed now
                await sync.pack()
        if sync.store.synced and sync.owes:  # before, the awaited list requests a run
            self._runner.request()
        if result is None:
            return False
        if first or result.wrote:
            log.log(v(2) if result.reason == "changes" else logging.INFO, "%s", result)
        if first:
            self.serving.set()
            notify_supervisor("READY=1")
            if sync.store.snapshot.node is None:
                log.warning(
                    "there is no Node %s: its zone and addresses are not known; add its Node "
                    "object, or correct --hostname-override",
                    self.engine.node.node_name,
                )
            self.machine.memory_when_loaded()
        return True

    # Reasons to sync

    def changed(self) -> None:
        """Sync soon: the Store changed."""
        if self.sync.store.synced:  # before, a run would only delay the first real one
            self._runner.request()
            self.observers.queued(self.engine.node.families)
        self.node_watcher.follow()

    def reported(self) -> None:
        """Log other Findings of sources with the next sync; at once if none is possible yet."""
        if self.sync.store.synced:
            self._runner.request()
        else:
            self.findings.update(self.sync.store.findings)

    def _suspect(self) -> None:
        self.sync.suspect()
        self._runner.request()

    async def _check_for_drift(self) -> None:
        while True:
            self._reconfigured.clear()
            period = self.reloader.current.sync_period.seconds
            await MonotonicClock().wait(self._reconfigured, period)
            self._suspect()

    async def _watch_for_external_changes(self, engine: Engine) -> None:
        """Compare as soon as the mode notices changes by others, not only every sync period."""
        await self.serving.wait()
        while True:
            try:
                await external_change(engine.mode)
            except (OSError, BusyError) as error:
                text = "changes by others cannot be watched: %s; retrying in %gs"
                log.warning(text, error, _RETRY)
                await asyncio.sleep(_RETRY)
            self._suspect()

    async def _follow_addresses(self) -> None:
        while True:
            try:
                async for facts in watch_addresses():
                    if self.sync.store.use_facts(facts):
                        self._runner.request()
            except OSError as error:
                log.warning("addresses cannot be watched: %s; retrying in %gs", error, _RETRY)
            await asyncio.sleep(_RETRY)

    async def _follow_configuration(self) -> None:
        async for config in self.reloader.changes():
            self._use(config)

    def _reload(self) -> None:
        if (config := self.reloader.reload()) is not None:
            self._use(config)

    def _use(self, config: ProxyConfig) -> None:
        mode = self.engine.mode
        config = in_mode(config, mode.name)  # it may be a fallback
        # Everything that is planned by it, then the parts that use it directly.
        facts = self.sync.store.facts
        node = self.machine.allow_localhost_node_ports(node_config(config), mode, facts)
        self.engine.use(config, node)
        self.logs.set_verbosity(config.logging.verbosity)
        self._use_directly(config, node)

    def _use_directly(self, config: ProxyConfig, node: NodeConfig) -> None:
        """Let the parts that are no part of the engine use a configuration."""
        self.servers.use(config)
        self.node_watcher.use(node)
        self._reconfigured.set()
        self._runner.set_intervals(config.min_sync_interval.seconds, config.sync_period.seconds)
        self._runner.request()

    # Other modes

    async def _remove_leftovers(self) -> None:
        """Remove the leftovers of other modes, once ours serves (make before break)."""
        await self.serving.wait()
        while True:
            engine = self.engine
            drain = engine.config.steersman.drain_period.seconds
            others = other_modes(
                engine.mode.name,
                SubprocessExec(),
                engine.mode.variant,
                to_mode_options(engine.config),
                self.machine.create_mode,
                may_have_left=self.machine.may_have_left,
            )
            spared = engine.spared | self.switcher.retiring
            left = [(name, mode) for name, mode in others if mode.name not in spared]
            removal = remove_leftovers(left, drain, engine.mode, quiet=engine.sync.between_runs)
            await until(self.switcher.began, removal, patience=None)
            if not self.switcher.began.is_set():  # otherwise a thread may still use their sockets
                for _, mode in left:
                    await release(mode)
            del left
            await self.switcher.began.wait()
            await self.switcher.ended.wait()

    # A switch of the mode: run/process/switching.py has the steps

    async def switch(self, request: SwitchRequest, tell: Tell) -> SwitchResult:
        """Switch the mode; it goes on if the caller is cancelled.

        Raises:
            BusyError: another switch is under way.
        """
        # A task of the daemon, so that it ends before the process does.
        task = asyncio.create_task(self.switcher.switch(request, tell))
        self._switches.add(task)
        task.add_done_callback(self._end_switch)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise BusyError("the process ends") from None
            raise

    def _end_switch(self, task: asyncio.Task[SwitchResult]) -> None:
        self._switches.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, BusyError):  # the caller may have gone
            log.error("a switch failed; the mode that serves continues", exc_info=error)

    @property
    def configured_mode(self) -> str:
        """The mode that a restart would run."""
        return self.reloader.configured_mode

    def new_engine(self, name: str) -> Engine:
        """Make an engine of another mode; nothing is written.

        Raises:
            ConfigError, StartError: the configuration is invalid in that mode.
        """
        config, before = self.reloader.in_mode(name), self.engine
        mode = new_mode(config, self.machine.create_mode)
        engine = Engine(mode, config, node_config(config), before.sync.store, before=before)
        engine.spared = frozenset({before.mode.name})
        return engine

    def prepare_machine(self, engine: Engine) -> None:
        """Set the sysctls that an engine needs."""
        node, facts = node_config(engine.config), engine.sync.store.facts
        allowed = self.machine.allow_localhost_node_ports(node, engine.mode, facts)
        if allowed != engine.node:  # other settings, or a sysctl cannot be set
            engine.use(engine.config, allowed)
        self.machine.set_conntrack(engine.config, engine.mode.traits)

    async def install(self, engine: Engine, report: SyncReport) -> None:
        """Let an engine serve whose first sync has this report."""
        # The configuration may have changed since the engine was made.
        with suppress(ConfigError):  # reported by the reloader
            config = self.reloader.in_mode(engine.mode.name)
            if config != engine.config:
                engine.use(config, engine.node)
                self.prepare_machine(engine)
        before, self.engine = self.engine, engine
        self.servers.use_sync(engine.sync)
        self.observers.use_mode(engine.mode, engine.sync.objects)
        before.replaced.set()
        await self.observers.observe(report)
        # What was said about a fallback at the start is not true any more.
        engine.sync.store.report("mode", ())
        self.servers.metrics.mode_fallback.clear()
        self.machine.instance.rename(engine.mode.name)
        self.reloader.use_mode(engine.config, engine.mode.traits)
        self._use_directly(engine.config, engine.node)
        log.info("Using %s Proxier", engine.mode.name)

    async def compare(self, *, whole: bool) -> SyncReport | None:
        """Compare the kernel with the plan, and repair what differs.

        Args:
            whole: read it whatever its fingerprint says. Otherwise `drift` of the report is what
                other programs changed since the last comparison.
        """
        async with self.turn:
            if whole:
                self.sync.distrust()
            else:
                self.sync.suspect()
            report = await self.sync.run()
            if report is not None:
                await self.observers.observe(report)
            return report


async def external_change(mode: Mode) -> None:
    """Return when another program may have changed objects of a mode; never if it cannot tell."""
    if (changes := await mode.worker.do(mode.changes)) is None:
        await asyncio.get_running_loop().create_future()
    else:
        await mode.worker.wait_for(changes)
