"""The running process: one TaskGroup that holds the source, the sync loop and the watchers.

    source --> Store --changed--> Runner --> Sync --SyncReport--> SyncObservers
                                    ^
              addresses, drift, external changes, configuration request a run, too

Every part comes from run/assemble.py. The process ends in order when `Stop` is requested: by a
signal, by a task that crashed, by another instance that takes over.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import msgspec

from steersman.compile.planner import Planner
from steersman.config import ProxyConfig
from steersman.host.facts import watch_addresses
from steersman.model.errors import BusyError
from steersman.model.inputs import NodeConfig
from steersman.run.config_reloader import ConfigReloader
from steersman.run.drift import DriftLog
from steersman.run.event_loop import InterruptibleSleep, guarded, on_signal
from steersman.run.instance import Holder, Instance
from steersman.run.klog import ProcessLog, v
from steersman.run.machine import Machine
from steersman.run.mode_transition import remove_leftovers
from steersman.run.node_watcher import NodeWatcher
from steersman.run.observers import FindingsLog, SyncObservers
from steersman.run.runner import Runner
from steersman.run.servers import Servers
from steersman.run.startup import StartError, node_config
from steersman.run.sync import Sync
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


class NodeLock:
    """Makes this process the only instance on its node, until another one takes over."""

    def __init__(self, instance: Instance | None) -> None:
        """Create it unlocked; without an instance nothing is ever locked."""
        self._instance = instance
        self.newcomer: asyncio.Future[Holder] = asyncio.get_running_loop().create_future()
        """The instance that asks to take over."""

    async def claim(self) -> None:
        """Claim the lock; raise StartError if another instance keeps it."""
        self.newcomer = asyncio.get_running_loop().create_future()
        if self._instance is not None:
            await self._instance.claim(self.newcomer.set_result)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._instance is not None:
            self._instance.release()


class Daemon:
    """Runs the assembled parts."""

    def __init__(
        self,
        *,
        machine: Machine,
        logs: ProcessLog,
        stop: Stop,
        lock: NodeLock,
        node: NodeConfig,
        source: Source,
        sync: Sync,
        servers: Servers,
        observers: SyncObservers,
        findings: FindingsLog,
        drift: DriftLog,
        node_watcher: NodeWatcher,
        reloader: ConfigReloader,
    ) -> None:
        """Create the daemon of assembled parts; nothing runs before `run`."""
        self._machine = machine
        self._logs = logs
        self._stop = stop
        self._lock = lock
        self._node_config = node
        self._source = source
        self.sync = sync
        self._servers = servers
        self._observers = observers
        self._findings = findings
        self._drift = drift
        self._node_watcher = node_watcher
        self._reloader = reloader
        config = reloader.current
        least = config.min_sync_interval.seconds
        self._runner = Runner(
            self._sync_once,
            least,
            config.sync_period.seconds,
            max(least, _MAX_INTERVAL),
            first_retry=_FIRST_RETRY,
        )
        self.serving = asyncio.Event()
        """The first sync reached the kernel."""
        self._until_change = InterruptibleSleep()
        self._drift_timer = InterruptibleSleep()

    async def run(self) -> None:
        """Run until a stop is requested; the rules stay in force."""
        if hasattr(signal, "SIGHUP"):
            on_signal(signal.SIGHUP, self._reload)
        work: dict[str, Coroutine[Any, Any, None]] = {
            "sync": self._sync_forever(),
            "source": self._source.run(self.sync.store),
            "addresses": self._follow_addresses(),
            "drift": self._check_for_drift(),
            "configuration": self._follow_configuration(),
            "conntrack": self._observers.cleaner.run(),
            "health checks": self._observers.health_checks.run(),
            "external changes": self._watch_for_external_changes(),
            "leftovers": self._remove_leftovers(),
            "hand-over": self._hand_over(),
            **self._servers.tasks(),
        }
        # `guarded` turns the crash of a task into a request to stop, so the group never fails.
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(guarded(name, call, self._stop.request), name=name)
                for name, call in work.items()
            ]
            await self._stop.requested.wait()
            if self._stop.failure:
                await self._servers.flush_events()
            log.info("stopping; the rules stay in force")
            for task in tasks:
                task.cancel()
        # All tasks have ended: nothing is written any more. Connections may drain beside the next
        # instance.
        self._lock.release()
        await self._servers.close()
        cut = await self.sync.mode.aclose(self._reloader.current.steersman.drain_period.seconds)
        if cut:
            log.warning("%d connections were cut; --drain-period gives them more time", cut)

    async def _hand_over(self) -> None:
        """Stop when another instance takes over, once it has the sockets that only we can give."""
        mode = self.sync.mode
        while True:
            newcomer = await asyncio.shield(self._lock.newcomer)
            log.warning("another instance takes over from this one: %s", newcomer)
            if not mode.hands_over_sockets or newcomer.mode != mode.name:
                break  # the lock is released only when nothing is written any more
            # The newcomer starts to serve beside this process, and fetches the sockets.
            self._lock.release()
            with suppress(TimeoutError):
                async with asyncio.timeout(_HANDOFF):
                    await mode.wait_for_handoff()
                    break
            try:
                await self._lock.claim()
            except StartError:  # it runs, and needs nothing of ours
                break
            log.warning("the newcomer is gone; this instance goes on")
        self._stop.request()

    # Sync

    async def _sync_forever(self) -> None:
        """Wait for this node's object, then sync until cancelled."""
        score = self._reloader.current.linux.oom_score_adj
        if score is not None and (warning := self._machine.set_oom_score(score)):
            log.info("%s", warning)
        if isinstance(self._source, ApiServerSource):
            await self._node_watcher.wait(self._until_change.sleep)
        log.info("Using %s Proxier", self.sync.mode.name)
        self._servers.recorder.starting()
        self._observers.started(self._node_config.families)
        await self._runner.run()

    async def _sync_once(self) -> bool:
        """Sync, and give the report to the observers; return whether there was work."""
        sync = self.sync
        first = sync.state.result is None
        try:
            report = await sync.run()
        except Exception:  # rules that others removed may be missing: health must tell in time
            self._observers.queued(self._node_config.families)
            if sync.drift is not None:
                self._drift.unrepaired(sync.drift)
            raise
        if report is not None:
            await self._observers.observe(report)
        if sync.store.synced and sync.owes:  # before, the awaited list requests a run
            self._runner.request()
        if report is None or (result := report.result) is None:
            return False
        del report  # no one holds the plans of this sync any more
        if first or result.wrote:
            log.log(v(2) if result.reason == "changes" else logging.INFO, "%s", result)
        if first:
            self.serving.set()
            self._machine.memory_when_loaded()
        return True

    # Reasons to sync

    def changed(self) -> None:
        """Sync soon: the Store changed."""
        self._until_change.interrupt()
        if self.sync.store.synced:  # before, a run would only delay the first real one
            self._runner.request()
            self._observers.queued(self._node_config.families)
        self._node_watcher.follow()

    def reported(self) -> None:
        """Log other Findings of sources with the next sync; at once if none is possible yet."""
        if self.sync.store.synced:
            self._runner.request()
        else:
            self._findings.update(self.sync.store.findings)

    def _suspect(self) -> None:
        self.sync.suspect()
        self._runner.request()

    async def _check_for_drift(self) -> None:
        while True:
            await self._drift_timer.sleep(self._reloader.current.sync_period.seconds)
            self._suspect()

    async def _watch_for_external_changes(self) -> None:
        """Compare as soon as the mode notices changes by others, not only every sync period."""
        mode = self.sync.mode
        await self.serving.wait()
        while True:
            try:
                await mode.wait_for_external_change()
            except (OSError, BusyError) as error:
                text = "changes by others cannot be watched: %s; retrying in %gs"
                log.warning(text, error, _RETRY)
                await asyncio.sleep(_RETRY)
            self._suspect()

    async def _follow_addresses(self) -> None:
        while True:
            try:
                async for facts in watch_addresses():
                    if self.sync.use_facts(facts):
                        self._runner.request()
            except OSError as error:
                log.warning("addresses cannot be watched: %s; retrying in %gs", error, _RETRY)
            await asyncio.sleep(_RETRY)

    async def _follow_configuration(self) -> None:
        async for config in self._reloader.changes():
            self._use(config)

    def _reload(self) -> None:
        if (config := self._reloader.reload()) is not None:
            self._use(config)

    def _use(self, config: ProxyConfig) -> None:
        """Apply a changed configuration while running."""
        mode = self.sync.mode
        config = msgspec.structs.replace(config, mode=mode.name)  # it may be a fallback
        # The parts that use the configuration directly, then everything that is planned by it.
        self._node_config = self._machine.allow_localhost_node_ports(
            node_config(config), mode, self.sync.facts
        )
        self._logs.set_verbosity(config.logging.verbosity)
        self._servers.use(config)
        self._node_watcher.use(self._node_config)
        self._drift_timer.interrupt()
        self._runner.set_intervals(config.min_sync_interval.seconds, config.sync_period.seconds)
        self.sync.use_planner(Planner(self._node_config, mode.traits))
        self._runner.request()

    # Other modes

    async def _remove_leftovers(self) -> None:
        """Remove the leftovers of other modes, once ours serves (make before break)."""
        await self.serving.wait()
        mode, config = self.sync.mode, self._reloader.current
        left = self._machine.leftovers(mode, config)
        await remove_leftovers(left, config.steersman.drain_period.seconds, mode)
