"""What the process remembers of its syncs: how long changes took, for pages. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

_LAG_SECONDS, _MOST_LAGS = 300.0, 512
"""Time and number of lags that are kept."""


class Lags:
    """How long the changes of the last minutes took until they were in force."""

    def __init__(self) -> None:
        """Start without any."""
        self._lags: deque[tuple[float, float]] = deque(maxlen=_MOST_LAGS)
        self.last: float | None = None
        """Seconds that the last change took; None if there was none."""

    def add(self, now: float, received: float | None, programming: Iterable[float]) -> None:
        """Add the lag of a sync: that of its oldest change.

        Args:
            now: when the changes were in force, in seconds of a monotonic clock.
            received: when the first one was received, by the same clock.
            programming: seconds from the causes of changes, where EndpointSlices tell them.
        """
        since = () if received is None else (now - received,)
        self.last = max((*programming, *since), default=None)
        if self.last is not None:
            self._lags.append((now, self.last))

    def p99(self, now: float) -> float | None:
        """Return the 99th percentile of the last five minutes; None if nothing changed then."""
        while self._lags and now - self._lags[0][0] > _LAG_SECONDS:
            self._lags.popleft()
        lags = sorted(lag for _, lag in self._lags)
        return lags[min(len(lags) - 1, len(lags) * 99 // 100)] if lags else None
