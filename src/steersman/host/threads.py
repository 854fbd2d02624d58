"""Blocking calls in threads: those that may be given up, and those that must end first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """Runs each call in a thread of its own.

    asyncio's own executor is joined at the end of the process, so that a call that never returns
    (a name server, a file system of the network) would keep the process from ending.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start a call."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        # Running calls cannot be cancelled: asyncio then only drops the result.
        future.set_running_or_notify_cancel()
        threading.Thread(target=work, daemon=True, name=fn.__name__).start()
        return future


_THREADS = DaemonThreads()


async def in_thread(call: Callable[..., T], *args: Any) -> T:
    """Call a blocking function in a thread; when cancelled, stop waiting for it.

    Raises:
        OSError: no thread can be started, and whatever the function raises.
    """
    try:
        done = asyncio.get_running_loop().run_in_executor(_THREADS, call, *args)
    except RuntimeError as error:
        raise OSError(f"no thread can be started: {error}") from error
    return await done


async def to_thread_to_end(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread, as asyncio.to_thread; when cancelled, wait for its end first.

    For calls that use descriptors or write: their owner may close once no task is left.
    """
    thread = asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        while not thread.done():
            with suppress(asyncio.CancelledError):  # once more
                await asyncio.wait([thread])
        if not thread.cancelled():
            thread.exception()  # nobody asks for it any more
        raise
