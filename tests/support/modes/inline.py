"""Workers of modes without a thread: tests and simulations need one order of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import closing
from math import inf
from typing import Any, ParamSpec, TypeVar

from steersman.host.worker import KernelWorker, Pause

P = ParamSpec("P")
T = TypeVar("T")


class Inline(KernelWorker):
    """Runs each call on the event loop, once other tasks have had their turn."""

    async def do(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        await asyncio.sleep(0)
        return call(*args, **kwargs)

    async def do_slowly(self, steps: Generator[Pause | None, None, T]) -> T:
        with closing(steps):
            while True:
                try:
                    pause = next(steps)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
                await _end(pause or Pause(until=0.0))

    async def close(self) -> None:
        pass


async def _end(pause: Pause) -> None:
    """Wait until a pause is over."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    if pause.fd >= 0:
        loop.add_reader(pause.fd, over.set)
    try:
        async with asyncio.timeout(None if pause.until == inf else pause.until - time.monotonic()):
            await over.wait()
    except TimeoutError:
        pass
    finally:
        if pause.fd >= 0:
            loop.remove_reader(pause.fd)


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
