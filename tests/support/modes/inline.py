"""The worker of a mode without a thread: tests and simulations need one order of events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import closing
from typing import ParamSpec, TypeVar

from steersman.host.worker import Changes, KernelWorker

P = ParamSpec("P")
T = TypeVar("T")


class Inline(KernelWorker):
    """Runs each call at once, on the event loop."""

    async def do(
        self, call: Callable[P, T | Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        result = call(*args, **kwargs)
        return await result if isinstance(result, Awaitable) else result

    async def do_slowly(self, steps: Generator[None, None, T] | Awaitable[T]) -> T:
        if isinstance(steps, Awaitable):
            return await steps
        with closing(steps):
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
                await asyncio.sleep(0)

    async def wait_for(self, changes: Changes) -> None:
        loop = asyncio.get_running_loop()
        while not changes.judge():
            readable = asyncio.Event()
            loop.add_reader(changes.fd, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(changes.fd)

    async def close(self) -> None:
        pass
