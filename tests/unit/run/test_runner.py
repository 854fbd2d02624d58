from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from steersman.run.sync.runner import MonotonicClock, Runner
from tests.support.clock import FakeClock, settle


@asynccontextmanager
async def running(runner: Runner) -> AsyncIterator[None]:
    task = asyncio.create_task(runner.run())
    await settle()
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class Work:
    def __init__(self) -> None:
        self.calls = 0
        self.gate: asyncio.Event | None = None
        self.fails = False

    async def __call__(self) -> None:
        self.calls += 1
        if self.gate:
            await self.gate.wait()
        if self.fails:
            raise OSError("no")


async def test_nothing_runs_unasked_before_the_maximum() -> None:
    clock, work = FakeClock(), Work()
    async with running(Runner(work, 1, 5, 10, clock)):
        await clock.advance(9.999)
        assert work.calls == 0
        await clock.advance(0.001)
        assert work.calls == 1


async def test_a_request_during_a_run_makes_one_more_after_the_minimum() -> None:
    clock, work = FakeClock(), Work()
    work.gate = asyncio.Event()
    runner = Runner(work, 1, 5, 10, clock)
    async with running(runner):
        runner.request()
        await settle()
        runner.request()
        runner.request()
        await clock.advance(3)
        assert work.calls == 1
        work.gate.set()
        await settle()
        await clock.advance(0.999)
        assert work.calls == 1
        await clock.advance(0.001)
        assert work.calls == 2
        await clock.advance(9.99)
        assert work.calls == 2


async def test_a_minimum_of_zero_runs_at_once() -> None:
    clock, work = FakeClock(), Work()
    runner = Runner(work, 0, 5, 10, clock)
    async with running(runner):
        for calls in range(1, 4):
            runner.request()
            await settle()
            assert work.calls == calls


async def test_failures_are_logged_and_do_not_end_it(caplog: pytest.LogCaptureFixture) -> None:
    clock, work = FakeClock(), Work()
    work.fails = True
    runner = Runner(work, 1, 50, 10, clock)
    with caplog.at_level(logging.WARNING):
        async with running(runner):
            runner.request()
            await settle()
            await clock.advance(10)  # the maximum is sooner than the retry interval
            assert work.calls == 2
    assert caplog.messages == ["sync failed: no; everything stays queued, retrying in 10s"] * 2
    assert "Traceback" not in caplog.text


async def test_a_defect_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise ValueError("a defect")

    runner = Runner(work, 0, 5, 10, FakeClock())
    async with running(runner):
        runner.request()
        await settle()
    assert "Traceback" in caplog.text
    assert caplog.records[0].levelno == logging.ERROR


async def test_a_failed_run_is_repeated_soon_and_then_at_doubling_intervals() -> None:
    clock, work = FakeClock(), Work()
    work.fails = True
    runner = Runner(work, 0.1, 5, 100, clock, first_retry=1)
    async with running(runner):
        runner.request()
        await settle()
        for pause in (1, 2, 4, 5, 5):
            before = work.calls
            await clock.advance(pause - 0.001)
            assert work.calls == before
            await clock.advance(0.001)
            assert work.calls == before + 1
        work.fails = False
        await clock.advance(5)
        work.fails = True
        runner.request()
        await clock.advance(0.1)
        before = work.calls
        await clock.advance(1)  # it begins again after a success
        assert work.calls == before + 1


async def test_a_run_without_anything_to_do_does_not_hold_back_the_next() -> None:
    clock, work, idle = FakeClock(), Work(), True

    async def run() -> bool:
        await work()
        return not idle

    runner = Runner(run, 1, 5, 100, clock)
    async with running(runner):
        for calls in (1, 2):
            runner.request()
            await settle()
            assert work.calls == calls
        idle = False
        runner.request()
        await settle()
        runner.request()
        await settle()
        assert work.calls == 3
        await clock.advance(1)
        assert work.calls == 4
        await clock.advance(99.9)
        assert work.calls == 4


async def test_a_maximum_below_the_minimum_is_refused() -> None:
    with pytest.raises(ValueError, match="below min_interval"):
        Runner(Work(), 2, 1, 1)


async def test_the_real_clock_waits_for_the_event_or_the_time() -> None:
    clock, event = MonotonicClock(), asyncio.Event()
    started = clock.time()
    await clock.wait(event, 0.01)
    assert clock.time() > started
    event.set()
    async with asyncio.timeout(60):
        await clock.wait(event, 3600)
