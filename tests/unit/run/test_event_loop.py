from __future__ import annotations

import asyncio
import logging
import subprocess
import sys

import pytest

from steersman.run.process.event_loop import (
    BUCKETS,
    MeasuredLoop,
    MeasuringSelector,
    guarded,
    until,
)
from steersman.run.serve.connections import ListenError


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


async def test_work_goes_on_while_an_event_is_unset() -> None:
    ended: list[str] = []
    event, began = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            ended.append("work")

    waiting = asyncio.create_task(until(event, work(), patience=None))
    await began.wait()
    event.set()
    await waiting
    assert ended == ["work"], "it has ended when the call returns"

    async def fail() -> None:
        raise KeyError("defect")

    with pytest.raises(KeyError):
        await until(asyncio.Event(), fail(), patience=None)
    # Cancelled from outside, the work has ended as well.
    began.clear()
    waiting = asyncio.create_task(until(asyncio.Event(), work(), patience=None))
    await began.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert ended == ["work", "work"]


async def test_work_that_does_not_end_when_cancelled_is_not_waited_for() -> None:
    stop, go_on = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        while not go_on.is_set():
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                continue

    asyncio.get_running_loop().call_soon(stop.set)
    await until(stop, stubborn(), patience=0.01)
    go_on.set()


HANGS = """
import asyncio, logging, sys, threading
from steersman.run.process.event_loop import run_to_end

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
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (status, out)
    assert "a system call does not return" in done.stderr


# test_loop.py


class Clocks:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def pass_by(self, wall: float, cpu: float) -> None:
        self.wall += wall
        self.cpu += cpu

    def holds(self) -> MeasuringSelector:
        return MeasuringSelector(lambda: self.wall, lambda: self.cpu)


def buckets(holds: MeasuringSelector) -> dict[tuple[str, float], float]:
    (family,) = holds.collect()
    return {
        (sample.labels["clock"], float(sample.labels["le"])): sample.value
        for sample in family.samples
        if sample.name.endswith("_bucket")
    }


def sums(holds: MeasuringSelector) -> dict[str, float]:
    (family,) = holds.collect()
    return {s.labels["clock"]: s.value for s in family.samples if s.name.endswith("_sum")}


def test_an_iteration_is_counted_by_both_clocks() -> None:
    clocks = Clocks()
    holds = clocks.holds()
    holds.select(0)  # the loop waits for the first time: nothing has run
    clocks.pass_by(0.03, 0.004)
    holds.select(0)
    found = buckets(holds)
    assert [found["wall", bound] for bound in (0.025, 0.05, float("inf"))] == [0, 1, 1]
    assert [found["cpu", bound] for bound in (0.002, 0.005, 5.0)] == [0, 1, 1]
    assert sums(holds) == {"wall": 0.03, "cpu": 0.004}


def test_the_longest_hold_has_a_bucket_of_its_own() -> None:
    clocks = Clocks()
    holds = clocks.holds()
    holds.select(0)
    clocks.pass_by(60, 60)
    holds.select(0)
    assert buckets(holds)["wall", BUCKETS[-1]] == 0
    assert buckets(holds)["wall", float("inf")] == 1


def test_a_loop_counts_what_runs_on_it_and_not_its_waiting() -> None:
    clocks = Clocks()
    holds = clocks.holds()

    async def work() -> None:
        clocks.pass_by(0.2, 0.2)
        await asyncio.sleep(0.001)
        clocks.pass_by(0.01, 0.01)

    with asyncio.Runner(loop_factory=lambda: MeasuredLoop(holds)) as runner:
        runner.run(work())
    found = buckets(holds)
    assert found["wall", 0.25] - found["wall", 0.1] == 1
    assert sums(holds)["wall"] == 0.2 + 0.01
