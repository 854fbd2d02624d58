"""Threads: blocking calls that may be given up, and objects that one thread uses.

Calls that must end first, whoever gives them up, are those of a KernelWorker (worker.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class OfOneThread:
    """An object that only one thread uses: the first one that does."""

    _user = 0

    def _use(self) -> None:
        """Take note of the calling thread.

        Raises:
            RuntimeError: another one has used the object.
        """
        thread = threading.get_ident()
        if thread != self._user:
            if self._user:
                raise RuntimeError(f"{type(self).__name__} is used in another thread than before")
            self._user = thread


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
