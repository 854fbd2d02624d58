"""What the process remembers of its syncs, for pages: the last 1,000, as far as an hour back.

A record has a bounded number of names and errors, and is kept as msgpack: usually some 300 bytes,
at most 2.5 kB. So all of them take 0.4 MB, and never more than 3 MB.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from steersman.model.findings import clipped, printable
from steersman.model.history import History as Answer
from steersman.model.history import Refusal, SyncRecord
from steersman.run.sync.in_force import InForce, about_node, services_of
from steersman.run.sync.state import SyncReport

_LAG_SECONDS, _MOST_LAGS = 300.0, 512
"""Time and number of lags that are kept."""
_HOUR = 3600.0
_MOST_RECORDS = 1000
_NAMES, _LONGEST_NAME = 5, 127
"""Names of a record, and their characters: a namespace, a slash and a name."""
_REFUSALS, _LONGEST_OWNER, _LONGEST_TEXT = 3, 160, 200
"""Refusals of a record, and characters of their owners and of any error."""


class Lags:
    """How long the changes of the last minutes took until they were in force."""

    def __init__(self) -> None:
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
        if (lag := max((*programming, *since), default=None)) is not None:
            lag = round(lag, 6)
            self._lags.append((now, lag))
        self.last = lag

    def p99(self, now: float) -> float | None:
        """Return the 99th percentile of the last five minutes; None if nothing changed then."""
        while self._lags and now - self._lags[0][0] > _LAG_SECONDS:
            self._lags.popleft()
        lags = sorted(lag for _, lag in self._lags)
        return lags[min(len(lags) - 1, len(lags) * 99 // 100)] if lags else None


class History:
    """The last syncs."""

    def __init__(self, wall: Callable[[], float], lags: Lags, in_force: InForce) -> None:
        """Start without records.

        Args:
            lags: the lag of each report is added to them before `observe`.
        """
        self._wall = wall
        self._lags = lags
        self._cursor = in_force.log.cursor()
        self._started = wall()
        self._records: deque[bytes] = deque(maxlen=_MOST_RECORDS)
        self._buffer = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SyncRecord)

    def observe(self, report: SyncReport) -> None:
        """Remember a sync."""
        if (result := report.result) is None:
            return
        changed, revision = self._cursor.changed()
        services, drift = services_of(changed), report.drift
        # Only the changes of objects have a lag: others leave that of an earlier sync there.
        has_lag = report.arrivals.received is not None and result.reason != "start"
        lag = self._lags.last if has_lag else None
        names = heapq.nsmallest(_NAMES, services)
        self._add(
            SyncRecord(
                at=report.state.at - result.seconds,
                until=report.state.at,
                reason=result.reason,
                revision=result.revision,
                seconds=round(result.seconds, 6),
                phases={phase: round(seconds, 6) for phase, seconds in result.phases.items()},
                lag=lag,
                services=len(services),
                names=tuple(clipped(str(name), _LONGEST_NAME) for name in names),
                node=about_node(changed),
                planned=result.dirty,
                added=result.added,
                changed=result.changed,
                removed=result.removed,
                compared=report.compared,
                refused=result.refused,
                refusals=tuple(
                    Refusal(clipped(owner, _LONGEST_OWNER), clipped(printable(why), _LONGEST_TEXT))
                    for owner, why in report.refusals[:_REFUSALS]
                ),
                drift=""
                if drift is None
                else clipped(f"{drift.what}, by {drift.who}", _LONGEST_TEXT),
            )
        )
        self._cursor.move(revision)

    def failed(self, why: str) -> None:
        """Remember a sync that failed."""
        now = self._wall()
        self._add(SyncRecord(now, now, "retry", failure=clipped(printable(why), _LONGEST_TEXT)))

    def answer(self, node: str) -> Answer:
        """Return the history of a node of this name."""
        now, encoded = self._wall(), tuple(self._records)
        kept = tuple(map(self._decoder.decode, encoded))
        records = tuple(record for record in kept if record.until >= now - _HOUR)
        # Once the deque is full, what was before its first record is forgotten.
        begin = kept[0].at if len(kept) == _MOST_RECORDS else self._started
        return Answer(node, now, self._started, max(begin, now - _HOUR), records)

    def _add(self, record: SyncRecord) -> None:
        # Into a buffer: the bytes that `encode` returns may occupy more than their length.
        self._encoder.encode_into(record, self._buffer)
        self._records.append(bytes(self._buffer))
