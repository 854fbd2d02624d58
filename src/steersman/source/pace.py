"""When to ask an API server again, which one, and which failures to log."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import msgspec

from steersman.model.kube import EndpointSlice, KubeObject
from steersman.source.stats import SourceStats

MAX_RETRY_AFTER = 300.0
"""Seconds; a longer `Retry-After` is cut to this, or one mistake could silence us for a day."""


class Timing(msgspec.Struct, frozen=True):
    """The clock, the sleep function, the source of jitter and all periods, in seconds."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    random: Callable[[], float] = random.random
    """Uniform in [0, 1)."""
    first: float = 1.0
    """The first delay after a failure is at most this; each further one, `factor` times as much."""
    factor: float = 2.0
    longest: float = 30.0
    resume_spacing: float = 0.001
    """Between two nodes that resume their watches; all nodes take this times their number."""
    list_spacing: float = 0.005
    """The same of nodes that list everything again."""
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
    """Exponential delays with full jitter, for one series of failures."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self.level = 0
        """Number of consecutive failures; it stops growing with the delay."""

    @property
    def grown(self) -> bool:
        """Whether the delay has reached its maximum."""
        return self._window() >= self._timing.longest

    def _window(self) -> float:
        return min(self._timing.first * self._timing.factor**self.level, self._timing.longest)

    def reset(self) -> None:
        """End the series after a success."""
        self.level = 0

    def next(self, retry_after: float = 0.0, spread: float = 0.0) -> float:
        """Return the seconds to wait, and grow.

        Args:
            retry_after: seconds that the server asks to wait; the delay is added to them.
            spread: seconds over which the nodes of the cluster are to come, see `Pace`.
        """
        window = max(self._window(), spread)
        if not self.grown:
            self.level += 1
        # All of the window is used: nodes that fail together come back evenly spread over it.
        # A tenth of it is the least, or a node may be unlucky and ask again at once, repeatedly.
        return min(retry_after, MAX_RETRY_AFTER) + window * (0.1 + 0.9 * self._timing.random())


class Pace:
    """When one of thousands of nodes may ask again, so that they do not all come at once.

    If an API server ends, all its nodes notice in the same instant. Two laws keep the servers'
    load even, whatever the size of the cluster:

    - They return evenly spread over a time that is proportional to their number: 1,000 nodes a
      second resume their watches, 200 a second list everything (hundreds of kilobytes each). So
      10 nodes wait no longer than a first retry, and 5,000 come within 5 or 25 s. The
      number is estimated by the node names in EndpointSlices, which every node reads anyway.
    - While no server answers, the node makes one attempt at a time, not one for each kind. Any
      answer ends the wait of all kinds.
    """

    def __init__(self, timing: Timing, stats: SourceStats) -> None:
        self._timing = timing
        self._stats = stats
        self._backoff = Backoff(timing)
        self._turn = asyncio.Lock()
        self._answered = asyncio.Event()
        self._answers = 0
        self.unreachable = False
        """Whether the last request met no server at all."""

    @property
    def level(self) -> int:
        """Number of consecutive attempts that met no server, see `Backoff.level`."""
        return self._backoff.level

    def answered(self) -> None:
        """Record an answer of any kind: a server is there."""
        self.unreachable = False
        self._answers += 1
        self._answered.set()
        self._backoff.reset()

    def spread(self, spacing: float) -> float:
        """Return the seconds over which all nodes come, one in each `spacing`."""
        return min(self._stats.nodes * spacing, self._timing.longest)

    async def wait_for_server(self) -> None:
        """Wait for the next attempt after one that met no server, or until another one met one."""
        answers = self._answers
        async with self._turn:  # others wait here for their turn, and leave it if one succeeds
            if self._answers != answers:
                return
            self._answered.clear()
            delay = self._backoff.next(spread=self.spread(self._timing.resume_spacing))
            sleep = asyncio.ensure_future(self._timing.sleep(delay))
            answer = asyncio.ensure_future(self._answered.wait())
            try:
                await asyncio.wait((sleep, answer), return_when=asyncio.FIRST_COMPLETED)
            finally:
                sleep.cancel()
                answer.cancel()

    def counted(self, objects: Iterable[KubeObject]) -> Iterator[KubeObject]:
        """Yield the objects of a list; count the nodes in it if they are EndpointSlices."""
        nodes: set[str | None] = set()
        for obj in objects:
            if isinstance(obj, EndpointSlice):
                nodes.update(endpoint.node_name for endpoint in obj.endpoints or ())
            yield obj
        if nodes:
            self._stats.nodes = len(nodes)


class ServerOrder:
    """Which of several API servers to use: the one that works.

    Each node has an order of its own, by chance, so that all servers are used. After a failover it
    returns to its first server some minutes later, or a rolling restart would leave all nodes to
    the servers that were restarted first.
    """

    def __init__(self, servers: Sequence[str], timing: Timing) -> None:
        self._servers = sorted(servers, key=lambda _: timing.random())
        self._timing = timing
        self._index = 0
        self._return_at = 0.0
        self._failures = 0  # of the first server since it last answered

    def current(self) -> str:
        """Return the server to ask."""
        if self._index and self._timing.now() >= self._return_at:
            self._index = 0
        return self._servers[self._index]

    def leave(self, server: str) -> bool:
        """Use the next one after a server failed; return whether that is another one."""
        timing = self._timing
        if len(self._servers) == 1 or self._servers[self._index] != server:
            return False
        if not self._index:
            span = timing.watch_longest - timing.watch_shortest
            delay = timing.watch_shortest + span * timing.random()
            # It may be gone for good: look for it after 5 to 10 minutes, later about once an hour.
            self._return_at = timing.now() + delay * 2 ** min(self._failures, 3)
            self._failures += 1
        self._index = (self._index + 1) % len(self._servers)
        return True

    def answered(self, server: str) -> None:
        """Record that a server answers."""
        if server == self._servers[0]:
            self._failures = 0


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
