"""The running process: one TaskGroup that holds the source, the sync loop and the watchers."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from steersman.compile.plan import Planner
from steersman.host.exec import SubprocessExec
from steersman.host.facts import read_facts, watch_addresses
from steersman.model.config import NodeConfig
from steersman.model.plan import Finding
from steersman.modes.base import BusyError, Mode
from steersman.modes.diff import Diff, diff
from steersman.modes.registry import MODES, ModeOptions
from steersman.run.runner import Runner
from steersman.run.state import State
from steersman.run.sync import Sync
from steersman.source.apiserver import ApiServerSource
from steersman.source.base import Source
from steersman.source.files import FileSource
from steersman.source.kubeconfig import load_cluster_access
from steersman.source.store import Store

log = logging.getLogger("steersman")


class Options(msgspec.Struct, frozen=True):
    """What `steersman run` was asked to do."""

    config: NodeConfig = NodeConfig()
    mode: str = "iptables"
    mode_options: ModeOptions = ModeOptions()
    manifests: tuple[Path, ...] = ()
    """Directories of manifests; () means the API server."""
    kubeconfig: str = ""
    masters: tuple[str, ...] = ()
    """API server URLs that override the kubeconfig's, tried in turn."""
    min_sync_period: float = 1.0
    """Seconds from the end of a sync to the start of the next (SPEC 7)."""
    sync_period: float = 30.0
    """Seconds between checks for drift, and before a failed sync is retried."""

    @property
    def node_name(self) -> str:
        """This node's name: the override, else the host's name (SPEC 1.1)."""
        return (self.config.node_name or socket.gethostname()).strip().lower()


class UnusableModeError(Exception):
    """The mode cannot run on this machine; the message says what is missing."""


def make_source(options: Options) -> Source:
    """Build the source of objects that the options name."""
    if options.manifests:
        return FileSource(options.manifests)
    access = load_cluster_access(options.kubeconfig or None, masters=options.masters)
    return ApiServerSource(access, options.node_name)


async def make_mode(options: Options) -> Mode:
    """Build the mode and see that it can run here.

    Raises:
        UnusableModeError: something is missing.
    """
    mode = MODES[options.mode](SubprocessExec(), options.mode_options)
    support = await mode.probe()
    if not support.usable:
        raise UnusableModeError(f"{options.mode} mode cannot run here: {' '.join(support.missing)}")
    for sentence in support.missing:
        log.warning("%s", sentence)
    return mode


async def load_store(options: Options, *, timeout: float = 30.0) -> Store:
    """Read the source once, for commands that do not run on.

    Raises:
        TimeoutError: the source did not deliver its initial lists in time.
    """
    loaded = asyncio.Event()
    store = Store(options.node_name, on_change=lambda: loaded.set() if store.synced else None)
    task = asyncio.create_task(make_source(options).run(store))
    try:
        async with asyncio.timeout(timeout):
            await loaded.wait()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return store


class Daemon:
    """Everything that runs in `steersman run`."""

    def __init__(self, options: Options) -> None:
        """Take the options; nothing happens before `run`."""
        self._options = options
        self._reported: frozenset[Finding] = frozenset()
        self._drift = False

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT; the rules stay in force."""
        options = self._options
        mode = await make_mode(options)
        config = msgspec.structs.replace(options.config, node_name=options.node_name)
        runner = Runner(
            self._work, options.min_sync_period, options.sync_period, max_interval=3600.0
        )
        store = Store(options.node_name, on_change=runner.request)
        self._sync = Sync(
            store,
            Planner(config, mode.traits),
            mode,
            await read_facts(),
            on_state=self._on_state,
        )
        log.info("Using %s Proxier", mode.name)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(make_source(options).run(store), name="source"),
                tasks.create_task(runner.run(), name="sync"),
                tasks.create_task(self._check_for_drift(runner), name="drift"),
                tasks.create_task(self._follow_addresses(runner), name="addresses"),
            ]
            await stop.wait()
            log.info("stopping; the rules stay in force")
            for task in running:
                task.cancel()

    async def _work(self) -> None:
        drift, self._drift = self._drift, False
        result = await (self._sync.check() if drift else self._sync.run())
        if result is not None and (not drift or result.added or result.changed or result.removed):
            log.info("%s", result)

    async def _check_for_drift(self, runner: Runner) -> None:
        while True:
            await asyncio.sleep(self._options.sync_period)
            self._drift = True
            runner.request()

    async def _follow_addresses(self, runner: Runner) -> None:
        async for facts in watch_addresses():
            if self._sync.use_facts(facts):
                runner.request()

    def _on_state(self, state: State) -> None:
        findings = frozenset(state.findings)
        for finding in sorted(findings - self._reported):
            log.warning("%s", finding)
        for finding in sorted(self._reported - findings):
            log.info("mended: %s", finding)
        self._reported = findings


async def preview(options: Options) -> tuple[Diff, Sequence[Finding]]:
    """Return what a sync would do now and the Findings; changes nothing (`--dry-run`)."""
    mode = await make_mode(options)
    store = await load_store(options)
    config = msgspec.structs.replace(options.config, node_name=options.node_name)
    planner = Planner(config, mode.traits)
    change = await Sync(store, planner, mode, await read_facts()).preview()
    return change, store.findings + planner.plan.findings


async def clean_up(execute: SubprocessExec, options: ModeOptions) -> dict[str, Diff]:
    """Remove everything of ours, in every mode that can run here; nothing else is touched.

    Raises:
        ApplyError: the kernel refused to remove something.
        BusyError: the kernel could not be programmed now.
    """
    removed: dict[str, Diff] = {}
    for name, factory in MODES.items():
        mode = factory(execute, options)
        if (await mode.probe()).usable:
            change = diff(await mode.read(), {})
            if change:
                await mode.apply(change)
            removed[name] = change
    return removed


__all__ = [
    "BusyError",
    "Daemon",
    "Options",
    "UnusableModeError",
    "clean_up",
    "load_store",
    "make_mode",
    "make_source",
    "preview",
]
