"""Who has which places in the arrays: indices of ServicePorts, and runs of slots.

The only ids of the mode, and none of them leaves it: they are found again in the maps at start.
What is given back is used again only after a while, for programs may just be reading it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

QUARANTINE = 1.0
"""Seconds; a program runs for microseconds."""


class FullError(OSError):
    """A map has no place left."""


class Places:
    """Runs of places in an array; their lengths are powers of two."""

    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self._capacity = capacity
        self._clock = clock
        self._top = 0
        self._free: dict[int, list[int]] = {}
        self._resting: deque[tuple[float, int, int]] = deque()

    def take(self, count: int) -> int:
        """Take a run of at least `count` places; FullError where there is none."""
        size = run_length(count)
        self._wake()
        free = self._free.get(size)
        if free:
            return free.pop()
        if self._top + size > self._capacity:
            return self._split(size)
        place, self._top = self._top, self._top + size
        return place

    def give(self, place: int, count: int) -> None:
        """Give a run back."""
        self._resting.append((self._clock() + QUARANTINE, place, run_length(count)))

    def adopt(self, runs: Iterable[tuple[int, int]]) -> None:
        """Start with runs (place and count) that are taken; what lies between them is free."""
        for place, count in sorted(runs):
            self._free_between(self._top, place)
            self._top = max(self._top, place + run_length(count))

    def _split(self, size: int) -> int:
        """Take a run from the smallest free one that is longer; what is left of it stays free."""
        longer = [length for length, free in self._free.items() if free and length > size]
        if not longer:
            raise FullError(f"{self._capacity} places are not enough")
        place = self._free[min(longer)].pop()
        self._free_between(place + size, place + min(longer))
        return place

    def _wake(self) -> None:
        now = self._clock()
        while self._resting and self._resting[0][0] <= now:
            _, place, size = self._resting.popleft()
            self._free.setdefault(size, []).append(place)

    def _free_between(self, start: int, end: int) -> None:
        while start < end:
            size = 1 << ((end - start).bit_length() - 1)
            self._free.setdefault(size, []).append(start)
            start += size


def run_length(count: int) -> int:
    """Length of the run that `count` places take."""
    return 1 << max(count - 1, 0).bit_length()
