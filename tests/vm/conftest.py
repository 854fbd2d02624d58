"""The machine runs beside the other tests: it boots when they begin, and its test comes last.

It yields to them (nice), so that it takes the time that they wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

from tests.vm.machine import EVERYTHING, MARK, missing

MINUTES = 60 if os.environ.get(EVERYTHING) else 25
_COMMAND = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/vm/guest")


class Inside:
    """The tests of tests/vm/guest, in the machine."""

    def __init__(self) -> None:
        """Boot it."""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        machine = (sys.executable, "-m", "tests.vm", "--timeout", str(MINUTES * 60))
        argv = ("nice", *machine, "--", sys.executable, *_COMMAND)
        self._process = subprocess.Popen(argv, stdout=self._output, stderr=self._output)

    def result(self) -> tuple[int, str]:
        """Wait for the end; exit status (see tests/vm/__main__.py) and output."""
        status = self._process.wait()
        self._output.seek(0)
        return status, self._output.read().decode(errors="replace")

    def stop(self) -> None:
        """End it, if it is not over."""
        self._process.terminate()
        self._process.wait()
        self._output.close()


_INSIDE = pytest.StashKey[Inside]()


def _is_inside(item: pytest.Item) -> bool:
    return "inside" in getattr(item, "fixturenames", ())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_is_inside)


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = any(map(_is_inside, session.items)) and not session.config.option.collectonly
    if wanted and not missing() and not os.environ.get(MARK):
        session.config.stash[_INSIDE] = Inside()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if running := session.config.stash.get(_INSIDE, None):
        running.stop()


@pytest.fixture(scope="session")
def inside(request: pytest.FixtureRequest) -> Inside:
    """What runs in the machine."""
    return request.config.stash[_INSIDE]
