"""Log storms: of many lines of one kind a few are written, the rest is counted.

One cause can make thousands of lines a second (no descriptors left, a tenant that edits an object
in a loop), and the disk and the other lines must survive it. The first lines of each kind are
always written, and once a minute one line says how many were left out.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

_PERIOD = 60.0  # seconds
_BURSTS = ((logging.WARNING, 60), (logging.INFO, 300))
"""Lines of one kind in a period, by level; there is no limit for what -v asks for."""
_KINDS = 512
"""Kinds that are remembered; more at once forget the oldest."""
_NUMBERS = re.compile(r"\d+")
_START = 100  # characters


class _Kind:
    """The lines of one kind in one period."""

    __slots__ = ("last", "left_out", "since", "written")

    def __init__(self, since: float) -> None:
        self.since = since
        self.written = 0
        self.left_out = 0
        self.last: logging.LogRecord | None = None


class Storms:
    """Decides what of the records that come is written."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start with nothing remembered.

        Args:
            clock: monotonic seconds.
        """
        self._clock = clock
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._due = 0.0
        """When the first period ends in which something was left out; 0 for none."""

    def take(self, record: logging.LogRecord) -> Iterator[logging.LogRecord]:
        """Yield what is to be written now that a record came."""
        now = self._clock()
        if self._due and now >= self._due:
            yield from self._reports(now)
        burst = next((lines for level, lines in _BURSTS if record.levelno >= level), 0)
        if not burst:
            yield record
            return
        key = _kind_of(record)
        kind = self._kinds.get(key)
        if kind is None or now - kind.since >= _PERIOD:
            self._kinds.pop(key, None)
            kind = self._kinds[key] = _Kind(now)
            if len(self._kinds) > _KINDS:
                yield from _report(self._kinds.popitem(last=False)[1], now)
        if kind.written < burst:
            kind.written += 1
            yield record
            return
        kind.left_out += 1
        kind.last = record
        if kind.left_out == 1:
            self._due = min(self._due or kind.since + _PERIOD, kind.since + _PERIOD)
            rest = kind.since + _PERIOD - now
            yield _like(record, "more lines like the last one are left out for %.0f s", rest)

    def rest(self) -> Iterator[logging.LogRecord]:
        """Yield what is still to be said at the end."""
        now = self._clock()
        for kind in self._kinds.values():
            yield from _report(kind, now)

    def _reports(self, now: float) -> Iterator[logging.LogRecord]:
        waiting = [kind for kind in self._kinds.values() if kind.left_out]
        self._due = 0.0
        for kind in waiting:
            end = kind.since + _PERIOD
            if now >= end:
                yield from _report(kind, now)
            else:
                self._due = min(self._due or end, end)


def _kind_of(record: logging.LogRecord) -> Hashable:
    """Return what lines have in common that differ only in their arguments."""
    text = str(record.msg)
    if not record.args:
        text = _NUMBERS.sub("0", text.partition("\n")[0][:_START])
    where: Hashable = None
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = type(error), trace and (trace.tb_frame.f_code, trace.tb_lineno)
    return record.name, record.levelno, record.pathname, record.lineno, text, where


def _report(kind: _Kind, now: float) -> Iterator[logging.LogRecord]:
    """Say how many lines were left out, if any, and count from 0 again."""
    if kind.last is not None:
        last, count, kind.last, kind.left_out = kind.last, kind.left_out, None, 0
        text = "%d lines like this one were left out in %.0f s: %s"
        yield _like(last, text, count, now - kind.since, last.getMessage())


def _like(record: logging.LogRecord, text: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord(
        record.name, record.levelno, record.pathname, record.lineno, text, args, None
    )
