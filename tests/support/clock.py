"""A clock that only moves when told."""

from __future__ import annotations

import asyncio


class FakeClock:
    """Stands in for run.runner.MonotonicClock."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._moved = asyncio.Event()

    def time(self) -> float:
        return self._now

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        deadline = self._now + seconds
        while not event.is_set() and self._now < deadline:
            moved = asyncio.create_task(self._moved.wait())
            woken = asyncio.create_task(event.wait())
            try:
                await asyncio.wait((moved, woken), return_when=asyncio.FIRST_COMPLETED)
            finally:
                moved.cancel()
                woken.cancel()

    async def advance(self, seconds: float) -> None:
        """Move on, and let everything that waited for it run until it waits again."""
        self._now = round(self._now + seconds, 6)
        self._moved.set()
        self._moved = asyncio.Event()
        await settle()


class PatientClock:
    """Stands in for it where nobody else moves: each wait lasts as long as it may."""

    def __init__(self) -> None:
        self._now = 0.0

    def time(self) -> float:
        return self._now

    async def wait(self, _event: asyncio.Event, seconds: float) -> None:
        self._now += seconds
        await asyncio.sleep(0)


async def settle() -> None:
    """Let the tasks that are ready run, and those that they wake."""
    for _ in range(20):
        await asyncio.sleep(0)
