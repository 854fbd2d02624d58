from __future__ import annotations

import asyncio
import logging
import subprocess
import sys

import pytest

from steersman.run import tasks
from steersman.run.connections import ListenError
from steersman.run.tasks import Wake, guarded, until


async def nothing() -> None:
    """End well."""


async def failing(error: BaseException) -> None:
    raise error


async def test_a_task_that_ends_well_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    await guarded("quiet", nothing(), told.append)
    assert (told, caplog.records) == ([], [])


async def test_a_crash_is_told_by_name_and_logged_with_its_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []
    await guarded("drift", failing(KeyError("x")), told.append)
    assert told == ["task 'drift' crashed: KeyError: 'x'"]
    (record,) = caplog.records
    assert record.levelno == logging.CRITICAL
    assert record.exc_info is not None


async def test_an_address_in_use_is_told_without_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    error = ListenError(98, "listen on 127.0.0.1:1: Address already in use")
    await guarded("metrics", failing(error), told.append)
    assert told == ["metrics: cannot listen on 127.0.0.1:1: Address already in use"]
    assert not caplog.records


async def test_a_cancelled_task_is_cancelled() -> None:
    told: list[str] = []
    task = asyncio.create_task(guarded("source", asyncio.Event().wait(), told.append))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not told


async def test_news_cut_a_sleep_short_and_are_forgotten_then() -> None:
    wake = Wake()
    sleep = asyncio.create_task(wake.sleep(3600.0))
    await asyncio.sleep(0)
    wake.up()
    async with asyncio.timeout(10):
        await sleep
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await wake.sleep(3600.0)


async def test_news_before_the_sleep_count_and_a_sleep_ends_by_itself() -> None:
    wake = Wake()
    wake.up()
    async with asyncio.timeout(10):
        await wake.sleep(3600.0)
        await wake.sleep(0.0)


async def test_work_is_done_unless_it_is_to_stop() -> None:
    stop = asyncio.Event()
    assert await until(stop, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(KeyError):
        await until(stop, failing(KeyError("x")))
    ended: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    asyncio.get_running_loop().call_soon(stop.set)
    await until(stop, endless())
    assert ended == ["cancelled"]


async def test_work_that_does_not_end_when_cancelled_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "_GIVEN_UP", 0.01)
    stop, go_on = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        while not go_on.is_set():
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                continue

    asyncio.get_running_loop().call_soon(stop.set)
    await until(stop, stubborn())
    go_on.set()


HANGS = """
import asyncio, logging, sys, threading
from steersman.run.tasks import run_to_end

async def main():
    task = asyncio.create_task(asyncio.to_thread(threading.Event().wait))
    await asyncio.sleep(0.1)
    {end}

logging.basicConfig(format="%(message)s")
sys.exit(run_to_end(asyncio.Runner(), main(), lambda error: print(error) or 3))
"""


@pytest.mark.parametrize(
    ("end", "status", "out"), [("pass", 0, ""), ("raise OSError('it failed')", 3, "it failed\n")]
)
def test_a_thread_that_hangs_does_not_hold_up_the_end(end: str, status: int, out: str) -> None:
    argv = [sys.executable, "-c", HANGS.format(end=end)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (status, out)
    assert "a system call does not return" in done.stderr
