"""The tasks of the process: one that crashes ends all, and the log says which one and why."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from steersman.run.http import ListenError

log = logging.getLogger("steersman")


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
