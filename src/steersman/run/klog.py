"""Logs in the formats of Kubernetes' components: klog text and JSON, with -v and --vmodule.

Everything logs through the standard library. Severity INFO is klog's V(0); `v(3)` is the level
of V(3), and the standard DEBUG counts as V(4), klog's "debug".

A record is one line, whatever is in it: names and values that others wrote cannot forge a line or
reach a terminal. How many lines there are is bounded (run/storms.py).
"""

from __future__ import annotations

import fnmatch
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable
from datetime import datetime
from pathlib import PurePath
from typing import TextIO

from steersman.model.findings import clipped, printable
from steersman.run.storms import Storms

_DEBUG_VERBOSITY = 4
_LETTERS = ((logging.CRITICAL, "F"), (logging.ERROR, "E"), (logging.WARNING, "W"), (0, "I"))
_LONGEST = 16_384  # characters of a message, or of a traceback
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def v(verbosity: int) -> int:
    """Return the level of `klog.V(verbosity)`, for `logger.log`."""
    return logging.INFO - verbosity


def verbosity_of(level: int) -> int:
    """Return the verbosity from which on records of a level are shown."""
    if level >= logging.INFO:
        return 0
    return _DEBUG_VERBOSITY if level == logging.DEBUG else logging.INFO - level


def parse_vmodule(text: str) -> tuple[tuple[str, int], ...]:
    """Read `pattern=N,...` (`--vmodule`).

    A pattern with a slash is matched with the file's path, others with its name; `.py` is left
    out of both, `*` and `?` stand for anything.

    Raises:
        ValueError: it is not such a list.
    """
    pairs = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        pattern, _, number = word.rpartition("=")
        if not pattern or not number.isascii() or not number.isdigit():
            raise ValueError(f"vmodule: {word!r} is not PATTERN=NUMBER")
        pairs.append((pattern, int(number)))
    return tuple(pairs)


class Verbosity(logging.Filter):
    """Lets through what -v and --vmodule ask for; both can be changed while running."""

    def __init__(self, verbosity: int = 0, vmodule: tuple[tuple[str, int], ...] = ()) -> None:
        super().__init__()
        self._vmodule = vmodule
        self._of_file: dict[str, int | None] = {}
        self.verbosity = verbosity

    @property
    def level(self) -> int:
        """The lowest level that can pass, for the logger: what is below costs next to nothing."""
        most = max([self.verbosity, *(number for _, number in self._vmodule)])
        level = v(most)
        return min(level, logging.DEBUG) if most >= _DEBUG_VERBOSITY else level

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is shown."""
        needed = verbosity_of(record.levelno)
        if needed == 0:
            return True
        special = self._special(record.pathname) if self._vmodule else None
        return needed <= (self.verbosity if special is None else special)

    def _special(self, path: str) -> int | None:
        """Verbosity of a file by vmodule; the first pattern that matches counts."""
        if path not in self._of_file:
            stem = str(PurePath(path).with_suffix("")) if path else ""
            name = stem.rpartition("/")[2]
            self._of_file[path] = next(
                (
                    number
                    for pattern, number in self._vmodule
                    if fnmatch.fnmatchcase(stem if "/" in pattern else name, pattern)
                ),
                None,
            )
        return self._of_file[path]


class TextFormatter(logging.Formatter):
    """klog's text: `I1121 05:56:57.123456    4711 sync.py:12] message key="value"`.

    A traceback is `err="..."`, its line breaks written as `\\n`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        letter = next(letter for level, letter in _LETTERS if record.levelno >= level)
        when = datetime.fromtimestamp(record.created).strftime("%m%d %H:%M:%S.%f")
        head = f"{letter}{when} {record.process or 0:>7} {record.filename}:{record.lineno}]"
        error = _trace(record)
        extra = _extra(record) | ({"err": error} if error else {})
        pairs = "".join(f" {key}={_quoted(value)}" for key, value in extra.items())
        return f"{head} {printable(_message(record))}{pairs}"


class JSONFormatter(logging.Formatter):
    """component-base's JSON: `ts` in milliseconds, `caller`, `msg`, `v` (not for errors)."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        line: dict[str, object] = {
            "ts": round(record.created * 1000, 3),
            "caller": f"{record.name.replace('.', '/')}.py:{record.lineno}",
            "msg": _message(record),
        }
        if record.levelno < logging.ERROR:
            line["v"] = verbosity_of(record.levelno)
        error = _trace(record)
        if error:
            line["err"] = error
        return json.dumps(line | _extra(record), default=str)


def _extra(record: logging.LogRecord) -> dict[str, object]:
    """What was given as `extra=`."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _quoted(value: object) -> str:
    return str(value) if isinstance(value, int | float) else json.dumps(str(value))


def _message(record: logging.LogRecord) -> str:
    return clipped(record.getMessage(), _LONGEST)


def _trace(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[1] is None:
        return ""
    text = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
    return text if len(text) <= _LONGEST else f"... {text[-_LONGEST:]}"


FORMATTERS: dict[str, type[logging.Formatter]] = {"text": TextFormatter, "json": JSONFormatter}
"""By `--logging-format`."""


class _Handler(logging.StreamHandler[TextIO]):
    """Writes records, but few of a storm."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        super().__init__(stream)
        self._storms = Storms(clock)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it."""
        try:
            records = [*self._storms.take(record)]
        except Exception:  # a template that does not fit its arguments
            self.handleError(record)
            return
        for each in records:
            super().emit(each)

    def close(self) -> None:
        """Say what was left out, as the process ends."""
        for each in self._storms.rest():
            super().emit(each)
        super().close()


class Logging:
    """The process's log: where it goes, how it looks, how much of it there is."""

    def __init__(
        self,
        form: str = "text",
        verbosity: int = 0,
        vmodule: str = "",
        *,
        stream: TextIO | None = None,
        root: logging.Logger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over the root logger.

        Args:
            form: `text` or `json`.
            verbosity: `-v`.
            vmodule: `--vmodule`.
            stream: where to; standard error if None, as upstream.
            root: for tests.
            clock: monotonic seconds.

        Raises:
            ValueError: `form` or `vmodule` is not understood.
        """
        if form not in FORMATTERS:
            raise ValueError(f"logging format {form!r} is unknown; write text or json")
        self._filter = Verbosity(verbosity, parse_vmodule(vmodule))
        self._root = root or logging.getLogger()
        handler = _Handler(stream or sys.stderr, clock)
        handler.setFormatter(FORMATTERS[form]())
        handler.addFilter(self._filter)
        self._root.handlers[:] = [handler]
        self._root.setLevel(self._filter.level)

    @property
    def verbosity(self) -> int:
        """`-v` as it is now."""
        return self._filter.verbosity

    def set_verbosity(self, value: int) -> None:
        """Change `-v` while running."""
        self._filter.verbosity = value
        self._root.setLevel(self._filter.level)
