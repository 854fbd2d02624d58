"""When to try again: jittered exponential delays, with the clock and the dice as arguments."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

MAX_RETRY_AFTER = 300.0
"""Seconds; a server's longer wish is cut to this, or one mistake could silence us for a day."""


@dataclass(frozen=True)
class Timing:
    """Clock, sleep, dice and all the periods of reading an API server, in seconds."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    random: Callable[[], float] = random.random
    """Uniform in [0, 1)."""
    first: float = 0.5
    """The first delay after a failure, before jitter of half of it up and down."""
    factor: float = 2.0
    longest: float = 30.0
    seldom: float = 300.0
    """Between attempts at a kind that this server does not have or does not show."""
    connect: float = 10.0
    answer: float = 30.0
    """Until a list's next bytes."""
    initial_quiet: float = 10.0
    """Silence in a WatchList's initial events after which it is taken for unsupported."""
    initial_total: float = 120.0
    """All of a WatchList's initial events."""
    watch_shortest: float = 300.0
    watch_longest: float = 600.0
    """`timeoutSeconds` of a watch is drawn from between these two (client-go's values)."""
    quiet: float = 180.0
    """Silence after which a watch counts as stalled; bookmarks come about once a minute."""
    grace: float = 30.0
    """How long a server may overrun `timeoutSeconds`."""
    steady: float = 5.0
    """A watch that lasted this long, or brought an event, ends the series of failures."""


class Backoff:
    """The delays of one series of failures."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self.level = 0
        """Failures in a row, up to where the delay stops growing."""

    @property
    def grown(self) -> bool:
        """Whether the delay is as long as it gets."""
        return self._delay() >= self._timing.longest

    def _delay(self) -> float:
        return min(self._timing.first * self._timing.factor**self.level, self._timing.longest)

    def reset(self) -> None:
        """End the series: something worked."""
        self.level = 0

    def next(self, at_least: float = 0.0) -> float:
        """Return the seconds to wait, and grow; a server's wish (`Retry-After`) is added to."""
        timing = self._timing
        delay = self._delay()
        if not self.grown:
            self.level += 1
        jittered = delay * (0.5 + timing.random())
        wish = min(at_least, MAX_RETRY_AFTER)
        return wish + jittered * 0.5 if wish > jittered else jittered
