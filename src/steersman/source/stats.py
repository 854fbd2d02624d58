"""Counters of reading the API server, for metrics, health and the state page."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

import msgspec


class KindStats(msgspec.Struct):
    """The counters of one kind."""

    lists: int = 0
    """Complete lists, also by pages or as WatchList."""
    events: int = 0
    """Objects added, modified or deleted in watches."""
    bookmarks: int = 0
    errors: Counter[str] = msgspec.field(default_factory=Counter)
    """Failed requests and broken watches by reason, a short word such as `http_403`."""
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


REQUEST_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""Upper bounds in seconds, those of client-go."""


class Durations(msgspec.Struct):
    """How long requests took."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(REQUEST_BUCKETS) + 1))
    """Requests in each of REQUEST_BUCKETS, and those above the last one."""
    sum: float = 0.0
    """Seconds."""


class RequestStats(msgspec.Struct):
    """The counters of requests, Events included."""

    codes: Counter[tuple[str, str, str]] = msgspec.field(default_factory=Counter)
    """Requests by status (`<error>` without an answer), method and server."""
    durations: dict[tuple[str, str], Durations] = {}
    """By method and server."""

    def count(self, code: str, method: str, host: str) -> None:
        """Count a request."""
        self.codes[code, method, host] += 1

    def took(self, seconds: float, method: str, host: str) -> None:
        """Count the duration of a request."""
        found = self.durations.setdefault((method, host), Durations())
        found.counts[bisect_left(REQUEST_BUCKETS, seconds)] += 1
        found.sum += seconds


class SourceStats(msgspec.Struct):
    """The counters of all kinds."""

    kinds: dict[str, KindStats] = {}
    requests: RequestStats = msgspec.field(default_factory=RequestStats)
    server: str = ""
    """URL of the server in use."""
    failovers: int = 0
    nodes: int = 1
    """Nodes with endpoints in the last list of EndpointSlices: about the size of the cluster."""

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
