"""Which verdict `make test` gives after tests have failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import rerun

KERNEL = "tests/kernel/test_switch.py::test_it"
RUNS = "printf '%s\\n' \"$*\" >> runs"
FLAKY = f"#!/bin/sh\n{RUNS}\nexit 0\n"
BROKEN = f"#!/bin/sh\n{RUNS}\nexit 1\n"
BROKEN_AT_LAST = f"#!/bin/sh\n{RUNS}\n[ $(wc -l < runs) -lt 3 ]\n"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command lines of the pytest that is called instead of the real one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("STRICT", raising=False)
    monkeypatch.setattr(rerun, "RECORD", tmp_path / "cache" / "flaky.json")
    (tmp_path / "runs").touch()
    return tmp_path / "runs"


def failed(pytest_program: str, *tests: str) -> None:
    """Leave behind what a run leaves in which these tests failed."""
    program = Path("pytest")
    program.write_text(pytest_program)
    program.chmod(0o755)
    rerun.FAILED.parent.mkdir(parents=True, exist_ok=True)
    rerun.FAILED.write_text(json.dumps(dict.fromkeys(tests, True)))


def test_a_test_that_passes_each_time_alone_is_named_as_flaky(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed(FLAKY, KERNEL)
    assert rerun.main(1) == 0
    command = f"-q -p no:randomly --cov --cov-append --cov-report= {KERNEL}"
    assert runs.read_text().splitlines() == [command] * rerun.TIMES
    assert f"FLAKY: {KERNEL} failed" in capsys.readouterr().out


@pytest.mark.parametrize("program", [BROKEN, BROKEN_AT_LAST])
def test_one_that_fails_again_fails_the_run(runs: Path, program: str) -> None:
    failed(program, KERNEL)
    assert rerun.main(1) == 1
    assert runs.read_text()


@pytest.mark.parametrize(
    ("status", "tests", "why"),
    [
        (1, [], "something else"),
        (2, [KERNEL], "something else"),
        (1, ["tests/kernel/test_switch.py"], "could not be imported"),
        (1, [f"{KERNEL}[{number}]" for number in range(rerun.MOST + 1)], "more than"),
    ],
)
def test_any_other_failure_is_final(
    runs: Path, capsys: pytest.CaptureFixture[str], status: int, tests: list[str], why: str
) -> None:
    failed(FLAKY, *tests)
    assert rerun.main(status) == status
    assert why in capsys.readouterr().out
    assert not runs.read_text()


def test_strict_runs_nothing_again(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRICT", "1")
    failed(FLAKY, KERNEL)
    assert rerun.main(1) == 1
    assert not runs.read_text()


def test_without_a_record_of_failures_the_status_stands(runs: Path) -> None:
    assert rerun.main(1) == 1
    assert not runs.read_text()


def test_a_test_that_is_flaky_twice_in_ten_runs_fails(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed(FLAKY, KERNEL)
    assert rerun.main(1) == 0
    for _ in range(rerun.RUNS - 1):
        assert rerun.main(0) == 0
    assert rerun.main(1) == 0, "the first time is eleven runs ago"
    assert rerun.main(0) == 0
    assert rerun.main(1) == 1
    assert f"FLAKY AGAIN: {KERNEL} was" in capsys.readouterr().out
    failed(FLAKY, f"{KERNEL}[other]")
    assert rerun.main(1) == 0
