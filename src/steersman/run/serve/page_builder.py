"""Builds expensive pages: one at a time, in a thread, shared by all clients that ask for the same.

However many clients ask how often, building takes a small share of one core, and cannot starve
syncs and health checks. A page is kept compressed while it is sent: `/state` of a large cluster has
9 MB, which slow clients must not multiply and the heap would not return.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator

_PAUSE, _LONGEST_PAUSE = 9, 2.0
"""After a page took t seconds, the next one begins 9 t later, but after 2 seconds at most."""
_MOST_WAITING = 8
"""Different pages that may wait to be built."""


class TooManyPagesError(Exception):
    """Too many different pages wait to be built."""


class PageBuilder:
    """Builds expensive pages, one at a time."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._one = asyncio.Lock()
        self._not_before = clock()
        self._wanted: dict[Hashable, asyncio.Task[tuple[bytes, ...]]] = {}

    async def page(
        self, key: Hashable, make: Callable[[], Awaitable[Iterable[bytes]]]
    ) -> Iterator[bytes]:
        """Return the pieces of a page, built now or for an earlier client that still waits.

        Args:
            key: equal for the same page.
            make: starts to build it on the event loop; the pieces are then made in a thread.

        Raises:
            TooManyPagesError: too many other pages wait.
        """
        task = self._wanted.get(key)
        if task is None:
            if len(self._wanted) >= _MOST_WAITING:
                raise TooManyPagesError
            task = self._wanted[key] = asyncio.create_task(self._build(make))

            def done(task: asyncio.Task[tuple[bytes, ...]]) -> None:
                del self._wanted[key]
                if not task.cancelled():
                    task.exception()  # mark it as retrieved: every client may have gone

            task.add_done_callback(done)
        return map(zlib.decompress, await asyncio.shield(task))

    async def _build(self, make: Callable[[], Awaitable[Iterable[bytes]]]) -> tuple[bytes, ...]:
        # The pause before the next page is in proportion to the time that the last one took.
        async with self._one:
            await self._sleep(max(0.0, self._not_before - self._clock()))
            began = self._clock()
            try:
                pieces = await make()
                return await asyncio.to_thread(
                    lambda: tuple(zlib.compress(piece, 1) for piece in pieces)
                )
            finally:
                ended = self._clock()
                self._not_before = ended + min(_PAUSE * (ended - began), _LONGEST_PAUSE)
