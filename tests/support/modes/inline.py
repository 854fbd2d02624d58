"""Workers of modes without a thread: tests and simulations need one order of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, ParamSpec, TypeVar

from steersman.host.worker import Changes, KernelWorker

P = ParamSpec("P")
T = TypeVar("T")


class Inline(KernelWorker):
    """Runs each call on the event loop, once other tasks have had their turn."""

    async def do(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        await asyncio.sleep(0)
        return call(*args, **kwargs)

    async def do_slowly(self, steps: Generator[None, None, T]) -> T:
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


class Held(Inline):
    """Holds calls of one method while `go` is cleared: before or after they do their work."""

    def __init__(self, method: str, *, after: bool = False) -> None:
        super().__init__()
        self._method = method
        self._after = after
        self.go = asyncio.Event()
        self.go.set()
        self.reached = asyncio.Event()

    async def do(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        held = getattr(call, "__name__", "") == self._method
        if held and not self._after:
            await self._hold()
        result = await super().do(call, *args, **kwargs)
        if held and self._after:
            await self._hold()
        return result

    async def _hold(self) -> None:
        self.reached.set()
        await self.go.wait()
