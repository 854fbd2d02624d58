from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import os
import re
from collections.abc import Iterator

import pytest

from steersman.model.findings import Finding
from steersman.run.observe import findings_log
from steersman.run.observe.findings_log import FindingsLog
from steersman.run.process.klog import (
    JSONFormatter,
    ProcessLog,
    Verbosity,
    Vmodule,
    v,
    verbosity_of,
)


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger("steersman.run.sync.sync")
    logger.propagate = False
    yield logger
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def test_text_is_klogs(root: logging.Logger) -> None:
    out = io.StringIO()
    ProcessLog(stream=out, root=root)
    root.info("Using %s Proxier", "iptables")
    root.warning("odd", extra={"service": 'shop/"cart"', "count": 3})
    root.error("bad")
    root.critical("worse")
    lines = out.getvalue().splitlines()
    head = r"{}\d{{4}} \d\d:\d\d:\d\d\.\d{{6}} +{} test_klog\.py:\d+\] {}$"
    pid = os.getpid()
    assert re.match(head.format("I", pid, "Using iptables Proxier"), lines[0])
    assert re.match(head.format("W", pid, r'odd service="shop/\\"cart\\"" count=3'), lines[1])
    assert re.match(head.format("E", pid, "bad"), lines[2])
    assert re.match(head.format("F", pid, "worse"), lines[3])


def test_json_is_component_bases(root: logging.Logger) -> None:
    out = io.StringIO()
    ProcessLog("json", 2, stream=out, root=root)
    root.log(v(2), "two", extra={"service": "shop/cart"})
    try:
        raise OSError("gone")
    except OSError:
        root.exception("bad")
    info, error = map(json.loads, out.getvalue().splitlines())
    assert info["msg"] == "two"
    assert info["v"] == 2
    assert info["service"] == "shop/cart"
    assert re.fullmatch(r"run/test_klog\.py:\d+", info["caller"])
    assert info["ts"] > 1e12
    assert "v" not in error
    assert ("severity" in info, error["severity"]) == (False, "error")
    assert error["err"].endswith("OSError: gone")


@pytest.mark.parametrize(
    ("path", "caller"),
    [
        (
            "/opt/steersman/lib/site-packages/steersman/run/sync/sync.py",
            "steersman/run/sync/sync.py:7",
        ),
        ("/opt/steersman/lib/site-packages/aiohttp/web.py", "aiohttp/web.py:7"),
        ("/usr/lib/python3.11/asyncio/base_events.py", "asyncio/base_events.py:7"),
    ],
)
def test_the_caller_is_the_file_that_logged(path: str, caller: str) -> None:
    """A module may log under any name, as `steersman`."""
    record = logging.LogRecord("steersman", logging.INFO, path, 7, "text", (), None)
    assert json.loads(JSONFormatter().format(record))["caller"] == caller


def test_text_has_the_trace_of_an_exception(root: logging.Logger) -> None:
    out = io.StringIO()
    ProcessLog(stream=out, root=root)
    try:
        raise OSError("gone")
    except OSError:
        root.exception("bad")
    (line,) = out.getvalue().splitlines()
    assert '] bad err="Traceback (most recent call last):\\n  File' in line
    assert line.endswith('\\nOSError: gone"')


@pytest.mark.parametrize(("verbosity", "shown"), [(0, 1), (2, 2), (3, 3), (4, 4), (5, 5)])
def test_verbosity_lets_more_through(root: logging.Logger, verbosity: int, shown: int) -> None:
    out = io.StringIO()
    ProcessLog("text", verbosity, stream=out, root=root)
    for level in (v(0), v(2), v(3), logging.DEBUG, v(5)):
        root.log(level, "line")
    assert len(out.getvalue().splitlines()) == shown


def test_verbosity_can_be_changed_while_running(root: logging.Logger) -> None:
    out = io.StringIO()
    logs = ProcessLog(stream=out, root=root)
    root.log(v(3), "hidden")
    logs.set_verbosity(3)
    root.log(v(3), "shown")
    assert logs.verbosity == 3
    assert out.getvalue().endswith("] shown\n")
    assert "hidden" not in out.getvalue()


@pytest.mark.parametrize(
    ("vmodule", "shown"),
    [
        ([("test_klog", 4)], True),
        ([("test_*", 4)], True),
        ([("*/run/test_klog", 4)], True),
        ([("test_klog", 3)], False),
        ([("test_klog", 0), ("test_*", 4)], False),  # the first that matches counts
        ([("klog", 4)], False),
        ([], False),
    ],
)
def test_vmodule_is_by_file(root: logging.Logger, vmodule: Vmodule, shown: bool) -> None:
    out = io.StringIO()
    ProcessLog("text", 0, vmodule, stream=out, root=root)
    root.debug("line")
    assert bool(out.getvalue()) is shown


HOSTILE = "a\nE1121 05:56:57.123456    4711 x.py:1] forged\r\x1b[2J\x00\x85\u2028\u2029\u202e\udcff"


@pytest.mark.parametrize("form", ["text", "json"])
def test_nothing_that_is_logged_can_forge_a_line(root: logging.Logger, form: str) -> None:
    out = io.StringIO()
    ProcessLog(form, stream=out, root=root)
    root.warning("Service %s: %s", HOSTILE, "odd", extra={"service": HOSTILE})
    root.warning(HOSTILE)
    try:
        raise OSError(HOSTILE)
    except OSError:
        root.exception("bad %s", HOSTILE)
    lines = out.getvalue().splitlines()  # at every separator that there is
    assert len(lines) == 3
    assert all(line.isprintable() and line.isascii() for line in lines)
    assert out.getvalue().encode().count(b"\n") == 3
    assert all(re.match(r"[WE]\d{4} |\{", line) for line in lines)


@pytest.mark.parametrize("form", ["text", "json"])
def test_hostile_objects_are_one_line_each(root: logging.Logger, form: str) -> None:
    out = io.StringIO()
    ProcessLog(form, stream=out, root=root)
    log = FindingsLog()
    findings_log.log, before = root, findings_log.log
    try:
        hostile = Finding(f"Service {HOSTILE}", HOSTILE, HOSTILE)
        log.update((hostile, Finding("x", "", "y" * 100_000)))
    finally:
        findings_log.log = before
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) < 17_000


def test_long_tracebacks_keep_their_end(root: logging.Logger) -> None:
    out = io.StringIO()
    ProcessLog("json", stream=out, root=root)
    try:
        raise OSError("x" * 100_000 + "end")
    except OSError:
        root.exception("bad")
    error = json.loads(out.getvalue())["err"]
    assert error.endswith("end")
    assert len(error) < 17_000


def test_levels() -> None:
    assert [verbosity_of(level) for level in (50, 20, v(1), v(7), logging.DEBUG)] == [0, 0, 1, 7, 4]
    assert Verbosity(0).level == logging.INFO
    assert Verbosity(2).level == v(2)
    assert Verbosity(4).level == logging.DEBUG
    assert Verbosity(0, (("a", 12),)).level == v(12)


# Of a storm of log lines a few are written and the rest is counted


class Log:
    """The real handler on a logger of its own, with a clock that is set by hand."""

    def __init__(self, name: str, verbosity: int = 0) -> None:
        self.logger = logging.getLogger(name)
        self.logger.propagate = False
        self.out = io.StringIO()
        self.now = 0.0
        ProcessLog("text", verbosity, stream=self.out, root=self.logger, clock=lambda: self.now)

    def warn(self, number: int) -> None:
        self.logger.warning("cannot dial %d", number)

    def close(self) -> None:
        """As at the end of the process."""
        for handler in self.logger.handlers:
            handler.close()

    def lines(self) -> list[str]:
        """The messages since the last call."""
        lines = [line.partition("] ")[2] for line in self.out.getvalue().splitlines()]
        self.out.truncate(0)
        self.out.seek(0)
        return lines


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log("steersman.test_storms", verbosity=2)
    yield made
    made.logger.handlers.clear()


def test_a_storm_is_sixty_lines_and_a_count_each_minute(log: Log) -> None:
    for number in range(10_000):
        log.warn(number)
    lines = log.lines()
    assert lines[:2] == ["cannot dial 0", "cannot dial 1"]
    assert len(lines) == 61
    assert lines[-1] == "more lines like the last one are left out for 60 s"
    log.now = 30
    log.warn(10_000)
    assert log.lines() == []
    log.now = 61
    log.logger.info("another line")
    assert log.lines() == [
        "9941 lines like this one were left out in 61 s: cannot dial 10000",
        "another line",
    ]
    log.warn(10_001)
    assert log.lines() == ["cannot dial 10001"]
    log.now = 200
    log.logger.info("another line")
    assert log.lines() == ["another line"]


def test_first_lines_are_always_written(log: Log) -> None:
    for number in range(1000):
        log.logger.warning("storm %d", number)
        if number == 500:
            log.logger.warning("something else, %d", number)
            log.logger.error("storm %d", number)
    lines = log.lines()
    assert "something else, 500" in lines
    assert lines.count("storm 500") == 1  # the error; the warnings had ended


def fail(kind: type[Exception]) -> None:
    raise kind("bad")


def test_another_exception_is_another_kind(log: Log) -> None:
    for number in range(300):
        try:
            fail(KeyError if number == 200 else ValueError)
        except (KeyError, ValueError):
            log.logger.exception("failed")
    lines = log.lines()
    assert len(lines) == 62
    assert sum("KeyError: 'bad'" in line for line in lines) == 1


def test_information_has_more_room_and_what_is_asked_for_has_no_limit(log: Log) -> None:
    for number in range(1000):
        log.logger.info("sync %d", number)
        log.logger.log(logging.INFO - 2, "detail %d", number)
    lines = log.lines()
    assert sum(line.startswith("sync") for line in lines) == 300
    assert sum(line.startswith("detail") for line in lines) == 1000


def test_two_storms_are_counted_apart(log: Log) -> None:
    for _ in range(100):
        log.logger.warning("one %s", "x")
    log.now = 20
    for _ in range(100):
        log.logger.warning("two %s", "x")
    log.lines()
    log.now = 61
    log.logger.info("tick")
    assert log.lines() == ["40 lines like this one were left out in 61 s: one x", "tick"]
    log.now = 81
    log.logger.info("tick")
    assert log.lines() == ["40 lines like this one were left out in 61 s: two x", "tick"]


def test_what_was_left_out_is_said_at_the_end(log: Log) -> None:
    for _ in range(70):
        log.logger.warning("storm")
    log.lines()
    log.close()
    assert log.lines() == ["10 lines like this one were left out in 0 s: storm"]


def test_the_number_of_kinds_is_bounded(log: Log) -> None:
    for _ in range(70):
        log.logger.warning("storm")
    for number in range(600):
        log.logger.warning("kind " + chr(97 + number % 26) * (1 + number // 26))
    lines = log.lines()
    assert lines.count("10 lines like this one were left out in 0 s: storm") == 1
    log.close()
    assert log.lines() == []


def test_a_bad_template_costs_no_more_than_its_line(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    for _ in range(100):
        log.logger.warning("%d", "no number")
    log.now = 61
    log.logger.info("tick")
    log.logger.info("tock")
    assert log.lines()[-1] == "tock"


async def test_asyncios_own_tracebacks_are_a_storm_too() -> None:
    log = Log("asyncio")
    log.logger.propagate = False
    loop = asyncio.get_running_loop()
    try:
        for number in range(5000):
            try:
                raise OSError(errno.EMFILE, "Too many open files")
            except OSError as error:
                loop.call_exception_handler(
                    {
                        "message": "socket.accept() out of system resource",
                        "exception": error,
                        "socket": f"<socket {number}>",
                    }
                )
        lines = log.lines()
    finally:
        log.logger.handlers.clear()
        log.logger.propagate = True
        log.logger.setLevel(logging.NOTSET)
    assert len(lines) == 61
    assert sum(map(len, lines)) < 100_000
