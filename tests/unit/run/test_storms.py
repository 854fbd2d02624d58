"""Of a storm of log lines a few are written and the rest is counted."""

from __future__ import annotations

import asyncio
import errno
import io
import logging
from collections.abc import Iterator

import pytest

from steersman.run.klog import Logging


class Log:
    """The real handler on a logger of its own, with a clock that is set by hand."""

    def __init__(self, name: str, verbosity: int = 0) -> None:
        self.logger = logging.getLogger(name)
        self.logger.propagate = False
        self.out = io.StringIO()
        self.now = 0.0
        Logging("text", verbosity, stream=self.out, root=self.logger, clock=lambda: self.now)

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
