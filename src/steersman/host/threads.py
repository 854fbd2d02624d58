"""Threads for calls that may never return; the end of the process does not wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """A thread for each call. asyncio's own executor is joined at the end of the process."""

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

        future.set_running_or_notify_cancel()
        threading.Thread(target=work, daemon=True, name=fn.__name__).start()
        return future


_THREADS = DaemonThreads()


async def in_thread(call: Callable[..., T], *args: Any) -> T:
    """Call something that blocks; when cancelled, it is left to itself."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call, *args)
