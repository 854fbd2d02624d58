"""When to retry, and which failures to log: delays, periods and clocks of reading an API server."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

MAX_RETRY_AFTER = 300.0
"""Seconds; a longer `Retry-After` is cut to this, or one mistake could silence us for a day."""


@dataclass(frozen=True)
class Timing:
    """The clock, the sleep function, the source of jitter and all periods, in seconds."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    random: Callable[[], float] = random.random
    """Uniform in [0, 1)."""
    first: float = 0.5
    """The first delay after a failure, before jitter of half of it up and down."""
    factor: float = 2.0
    longest: float = 30.0
    optional_retry: float = 300.0
    """Between attempts at a kind that this server does not have or forbids."""
    connect: float = 10.0
    answer: float = 30.0
    """Until a list's next bytes."""
    initial_idle_timeout: float = 10.0
    """Silence in a WatchList's initial events after which it counts as unsupported."""
    initial_total: float = 120.0
    """All of a WatchList's initial events."""
    watch_shortest: float = 300.0
    watch_longest: float = 600.0
    """`timeoutSeconds` of a watch is drawn from between these two (client-go's values)."""
    idle_timeout: float = 180.0
    """Silence after which a watch counts as stalled; bookmarks come about once a minute."""
    grace: float = 30.0
    """How long a server may overrun `timeoutSeconds`."""
    steady: float = 5.0
    """A watch that lasted this long, or brought an event, ends the series of failures."""


class Backoff:
    """Jittered exponential delays for one series of failures."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self.level = 0
        """Number of consecutive failures; it stops growing with the delay."""

    @property
    def grown(self) -> bool:
        """Whether the delay has reached its maximum."""
        return self._delay() >= self._timing.longest

    def _delay(self) -> float:
        return min(self._timing.first * self._timing.factor**self.level, self._timing.longest)

    def reset(self) -> None:
        """End the series after a success."""
        self.level = 0

    def next(self, retry_after: float = 0.0) -> float:
        """Return the seconds to wait, and grow.

        Args:
            retry_after: seconds that the server asks to wait; if they are more than the delay,
                half of the delay is added to them.
        """
        timing = self._timing
        delay = self._delay()
        if not self.grown:
            self.level += 1
        # Jitter keeps the nodes of a cluster from retrying all at the same time.
        jittered = delay * (0.5 + timing.random())
        least = min(retry_after, MAX_RETRY_AFTER)
        return least + jittered * 0.5 if least > jittered else jittered


class LogThrottle:
    """Chooses log levels, so that a failure of all kinds at once is one line a minute."""

    PERIOD = 60.0
    """Seconds until the same text is logged again."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._logged: dict[str, float] = {}

    def level(self, text: str) -> int:
        """Return WARNING for a text that was not logged recently, else DEBUG."""
        now = self._now()
        self._logged = {each: at for each, at in self._logged.items() if now - at < self.PERIOD}
        if text in self._logged:
            return logging.DEBUG
        self._logged[text] = now
        return logging.WARNING

    def resolved(self) -> bool:
        """Record a success; return whether a failure was logged before it."""
        any_logged = bool(self._logged)
        self._logged.clear()
        return any_logged
