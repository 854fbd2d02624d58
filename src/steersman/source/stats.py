"""Counters of what reading the API server did, for metrics and health to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class KindStats:
    """What happened to one kind."""

    lists: int = 0
    """Complete lists taken, by pages or as WatchList."""
    relists: int = 0
    """Those after the first one."""
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
    """Body bytes received, after decompression."""
    connected: bool = False
    """A watch is open, or the kind is known not to be there."""
    last_event: float | None = None
    """When bytes last came, by the clock of `Timing`."""

    def received(self, chunk: bytes, now: float) -> None:
        """Take note of bytes that came."""
        self.received_bytes += len(chunk)
        self.last_event = now


@dataclass
class SourceStats:
    """What happened to all kinds."""

    kinds: dict[str, KindStats] = field(default_factory=dict)
    server: str = ""
    """The server in use."""
    failovers: int = 0

    def kind(self, kind: str) -> KindStats:
        """The counters of a kind."""
        return self.kinds.setdefault(kind, KindStats())

    @property
    def connected(self) -> bool:
        """Whether every kind is being followed."""
        return bool(self.kinds) and all(stats.connected for stats in self.kinds.values())

    @property
    def last_event(self) -> float | None:
        """When bytes last came for any kind."""
        return max((s.last_event for s in self.kinds.values() if s.last_event), default=None)

    def errors(self) -> Mapping[str, int]:
        """Failures of all kinds by reason."""
        return sum((stats.errors for stats in self.kinds.values()), Counter())
