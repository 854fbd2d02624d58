"""The interface between sources of objects and the Store: Source, EventHandler."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from steersman.model.findings import Finding
from steersman.model.kube import EndpointSlice, KubeObject
from steersman.model.names import ObjectName

# Microseconds until the event loop gets its turn; an object costs 10, an endpoint 1.
_BATCH_COST = 3000


class EventHandler(Protocol):
    """Receives objects from a Source. Calls are cheap, never fail, and come from the event loop.

    Sources ignore the results of `upsert` and `delete`.
    """

    def retain(self, kind: str, names: Container[ObjectName], keep: Container[str] = ()) -> None:
        """End a complete list of a kind, after `upsert` of each of its objects.

        Objects of other names are removed, except for those with a scope (`Service shop/cart`) in
        `keep`: they could not be read now, so their last good version is kept.

        The first call for a kind also completes its initial list.
        """
        ...

    def upsert(self, obj: KubeObject) -> object:
        """Add or replace one object."""
        ...

    def delete(self, kind: str, name: ObjectName) -> object:
        """Remove one object; an unknown one is no change."""
        ...

    def report(self, scope: str, findings: Sequence[Finding]) -> None:
        """Replace the Findings of a scope (an object's name or a file); () clears it."""
        ...


class Source(Protocol):
    """Reads Services, EndpointSlices and so on, and follows their changes."""

    @property
    def stats(self) -> SourceStats | None:
        """Counts of the connection to the API server; None if there is none."""
        ...

    async def run(self, handler: EventHandler) -> None:
        """Feed the handler until cancelled; external failures are retried inside, forever."""
        ...


async def upsert_in_batches(
    handler: EventHandler, objects: Iterable[KubeObject]
) -> set[ObjectName]:
    """Upsert many objects without blocking the event loop for long; return their names."""
    names: set[ObjectName] = set()
    cost = 0
    for obj in objects:
        names.add(obj.metadata.object_name)
        handler.upsert(obj)
        cost += 10 + (len(obj.endpoints or ()) if isinstance(obj, EndpointSlice) else 0)
        if cost >= _BATCH_COST:
            cost = 0
            await asyncio.sleep(0)
    return names


# -- Counters --------------------------------------------------------------------------------------
#
# Counters of reading the API server, for metrics, health and the state page.


@dataclass
class KindStats:
    """The counters of one kind."""

    lists: int = 0
    """Complete lists, by pages or as WatchList."""
    relists: int = 0
    """Complete lists after the first one."""
    watches: int = 0
    """Watches that the server accepted."""
    events: int = 0
    """Objects added, modified or deleted in watches."""
    bookmarks: int = 0
    malformed: int = 0
    """Objects that could not be decoded."""
    errors: Counter[str] = field(default_factory=Counter)
    """Failed requests and broken watches by reason, a short word such as `http_403`."""
    retries: int = 0
    """Waits before another attempt."""
    received_bytes: int = 0
    """Bytes of bodies, after decompression."""
    connected: bool = False
    """Whether a watch is open, or the server is known not to have the kind."""
    last_event: float | None = None
    """Time of the last bytes received, by the clock of `Timing`."""

    def received(self, chunk: bytes, now: float) -> None:
        """Count bytes received now."""
        self.received_bytes += len(chunk)
        self.last_event = now


@dataclass
class SourceStats:
    """The counters of all kinds."""

    kinds: dict[str, KindStats] = field(default_factory=dict)
    server: str = ""
    """URL of the server in use."""
    failovers: int = 0

    def kind(self, kind: str) -> KindStats:
        """Return the counters of a kind."""
        return self.kinds.setdefault(kind, KindStats())

    @property
    def connected(self) -> bool:
        """Whether all kinds are connected."""
        return bool(self.kinds) and all(stats.connected for stats in self.kinds.values())

    @property
    def last_event(self) -> float | None:
        """Time of the last bytes received for any kind."""
        return max((s.last_event for s in self.kinds.values() if s.last_event), default=None)

    def errors(self) -> Mapping[str, int]:
        """Return the failures of all kinds by reason."""
        return sum((stats.errors for stats in self.kinds.values()), Counter())


# -- When to try again -----------------------------------------------------------------------------
#
# When to retry, and which failures to log: delays, periods and clocks of reading an API server.

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
