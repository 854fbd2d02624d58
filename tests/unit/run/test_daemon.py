"""The daemon, assembled as by the command line, on a kernel in memory."""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from steersman.config import parse_command_line
from steersman.run.process import assemble as assembling
from steersman.run.process.assemble import assemble
from steersman.run.process.daemon import Daemon, Stop
from steersman.run.process.instance import Holder, NodeLock
from steersman.run.process.klog import ProcessLog
from steersman.run.process.machine import Machine
from tests.support.modes.inline import Inline
from tests.support.modes.memory import MemoryMode

MANIFEST = """
{apiVersion: v1, kind: Service, metadata: {namespace: shop, name: web},
 spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}}
"""


class SlowMode(MemoryMode):
    """A kernel that takes its time for a batch, and is noticed while it does."""

    name = "nftables"
    variant = "none"
    """Of a mode that changes nothing on this machine: then no leftovers are removed."""

    def __init__(self) -> None:
        super().__init__()
        self.writing = False
        self.slow = False
        self.began = asyncio.Event()
        self.worker = SlowWorker(self)


class SlowWorker(Inline):
    """Takes its time for the batches of a mode."""

    def __init__(self, mode: SlowMode) -> None:
        super().__init__()
        self._mode = mode

    async def do(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        mode = self._mode
        mode.writing = call == mode.apply
        try:
            if mode.writing and mode.slow:
                mode.began.set()
                await asyncio.sleep(3600.0)
            return await super().do(call, *args, **kwargs)
        finally:
            mode.writing = False


class NotedLock(NodeLock):
    """Notes whether the mode wrote when the lock was released."""

    def __init__(self, mode: SlowMode) -> None:
        self.mode = mode
        self.wrote_when_released: list[bool] = []

    def release(self) -> None:
        self.wrote_when_released.append(self.mode.writing)


def machine(mode: SlowMode, lock: NodeLock) -> Machine:
    return Machine(
        instance=lock,
        create_mode=lambda *_: mode,
        may_have_left=lambda *_: True,
        set_conntrack=lambda *_: None,
        set_oom_score=lambda _: "",
        allow_localhost_node_ports=lambda config, *_: config,
        raise_descriptor_limit=lambda: 1024,
        memory_at_start=lambda: None,
        memory_when_loaded=lambda: None,
    )


@asynccontextmanager
async def running(
    folder: Path, mode: SlowMode
) -> AsyncIterator[tuple[Daemon, Stop, NotedLock, asyncio.Task[None]]]:
    (folder / "objects.yaml").write_text(MANIFEST)
    parsed = parse_command_line(
        [
            f"--manifests={folder}",
            "--proxy-mode=nftables",
            "--hostname-override=me",
            "--healthz-bind-address=",
            "--metrics-bind-address=",
        ]
    )
    logs = ProcessLog(stream=io.StringIO(), root=logging.Logger("unused"))
    stop, lock = Stop(), NotedLock(mode)
    daemon = await assemble(parsed, logs, machine(mode, lock), stop)
    task = asyncio.create_task(daemon.run())
    async with asyncio.timeout(60):
        await daemon.serving.wait()
    try:
        yield daemon, stop, lock, task
    finally:
        stop.request()
        async with asyncio.timeout(60):
            await task


async def test_the_daemon_serves_manifests_until_it_is_to_stop(tmp_path: Path) -> None:
    mode = SlowMode()
    async with running(tmp_path, mode) as (daemon, _, lock, _):
        assert "clusterIP 10.96.0.1:80" in mode.kernel
        assert daemon.sync.state.result is not None
    assert lock.wrote_when_released == [False]


async def test_the_lock_is_released_when_nothing_is_written_any_more(tmp_path: Path) -> None:
    mode = SlowMode()
    async with running(tmp_path, mode) as (daemon, _, lock, task):
        mode.slow = True
        mode.kernel.clear()
        daemon.sync.suspect()
        daemon.changed()
        async with asyncio.timeout(60):
            await mode.began.wait()
        lock.newcomer.set_result(Holder(1, "here", "nftables", int(time.time())))
        async with asyncio.timeout(60):
            await task
        assert lock.wrote_when_released == [False]


async def test_a_task_that_crashes_ends_the_daemon_as_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = SlowMode()

    def crash() -> None:
        raise KeyError("defect")

    monkeypatch.setattr(mode, "changes", crash)
    async with running(tmp_path, mode) as (_, stop, _, task):
        async with asyncio.timeout(60):
            await task
        assert stop.failure == "task 'external changes' crashed: KeyError: 'defect'"


async def test_a_stop_at_the_end_of_the_start_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mode = SlowMode()
    assembled = assemble

    async def assemble_and_stop(parsed: Any, logs: Any, machine: Any, stop: Stop) -> Daemon:
        daemon = await assembled(parsed, logs, machine, stop)
        stop.request()
        return daemon

    monkeypatch.setattr(assembling, "assemble", assemble_and_stop)
    (tmp_path / "objects.yaml").write_text(MANIFEST)
    parsed = parse_command_line([f"--manifests={tmp_path}", "--proxy-mode=nftables"])
    logs = ProcessLog(stream=io.StringIO(), root=logging.Logger("unused"))
    with caplog.at_level(logging.INFO):
        await assembling.run_daemon(parsed, logs, machine(mode, NotedLock(mode)))
    assert "stopping before anything was written" in caplog.text
    assert mode.kernel == {}
