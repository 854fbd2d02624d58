"""Logs in the formats of Kubernetes' components: klog text and JSON, with -v and --vmodule.

Everything logs through the standard library. Severity INFO is klog's V(0); `v(3)` is the level
of V(3), and the standard DEBUG counts as V(4), klog's "debug".

A record is one line, whatever its contents: names and values that others wrote cannot forge a line
or control a terminal.

The number of lines is bounded. One cause can make thousands of lines a second (no descriptors left,
a tenant that edits an object in a loop), and the disk and the other lines must survive it. So the
first lines of each kind are always written, and one line a minute reports how many were left out.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import re
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import datetime
from pathlib import PurePath
from typing import TextIO, TypeAlias

import msgspec

from steersman.model.findings import clipped, printable

_DEBUG_VERBOSITY = 4
_LETTERS = ((logging.CRITICAL, "F"), (logging.ERROR, "E"), (logging.WARNING, "W"), (0, "I"))
_LONGEST = 16_384  # characters of a message, or of a traceback
_PERIOD = 60.0  # seconds
_BURSTS = ((logging.WARNING, 60), (logging.INFO, 300))
"""Lines of one kind in a period, by level; records that only -v shows have no limit."""
_KINDS = 512
"""Kinds that are remembered; the oldest are forgotten beyond that."""
_NUMBERS = re.compile(r"\d+")
_START = 100  # characters
Vmodule: TypeAlias = Sequence[tuple[str, int]]
"""Patterns of files, and the verbosity of each; the first that matches counts."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def v(verbosity: int) -> int:
    """Return the level of `klog.V(verbosity)`, for `logger.log`."""
    return logging.INFO - verbosity


def verbosity_of(level: int) -> int:
    """Return the lowest verbosity that shows records of a level."""
    if level >= logging.INFO:
        return 0
    return _DEBUG_VERBOSITY if level == logging.DEBUG else logging.INFO - level


class Verbosity(logging.Filter):
    """Selects records by -v and --vmodule; the verbosity can be changed while running.

    A pattern of --vmodule with a slash is matched with the file's path, others with its name, both
    without `.py`; `*` and `?` match anything.
    """

    def __init__(self, verbosity: int = 0, vmodule: Vmodule = ()) -> None:
        super().__init__()
        self._vmodule = vmodule
        self._of_file: dict[str, int | None] = {}
        self.verbosity = verbosity

    @property
    def level(self) -> int:
        """The lowest level that can pass, for the logger: lower records cost next to nothing."""
        most = max([self.verbosity, *(number for _, number in self._vmodule)])
        level = v(most)
        return min(level, logging.DEBUG) if most >= _DEBUG_VERBOSITY else level

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown."""
        needed = verbosity_of(record.levelno)
        if needed == 0:
            return True
        if not self._vmodule:
            return needed <= self.verbosity
        path = record.pathname
        if path not in self._of_file:
            stem = str(PurePath(path).with_suffix("")) if path else ""
            name = stem.rpartition("/")[2]
            matching = (
                number
                for pattern, number in self._vmodule
                if fnmatch.fnmatchcase(stem if "/" in pattern else name, pattern)
            )
            self._of_file[path] = next(matching, None)  # the first pattern that matches counts
        special = self._of_file[path]
        return needed <= (self.verbosity if special is None else special)


class TextFormatter(logging.Formatter):
    """klog's text: `I1121 05:56:57.123456    4711 sync.py:12] message key="value"`.

    A traceback is `err="..."`, its line breaks written as `\\n`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        letter = next(letter for level, letter in _LETTERS if record.levelno >= level)
        when = datetime.fromtimestamp(record.created).strftime("%m%d %H:%M:%S.%f")
        head = f"{letter}{when} {record.process or 0:>7} {record.filename}:{record.lineno}]"
        error = _trace(record)
        extra = _extra(record) | ({"err": error} if error else {})
        pairs = "".join(
            f" {key}={value if isinstance(value, int | float) else json.dumps(str(value))}"
            for key, value in extra.items()
        )
        return f"{head} {printable(_message(record))}{pairs}"


class JSONFormatter(logging.Formatter):
    """component-base's JSON: `ts` in milliseconds, `caller`, `msg`, `v` (not for errors)."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        line: dict[str, object] = {
            "ts": round(record.created * 1000, 3),
            "caller": f"{_source(record.pathname)}:{record.lineno}",
            "msg": _message(record),
        }
        if record.levelno < logging.ERROR:
            line["v"] = verbosity_of(record.levelno)
        if record.levelno >= logging.WARNING:  # beyond component-base, whose warnings look like v 0
            line["severity"] = "error" if record.levelno >= logging.ERROR else "warning"
        error = _trace(record)
        if error:
            line["err"] = error
        return json.dumps(line | _extra(record), default=str)


def _source(path: str) -> str:
    """Return the path of a source file from its package on, as `steersman/run/sync/sync.py`."""
    parts = PurePath(path).parts
    for at in range(len(parts) - 1, 0, -1):
        if parts[at] == "steersman":
            return "/".join(parts[at:])
        if parts[at] == "site-packages":
            return "/".join(parts[at + 1 :])
    return "/".join(parts[-2:])


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _message(record: logging.LogRecord) -> str:
    return clipped(record.getMessage(), _LONGEST)


def _trace(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[1] is None:
        return ""
    text = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
    return text if len(text) <= _LONGEST else f"... {text[-_LONGEST:]}"


FORMATTERS: dict[str, type[logging.Formatter]] = {"text": TextFormatter, "json": JSONFormatter}
"""By `--logging-format`."""


class _Kind(msgspec.Struct):
    """The lines of one kind in one period."""

    since: float
    written: int = 0
    left_out: int = 0
    last: logging.LogRecord | None = None


class LogLimiter:
    """Selects the records to write, and counts those left out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start with an empty history; `clock` returns monotonic seconds."""
        self._clock = clock
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._due = 0.0
        """End of the first period in which lines were left out; 0 for none."""

    def admit(self, record: logging.LogRecord) -> Iterator[logging.LogRecord]:
        """Yield the records to write now: the new one or none, and reports."""
        # Once the first period with omitted lines is over, report them.
        now = self._clock()
        if self._due and now >= self._due:
            waiting = [kind for kind in self._kinds.values() if kind.left_out]
            self._due = 0.0
            for each in waiting:
                if now >= (end := each.since + _PERIOD):
                    yield from _report(each, now)
                else:
                    self._due = min(self._due or end, end)
        burst = next((lines for level, lines in _BURSTS if record.levelno >= level), 0)
        if not burst:
            yield record
            return
        # A new period begins for a kind with its first line after the last one.
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
        # The first omitted line of a period is announced, so that the gap is visible.
        if kind.left_out == 1:
            self._due = min(self._due or kind.since + _PERIOD, kind.since + _PERIOD)
            rest = kind.since + _PERIOD - now
            yield _like(record, "more lines like the last one are left out for %.0f s", rest)

    def remaining_reports(self) -> Iterator[logging.LogRecord]:
        """Yield the reports that are due at the end."""
        now = self._clock()
        for kind in self._kinds.values():
            yield from _report(kind, now)


def _kind_of(record: logging.LogRecord) -> Hashable:
    """Return a key that is equal for lines that differ only in their arguments."""
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
    """Yield a report of the lines left out, if any, and count from 0 again."""
    if kind.last is not None:
        last, count, kind.last, kind.left_out = kind.last, kind.left_out, None, 0
        text = "%d lines like this one were left out in %.0f s: %s"
        yield _like(last, text, count, now - kind.since, last.getMessage())


def _like(record: logging.LogRecord, text: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord(
        record.name, record.levelno, record.pathname, record.lineno, text, args, None
    )


class _Handler(logging.StreamHandler[TextIO]):
    """Writes records within the limits of `LogLimiter`."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        super().__init__(stream)
        self._limiter = LogLimiter(clock)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            records = [*self._limiter.admit(record)]
        except Exception:  # a template that does not fit its arguments
            self.handleError(record)
            return
        for each in records:
            super().emit(each)

    def close(self) -> None:
        """Report the lines left out, as the process ends."""
        for each in self._limiter.remaining_reports():
            super().emit(each)
        super().close()


class ProcessLog:
    """The process's log: its stream, format and verbosity."""

    def __init__(
        self,
        form: str = "text",
        verbosity: int = 0,
        vmodule: Vmodule = (),
        *,
        stream: TextIO | None = None,
        root: logging.Logger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Configure the root logger; without a stream it writes to standard error, as upstream."""
        self._filter = Verbosity(verbosity, vmodule)
        self._root = root or logging.getLogger()
        handler = _Handler(stream or sys.stderr, clock)
        handler.setFormatter(FORMATTERS[form]())
        handler.addFilter(self._filter)
        self._root.handlers[:] = [handler]
        self._root.setLevel(self._filter.level)

    @property
    def verbosity(self) -> int:
        """The current `-v`."""
        return self._filter.verbosity

    def set_verbosity(self, value: int) -> None:
        """Change `-v` while running."""
        self._filter.verbosity = value
        self._root.setLevel(self._filter.level)
