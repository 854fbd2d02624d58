"""Run the sync at the right times: on request, not too often, and again after a failure."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from steersman.model.errors import BusyError

log = logging.getLogger(__name__)


class Clock(Protocol):
    """Monotonic time, and waiting in it: replaced in tests."""

    def time(self) -> float:
        """Return seconds since some fixed moment."""
        ...

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Return when the event is set or the seconds have passed, whichever is first."""
        ...


class MonotonicClock:
    """The machine's clock."""

    def time(self) -> float:
        """Return seconds since some fixed moment."""
        return time.monotonic()

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Return when the event is set or the seconds have passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()


class Runner:
    """Runs some work with bounded frequency (behaviour 7), as upstream's BoundedFrequencyRunner.

    - A request runs the work at once, but no sooner than `min_interval` after the end of the last
      run; all requests until then cause one run.
    - Without requests, the work runs `max_interval` after the end of the last run.
    - After a failed run, the work runs again after `retry_interval` (or `max_interval`, if that is
      shorter), but never sooner than `min_interval`; any run replaces this retry. With
      `first_retry`, the first retry comes after that time, each further one after twice the time
      of the last: a lock is often held for a moment only.
    - A run without work does not delay the next one.

    All intervals are in seconds, counted from the end of a run. Runs never overlap.
    """

    def __init__(
        self,
        work: Callable[[], Awaitable[bool | None]],
        min_interval: float,
        retry_interval: float,
        max_interval: float,
        clock: Clock | None = None,
        *,
        first_retry: float = math.inf,
    ) -> None:
        """Create a runner; nothing runs before `run`.

        Args:
            work: the work; raises an Exception if it fails, returns False if there was none.
            retry_interval: seconds until a failed run is retried.
            max_interval: seconds until the work runs without a request.
            first_retry: seconds until the first retry after a success, if that is shorter.

        Raises:
            ValueError: `max_interval` is below `min_interval`.
        """
        if max_interval < min_interval:
            raise ValueError(f"max_interval {max_interval} is below min_interval {min_interval}")
        self._work = work
        self._min = min_interval
        self._retry = min(retry_interval, max_interval)
        self._max = max_interval
        self._first = first_retry
        self._failures = 0
        self._clock = clock or MonotonicClock()
        self._wake = asyncio.Event()
        self._requested = False

    def set_intervals(self, min_interval: float, retry_interval: float) -> None:
        """Use other intervals (seconds) from the end of the next run on."""
        self._min = min_interval
        self._retry = min(retry_interval, self._max)

    def request(self) -> None:
        """Request a run. Only from the event loop's thread."""
        self._requested = True
        self._wake.set()

    async def run(self) -> None:
        """Run the work as described above until cancelled; its failures are only logged."""
        earliest = self._clock.time()
        latest = earliest + self._max
        while True:
            while (left := (earliest if self._requested else latest) - self._clock.time()) > 0:
                self._wake.clear()
                await self._clock.wait(self._wake, left)
            self._requested = False  # a request during the run asks for another one
            idle, pause = False, self._max
            try:
                idle = await self._work() is False
                self._failures = 0
            except Exception as error:
                pause = min(self._retry, self._first * 2.0 ** min(self._failures, 30))
                pause = max(pause, self._min)
                self._failures += 1
                expected = isinstance(error, (BusyError, OSError))  # TimeoutError is an OSError
                log.log(
                    logging.WARNING if expected else logging.ERROR,
                    "sync failed: %s; everything stays queued, retrying in %gs",
                    *(error, pause),
                    exc_info=None if expected else error,
                )
            ended = self._clock.time()
            latest = ended + pause
            if not idle:  # a run without work does not delay the next one
                earliest = ended + self._min
