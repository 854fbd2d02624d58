"""Pages that are expensive to make: one at a time, in a thread, and shared by who asks meanwhile.

However many clients ask how often, making such pages takes a small share of one core, so that they
cannot starve syncs and health checks. A page is kept packed while it is sent: `/state` of a large
cluster has 9 MB, which slow clients must not multiply and the heap would not give back.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import TypeAlias

_PAUSE, _LONGEST_PAUSE = 9, 2.0
"""After a page took t seconds, the next one begins 9 t later, but after 2 seconds at most."""
_MOST_WAITING = 8
"""Different pages that may wait to be made."""
RETRY_AFTER = 5
"""Seconds after which a client that is turned away may ask again."""

Packed: TypeAlias = tuple[bytes, ...]


class CrowdedError(Exception):
    """Too many different pages wait to be made."""


class Workshop:
    """Makes pages."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Make nothing yet; the arguments are for tests."""
        self._clock = clock
        self._sleep = sleep
        self._one = asyncio.Lock()
        self._not_before = clock()
        self._wanted: dict[Hashable, asyncio.Task[Packed]] = {}

    async def page(
        self, key: Hashable, make: Callable[[], Awaitable[Iterable[bytes]]]
    ) -> Iterator[bytes]:
        """Return the pieces of a page, made now or for somebody who asked for it just before.

        Args:
            key: equal for the same page.
            make: starts to make it on the event loop; the pieces are then taken in a thread.

        Raises:
            CrowdedError: too many other pages are wanted.
        """
        task = self._wanted.get(key)
        if task is None:
            if len(self._wanted) >= _MOST_WAITING:
                raise CrowdedError
            task = self._wanted[key] = asyncio.create_task(self._make(make))
            task.add_done_callback(partial(self._done, key))
        return map(zlib.decompress, await asyncio.shield(task))

    def _done(self, key: Hashable, task: asyncio.Task[Packed]) -> None:
        del self._wanted[key]
        if not task.cancelled():
            task.exception()  # nobody may be left who waits for it

    async def _make(self, make: Callable[[], Awaitable[Iterable[bytes]]]) -> Packed:
        async with self._one:
            await self._sleep(max(0.0, self._not_before - self._clock()))
            began = self._clock()
            try:
                return await asyncio.to_thread(_packed, await make())
            finally:
                ended = self._clock()
                self._not_before = ended + min(_PAUSE * (ended - began), _LONGEST_PAUSE)


def _packed(pieces: Iterable[bytes]) -> Packed:
    return tuple(zlib.compress(piece, 1) for piece in pieces)
