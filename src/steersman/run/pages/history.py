"""What the process remembers of its syncs, for pages.

History keeps the syncs of the last hour, each as a few hundred bytes of msgpack. If these grow
beyond a limit, neighbours are merged, first those of the same kind that follow each other within
half a second, then within twice that time and so on, until a quarter of the room is free. So a
busy hour is coarse at its beginning and exact at its end, and a rare event stays a record of its
own for as long as there is room.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from steersman.model.findings import clipped, printable
from steersman.model.history import History as Answer
from steersman.model.history import Refusal, SyncRecord
from steersman.run.sync.state import SyncReport

_LAG_SECONDS, _MOST_LAGS = 300.0, 512
"""Time and number of lags that are kept."""
_HOUR = 3600.0
_ROOM = 350_000
"""Bytes of all records, with `_OVERHEAD` of the interpreter for each. Merging takes up to 550 kB
more, which the interpreter keeps until its next full collection: in all less than a megabyte."""
_OVERHEAD = 56
_GRAIN = 0.5
"""Seconds within which records are merged first."""
_ANY = 8.0
"""Seconds from which on records of different kinds are merged, too."""
_NAMES, _REFUSALS, _TEXT = 5, 3, 200
"""Names and refusals of a record, and characters of a text."""


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
    """The syncs of the last hour."""

    def __init__(self, wall: Callable[[], float], lags: Lags, room: int = _ROOM) -> None:
        """Start without records.

        Args:
            wall: returns seconds since 1970.
            lags: the lag of each report is added to them before `observe`.
            room: bytes that all records may take.
        """
        self._wall = wall
        self._lags = lags
        self._room = room
        self._started = wall()
        self._records: deque[bytes] = deque()
        self._size = 0
        self._buffer = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SyncRecord)

    def observe(self, report: SyncReport) -> None:
        """Remember a sync."""
        if (result := report.result) is None:
            return
        changes, drift = report.changes, report.drift
        lag = self._lags.last if changes and result.reason != "start" else None
        names = heapq.nsmallest(_NAMES, changes.services)
        self._add(
            SyncRecord(
                at=report.state.at - result.seconds,
                until=report.state.at,
                reason=result.reason,
                revision=result.revision,
                seconds=round(result.seconds, 6),
                phases={phase: round(seconds, 6) for phase, seconds in result.phases.items()},
                lag=lag,
                services=len(changes.services),
                names=tuple(clipped(str(name), _TEXT) for name in names),
                node=changes.node or report.plans.settings_changed,
                planned=result.dirty,
                added=result.added,
                changed=result.changed,
                removed=result.removed,
                compared=report.compared,
                refused=result.refused,
                refusals=tuple(
                    Refusal(clipped(owner, _TEXT), clipped(printable(why), _TEXT))
                    for owner, why in report.refusals[:_REFUSALS]
                ),
                drift="" if drift is None else clipped(f"{drift.what}, by {drift.who}", _TEXT),
            )
        )

    def failed(self, why: str) -> None:
        """Remember a sync that failed."""
        now = self._wall()
        self._add(SyncRecord(now, now, "retry", failure=clipped(printable(why), _TEXT)))

    def answer(self, node: str) -> Answer:
        """Return the history of a node of this name."""
        now = self._wall()
        self._forget(now)
        records = tuple(map(self._decoder.decode, tuple(self._records)))
        return Answer(node, now, self._started, max(self._started, now - _HOUR), records)

    def _add(self, record: SyncRecord) -> None:
        self._put(record)
        self._forget(record.until)
        grain = _GRAIN
        while self._size > self._room:
            self._merge(grain)
            grain *= 2

    def _put(self, record: SyncRecord) -> None:
        # Into a buffer: the bytes that `encode` returns may occupy more than their length.
        self._encoder.encode_into(record, self._buffer)
        data = bytes(self._buffer)
        self._records.append(data)
        self._size += len(data) + _OVERHEAD

    def _forget(self, now: float) -> None:
        """Forget records that are older than an hour."""
        while self._records and self._decoder.decode(self._records[0]).until < now - _HOUR:
            self._size -= len(self._records.popleft()) + _OVERHEAD

    def _merge(self, grain: float) -> None:
        """Merge neighbours within some seconds, the oldest first, until a quarter is free."""
        before, self._records, self._size = self._records, deque(), 0
        last = self._decoder.decode(before.popleft())
        left = sum(map(len, before)) + _OVERHEAD * len(before)
        while before and self._size + left >= self._room * 3 // 4:
            data = before.popleft()
            left -= len(data) + _OVERHEAD
            record = self._decoder.decode(data)
            if record.until - last.at <= grain and (grain >= _ANY or kind(record) == kind(last)):
                last = merged(last, record)
            else:
                self._put(last)
                last = record
        self._put(last)
        self._records.extend(before)
        self._size += left


def kind(record: SyncRecord) -> tuple[object, ...]:
    """Return the property of records that are merged first."""
    return record.reason, bool(record.failure), bool(record.drift), record.refused > 0


def merged(one: SyncRecord, other: SyncRecord) -> SyncRecord:
    """Return two successive records as one."""
    phases = dict(one.phases)
    for phase, seconds in other.phases.items():
        phases[phase] = round(phases.get(phase, 0.0) + seconds, 6)
    lags = [lag for lag in (one.lag, other.lag) if lag is not None]
    return SyncRecord(
        at=one.at,
        until=other.until,
        reason=other.reason,
        revision=max(one.revision, other.revision),
        merged=one.merged + other.merged,
        seconds=round(one.seconds + other.seconds, 6),
        phases=phases,
        lag=max(lags, default=None),
        services=one.services + other.services,
        names=tuple(dict.fromkeys((*one.names, *other.names)))[:_NAMES],
        node=one.node or other.node,
        planned=one.planned + other.planned,
        added=one.added + other.added,
        changed=one.changed + other.changed,
        removed=one.removed + other.removed,
        compared=one.compared or other.compared,
        refused=other.refused,
        refusals=other.refusals or one.refusals,
        drift=other.drift or one.drift,
        failure=other.failure or one.failure,
    )
