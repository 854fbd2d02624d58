"""Iterations of the event loop: what happens in one of them keeps all others waiting."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import TracebackType
from typing import Self


class Iterations:
    """Counts what happens in each iteration of the running loop."""

    def __init__(self) -> None:
        self.now = 0
        self._counts: Counter[int] = Counter()

    def happened(self) -> None:
        self._counts[self.now] += 1

    @property
    def total(self) -> int:
        return self._counts.total()

    @property
    def most(self) -> int:
        """The most that happened in an iteration."""
        return max(self._counts.values())

    def __enter__(self) -> Self:
        self._next()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handle.cancel()

    def _next(self) -> None:
        self.now += 1
        self._handle = asyncio.get_running_loop().call_soon(self._next)
