"""The tasks of the process: one that crashes ends all, and the log says which one and why."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from steersman.run.connections import ListenError

T = TypeVar("T")

log = logging.getLogger("steersman")

_GIVEN_UP = 1.5  # seconds that work has to end after it was cancelled
_LAST_WORDS = 0.3  # seconds that threads have to end
_THREADS = "steersman-work"


async def guarded(
    name: str, work: Coroutine[Any, Any, None], on_crash: Callable[[str], None]
) -> None:
    """Await a task's work; its failure is told, and not raised.

    What can be retried was retried inside: what comes out here is a defect, or an address that
    must be bound and cannot be (`bindAddressHardFail`).

    Args:
        name: of the task, for people.
        work: what it does.
        on_crash: told in a sentence; ends the process, so that a supervisor starts it afresh.
    """
    try:
        await work
    except ListenError as error:
        on_crash(f"{name}: cannot {error.strerror}")
    except Exception as error:
        text = f"task {name!r} crashed: {type(error).__name__}: {error}"
        log.critical("%s; the process ends, the rules stay in force", text, exc_info=error)
        on_crash(text)


async def until(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Await some work, unless an event is set first; return its result.

    Abandoned work is cancelled and gets a moment to end, so that programs it runs end; then the
    result is None.
    """
    doing = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((doing, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        doing.cancel()  # without effect if it is done
    if not doing.done():
        await asyncio.wait((doing,), timeout=_GIVEN_UP)
    if not doing.done() or doing.cancelled():
        return None
    return doing.result()


def run_to_end(
    runner: asyncio.Runner,
    main: Coroutine[Any, Any, None],
    report: Callable[[BaseException], int],
) -> int:
    """Run the whole process on a loop; end even if a thread hangs in a system call.

    The interpreter waits for all threads of executors before it ends. One that the kernel does not
    let go would hold it up for as long, so the process ends without waiting for that one.

    Args:
        runner: makes the loop; it is closed.
        main: what to run.
        report: reports a failure, and returns the exit status.

    Returns:
        The exit status (where no thread hangs).
    """
    status = 0
    executor = ThreadPoolExecutor(thread_name_prefix=_THREADS)
    runner.get_loop().set_default_executor(executor)
    try:
        runner.run(main)
    except BaseException as error:
        status = report(error)
    executor.shutdown(wait=False, cancel_futures=True)
    end = time.monotonic() + _LAST_WORDS
    for thread in threading.enumerate():
        if thread.name.startswith(_THREADS):
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                log.warning("a system call does not return; the process ends without it")
                logging.shutdown()
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                os._exit(status)
    runner.close()
    return status


def on_signal(number: int, call: Callable[[], None]) -> None:
    """Call something on the running loop whenever a signal comes, also where loops cannot wait.

    Windows has no SIGTERM of others and no SIGHUP; its service wrappers send SIGBREAK.
    """
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(number, call)
    except NotImplementedError:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(call))


class Wake:
    """A sleep that something new cuts short."""

    def __init__(self) -> None:
        self._news = asyncio.Event()

    def up(self) -> None:
        """End the sleep under way, or the next one."""
        self._news.set()

    async def sleep(self, seconds: float) -> None:
        """Return when woken up, at the latest after some seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()
