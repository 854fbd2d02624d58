"""The running process: one TaskGroup that holds the source, the sync loop and the watchers."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import msgspec

from steersman.compile.plan import Planner
from steersman.config import Parsed, ProxyConfig
from steersman.host.facts import read_facts, watch_addresses
from steersman.model.errors import BusyError
from steersman.run import fallback
from steersman.run.effects import Effects
from steersman.run.findings import FindingsLog
from steersman.run.instance import Holder
from steersman.run.klog import Logging, v
from steersman.run.live import LiveConfiguration
from steersman.run.machine import Machine
from steersman.run.own_node import OwnNode
from steersman.run.runner import Runner
from steersman.run.servers import Servers
from steersman.run.startup import StartError, make_source, node_config
from steersman.run.state import Synced
from steersman.run.switch import leave
from steersman.run.sync import Sync
from steersman.run.tasks import Wake, guarded, on_signal, until
from steersman.source.apiserver import ApiServerSource
from steersman.source.store import Store

log = logging.getLogger("steersman")

_MAX_INTERVAL = 3600.0  # seconds; behaviour 7
_FIRST_RETRY = 0.25  # seconds, after a sync failed; doubles up to the sync period
_RETRY = 5.0  # seconds, after netlink failed
_SUCCESSION = 60.0  # seconds that a newcomer has to take what we hand over


class Daemon:
    """Everything that runs in `steersman run`."""

    def __init__(self, parsed: Parsed, logs: Logging, machine: Machine | None = None) -> None:
        """Take what the command line asked for; nothing happens before `run`."""
        self._machine = machine or Machine()
        self._parsed = parsed
        self._logs = logs
        self._stop = asyncio.Event()
        self._serving = asyncio.Event()
        self._news = Wake()
        self._period = Wake()
        self._failed = ""
        self._newcomer: asyncio.Future[Holder]
        self._synced: list[Synced] = []
        self._findings = FindingsLog()

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT; the rules stay in force.

        Raises:
            StartError: it cannot run here, or has to be started afresh.
            SysctlError: a start-up setting cannot be written (behaviour 1.1).
        """
        self._machine.raise_descriptor_limit()
        self._machine.memory_at_start()
        self._follow_signals()
        try:
            if await until(self._stop, self._start()):
                await self._serve()
            else:
                log.info("stopping before anything was written; the rules stay in force")
        finally:
            self._let_go()
        if self._failed:
            raise StartError(self._failed)

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = self._tasks(tasks)
            await self._stop.wait()
            if self._failed:
                await self._servers.tell_the_rest()
            log.info("stopping; the rules stay in force")
            for task in running:
                task.cancel()
        self._let_go()  # nothing is written any more; connections may drain beside the next one
        await self._close()

    async def _close(self) -> None:
        await self._servers.close()
        mode = self._sync.mode
        cut = await mode.aclose(self._live.current.steersman.drain_period.seconds)
        if cut:
            log.warning("%d connections were cut; --drain-period gives them more time", cut)

    def stop(self, failed: str = "") -> None:
        """End in order; with a reason, as a failure that a supervisor should answer."""
        self._failed = self._failed or failed
        self._stop.set()

    def _let_go(self) -> None:
        if self._machine.instance is not None:
            self._machine.instance.release()

    async def _make_room(self) -> None:
        """End when another instance takes over, once it has what only we can give it."""
        mode = self._sync.mode
        while True:
            newcomer = await asyncio.shield(self._newcomer)
            log.warning("another instance takes over from this one: %s", newcomer)
            if newcomer.mode != mode.name:
                break
            self._let_go()
            with suppress(TimeoutError):
                async with asyncio.timeout(_SUCCESSION):
                    await mode.wait_for_handoff()
                    break
            try:
                await self._claim()
            except StartError:  # it runs, and needs nothing of ours
                break
            log.warning("the newcomer is gone; this instance goes on")
        self.stop()

    # Starting

    async def _start(self) -> None:
        await self._claim()
        await self._set_up()

    async def _claim(self) -> None:
        """Become the one instance of this node, until another one asks for our place."""
        self._newcomer = asyncio.get_running_loop().create_future()
        if self._machine.instance is not None:
            await self._machine.instance.claim(self._newcomer.set_result)

    def _follow_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGBREAK", None)):
            if number is not None:
                on_signal(number, self.stop)

    async def _set_up(self) -> None:
        chosen = await self._machine.choose_mode(self._parsed.config)
        mode = chosen.mode
        config = msgspec.structs.replace(self._parsed.config, mode=mode.name)
        facts = await read_facts()
        self._source = make_source(config, node_config(config).node_name)
        # From here on the machine is changed: what is only misconfigured has failed before.
        machine = self._machine
        node = machine.allow_localhost_node_ports(node_config(config), mode, facts)
        machine.set_conntrack(config, mode.traits)
        self._node_config = node
        self._store = Store(node.node_name, on_change=self._changed, on_report=self._reported)
        self._own_node = OwnNode(node, self._store, self.stop)
        self._live = LiveConfiguration(self._parsed, self._store, mode.traits, self._apply, machine)
        if hasattr(signal, "SIGHUP"):
            on_signal(signal.SIGHUP, self._live.reload)
        least = config.min_sync_interval.seconds
        self._runner = Runner(
            self._work,
            least,
            config.sync_period.seconds,
            max(least, _MAX_INTERVAL),
            first_retry=_FIRST_RETRY,
        )
        self._servers = Servers(
            config, self._parsed.values, node.node_name, self._store, self._logs, machine=machine
        )
        fallback.tell(chosen, self._servers.recorder, self._store, self._servers.metrics)
        self._effects = Effects(
            self._store,
            self._servers.metrics,
            self._servers.health,
            self._servers.health_checks(lambda: self._sync.state.plan.settings),
            observers={"findings": self._log_findings},
            mode=mode,
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
            "configuration": self._live.follow(),
            "conntrack": self._effects.clean_conntrack(),
            "health checks": self._effects.serve_health_checks(),
            "losses": self._heal_losses(),
            "leftovers": self._leave_others(),
            "successor": self._make_room(),
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
            await self._own_node.wait(self._news.sleep)
        log.info("Using %s Proxier", self._sync.mode.name)
        self._servers.recorder.starting()
        self._effects.started(self._node_config.families)
        await self._runner.run()

    def _oom_score(self) -> str:
        value = self._live.current.linux.oom_score_adj
        return self._machine.set_oom_score(value) if value is not None else ""

    # Running

    def _changed(self) -> None:
        self._news.up()
        if self._store.synced:  # before, a run would do nothing but put off the first real one
            self._runner.request()
            self._effects.queued(self._node_config.families)
        self._own_node.follow()

    def _reported(self) -> None:
        """Tell of other Findings by the next sync; before there can be one, at once."""
        if self._store.synced:
            self._runner.request()
        else:
            self._findings.tell(self._store.findings)

    async def _work(self) -> bool:
        """Sync; return whether there was anything to do."""
        first = self._sync.state.result is None
        try:
            result = await self._sync.run()
        except Exception:  # rules that others removed may be missing: health must tell in time
            self._effects.queued(self._node_config.families)
            raise
        finally:
            await self._tell()
        if self._store.synced and self._sync.owes:  # else the list that is waited for asks
            self._runner.request()
        if result is None:
            return False
        if first or result.wrote:
            log.log(v(2) if result.reason == "changes" else logging.INFO, "%s", result)
        if first:
            self._serving.set()
            self._machine.memory_when_loaded()
        return True

    async def _tell(self) -> None:
        """Tell of each sync once; nothing holds it any more when this returns."""
        while self._synced:
            await self._effects.after(self._synced.pop(0), self._sync.objects())

    def _log_findings(self, synced: Synced) -> None:
        self._findings.tell(synced.state.findings, synced.state.unlisted)

    async def _check_for_drift(self) -> None:
        while True:
            await self._period.sleep(self._live.current.sync_period.seconds)
            self._suspect()

    async def _heal_losses(self) -> None:
        """Compare as soon as the mode notices changes by others, not only every sync period."""
        mode = self._sync.mode
        await self._serving.wait()
        while True:
            try:
                await mode.wait_for_external_change()
            except (OSError, BusyError) as error:
                log.warning(
                    "changes by others cannot be watched: %s; retrying in %gs", error, _RETRY
                )
                await asyncio.sleep(_RETRY)
            self._suspect()

    def _suspect(self) -> None:
        self._sync.suspect()
        self._runner.request()

    async def _leave_others(self) -> None:
        """Remove what other modes left, once ours serve (make before break)."""
        await self._serving.wait()
        mode, config = self._sync.mode, self._live.current
        left = self._machine.leftovers(mode, config)
        await leave(left, config.steersman.drain_period.seconds, mode)

    async def _follow_addresses(self) -> None:
        while True:
            try:
                async for facts in watch_addresses():
                    if self._sync.use_facts(facts):
                        self._runner.request()
            except OSError as error:
                log.warning("addresses cannot be watched: %s; retrying in %gs", error, _RETRY)
            await asyncio.sleep(_RETRY)

    def _refused(self, partial: bool) -> None:
        self._effects.refused(self._node_config.families, partial)

    def _apply(self, config: ProxyConfig) -> None:
        """Take a changed configuration while running."""
        mode = self._sync.mode
        config = msgspec.structs.replace(config, mode=mode.name)  # another one may stand in
        self._node_config = self._machine.allow_localhost_node_ports(
            node_config(config), mode, self._sync.facts
        )
        self._logs.verbosity = config.logging.verbosity
        self._servers.use(config)
        self._own_node.use(self._node_config)
        self._period.up()
        self._runner.set_intervals(config.min_sync_interval.seconds, config.sync_period.seconds)
        self._sync.use_planner(Planner(self._node_config, mode.traits))
        self._runner.request()
