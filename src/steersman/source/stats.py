"""What reading the API server did: counters for metrics and health; which failures are logged."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
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


class Complaints:
    """Tells which failures are worth a log line: one that meets every kind is one line a minute."""

    QUIET = 60.0
    """Seconds until the same words are logged again."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._logged: dict[str, float] = {}

    def level(self, words: str) -> int:
        """Return the level to log a failure at."""
        now = self._now()
        self._logged = {each: at for each, at in self._logged.items() if now - at < self.QUIET}
        if words in self._logged:
            return logging.DEBUG
        self._logged[words] = now
        return logging.WARNING

    def resolved(self) -> bool:
        """Take note that a request works; return whether something was logged before."""
        any_logged = bool(self._logged)
        self._logged.clear()
        return any_logged
