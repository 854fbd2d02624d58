"""When to sync: soon after a request, not too often, never too rarely, again after a failure."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from steersman.model.errors import BusyError

log = logging.getLogger(__name__)


class Clock(Protocol):
    """Monotonic time, and waiting in it: replaced in tests."""

    def time(self) -> float:
        """Seconds since some fixed moment."""
        ...

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Return when the event is set or the seconds have passed, whichever is first."""
        ...


class MonotonicClock:
    """The machine's clock."""

    def time(self) -> float:
        """Seconds since some fixed moment."""
        return time.monotonic()

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Return when the event is set or the seconds have passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()


class Runner:
    """Runs some work with bounded frequency (behaviour 7).

    - A request runs the work at once, but no sooner than `min_interval` after the end of the last
      run; requests until then make one run together.
    - Without requests, the work runs `max_interval` after the end of the last run.
    - After a run that failed, the work runs again after `retry_interval` (or `max_interval`, if
      that is shorter), though never sooner than `min_interval`; any run takes the place of that.
      With `first_retry`, the first repetition comes after that time, each further one after twice
      the time of the last: a lock is often held for a moment only.
    - A run that had nothing to do does not hold back the next one.

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
        first_retry: float | None = None,
    ) -> None:
        """Set up; nothing runs before `run`.

        Args:
            work: what to do; raises an Exception if it fails, returns False if there was nothing
                to do.
            min_interval: seconds between the end of a run and the next start, at least.
            retry_interval: seconds after which a failed run is repeated.
            max_interval: seconds after which the work runs unasked.
            clock: for tests.
            first_retry: seconds after which a run is repeated that failed for the first time.

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
        """Ask for a run. Only from the event loop's thread."""
        self._requested = True
        self._wake.set()

    async def run(self) -> None:
        """Run the work as described above until cancelled; its failures are only logged."""
        earliest = self._clock.time()
        latest = earliest + self._max
        while True:
            await self._wait(earliest, latest)
            self._requested = False  # a request during the run asks for another one
            idle = await self._once() is False
            ended = self._clock.time()
            earliest = earliest if idle else ended + self._min
            failed = self._failures > 0
            latest = max(ended + self._delay, earliest) if failed else ended + self._max

    async def _wait(self, earliest: float, latest: float) -> None:
        while (left := (earliest if self._requested else latest) - self._clock.time()) > 0:
            self._wake.clear()
            await self._clock.wait(self._wake, left)

    async def _once(self) -> bool | None:
        try:
            outcome = await self._work()
        except Exception as error:
            self._failures += 1
            expected = isinstance(error, (BusyError, OSError))  # TimeoutError is an OSError
            text = "sync failed: %s; everything stays queued, retrying in %gs"
            log.log(
                logging.WARNING if expected else logging.ERROR,
                text,
                error,
                max(self._delay, self._min),
                exc_info=None if expected else error,
            )
            return None
        self._failures = 0
        return outcome

    @property
    def _delay(self) -> float:
        """Seconds until the next repetition."""
        if self._first is None:
            return self._retry
        return min(self._retry, self._first * 2.0 ** min(self._failures - 1, 30))
