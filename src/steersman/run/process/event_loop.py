"""The event loop of the process and its tasks: measured, guarded, and ended in time.

All of the process waits while a callback runs: health checks, watches, the next sync. An iteration
of the loop lies between two calls of its selector, so `MeasuredLoop` measures it there: exactly,
without a timer, at the cost of reading two clocks. A task that crashes ends the process, and the
log says which one and why. The process ends even if a thread hangs in a system call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from steersman.run.observe.metric_table import MetricTable
from steersman.run.observe.prometheus import Histogram, Metric
from steersman.run.serve.connections import ListenError

T = TypeVar("T")

log = logging.getLogger("steersman")

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_CANCEL_SECONDS = 1.5  # that abandoned work has to end after it was cancelled
_THREAD_SECONDS = 0.3  # that threads have to end
_THREADS = "steersman-work"


class MeasuringSelector(selectors.DefaultSelector):
    """Measures the iterations of its loop, by the wall clock and in CPU time.

    The program is responsible for the CPU time of the loop's thread. If the wall time is longer,
    the process waited: for a CPU that others used or that its limit denied it, or in a system call.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        super().__init__()
        self._wall, self._cpu = wall, cpu
        self._since: tuple[float, float] | None = None
        self._wall_holds, self._cpu_holds = Histogram(BUCKETS), Histogram(BUCKETS)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events: the callbacks of the last ones have run, others are about to run."""
        if self._since is not None:
            wall, cpu = self._since
            self._wall_holds.observe(self._wall() - wall)
            self._cpu_holds.observe(self._cpu() - cpu)
        events = super().select(timeout)
        self._since = self._wall(), self._cpu()
        return events

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram."""
        yield MetricTable.loop_holds.histogram(
            ((clock,), BUCKETS, tuple(holds.counts), holds.sum)
            for clock, holds in (("wall", self._wall_holds), ("cpu", self._cpu_holds))
        )


class MeasuredLoop(asyncio.SelectorEventLoop):
    """A loop that measures its iterations."""

    def __init__(self, holds: MeasuringSelector | None = None) -> None:
        self.holds = holds or MeasuringSelector()
        super().__init__(self.holds)


# Tasks


async def guarded(
    name: str, work: Coroutine[Any, Any, None], on_crash: Callable[[str], None]
) -> None:
    """Await a task's work; report its failure instead of raising it.

    Tasks retry what can be retried: a failure is a defect, or an address that must be bound and
    cannot be (`bindAddressHardFail`).

    Args:
        on_crash: called with a sentence; ends the process, so that a supervisor restarts it.
    """
    try:
        await work
    except ListenError as error:
        on_crash(f"{name}: cannot {error.strerror}")
    except Exception as error:
        text = f"task {name!r} crashed: {type(error).__name__}: {error}"
        log.critical("%s; the process ends, the rules stay in force", text, exc_info=error)
        on_crash(text)


async def until(
    stop: asyncio.Event, work: Coroutine[Any, Any, T], patience: float | None = _CANCEL_SECONDS
) -> T | None:
    """Await some work, unless an event is set first; return its result.

    Args:
        stop: work that it abandons is cancelled, and the result is None.
        patience: seconds that cancelled work gets to end, as it may run programs; None waits until
            it has ended.
    """
    doing = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((doing, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        doing.cancel()  # without effect if it is done
        await asyncio.wait((doing,), timeout=patience)
    if not doing.done() or doing.cancelled():
        return None
    return doing.result()


def run_to_end(
    runner: asyncio.Runner, main: Coroutine[Any, Any, None], report: Callable[[BaseException], int]
) -> int:
    """Run the whole process on a loop; end even if a thread hangs in a system call.

    The interpreter waits for all threads of executors before it ends. A thread that hangs in the
    kernel would delay that for as long, so the process ends without it.

    Args:
        report: reports a failure, and returns the exit status.

    Returns:
        The exit status (if no thread hangs).
    """
    status = 0
    executor = ThreadPoolExecutor(thread_name_prefix=_THREADS)
    runner.get_loop().set_default_executor(executor)
    try:
        runner.run(main)
    except BaseException as error:
        status = report(error)
    # Give threads a moment; a thread that hangs in the kernel must not keep the process alive.
    executor.shutdown(wait=False, cancel_futures=True)
    end = time.monotonic() + _THREAD_SECONDS
    for thread in threading.enumerate():
        if thread.name.startswith(_THREADS):
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                log.warning("a system call does not return; exiting without waiting for it")
                logging.shutdown()
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                os._exit(status)
    runner.close()
    return status


def on_signal(number: int, call: Callable[[], None]) -> None:
    """Call a function on the running loop at each signal, even if the loop cannot wait for it.

    Windows has no SIGTERM of others and no SIGHUP; its service wrappers send SIGBREAK.
    """
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(number, call)
    except NotImplementedError:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(call))
