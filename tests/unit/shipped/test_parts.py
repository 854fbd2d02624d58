"""Which tests `make test` leaves out, and which ones may be skipped in a run of everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.parts import FURTHER, MAY_SKIP, ONLY_FULL, is_quick, unexpected

ROOT = Path(__file__).parents[3]


def test_the_quick_part_has_no_soak() -> None:
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only"]
    done = subprocess.run(
        [*argv, "--part=quick", "tests/soak"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "test_soak.py" not in done.stdout
    assert "no tests collected" in done.stdout
    assert "deselected" in done.stdout


def test_everything_that_is_left_out_exists() -> None:
    for start in (*ONLY_FULL, *(start for start, _ in FURTHER)):
        path, _, test = start.partition("::")
        assert Path(ROOT, path).exists(), path
        if test:
            assert f"def {test.partition('[')[0]}" in Path(ROOT, path).read_text(), start


def test_parts_are_told_by_names_and_parameters() -> None:
    assert is_quick("tests/unit/model/test_names.py::test_it")
    assert not is_quick(f"{ONLY_FULL[0]}test_it.py::test_it")
    start, words = FURTHER[0]
    assert is_quick(f"{start}_of_{words[0]}[some mode]")
    assert not is_quick(f"{start}[some {words[0]} mode]")


def test_a_skip_that_is_not_listed_is_unexpected() -> None:
    listed = [(f"{each.test}test_it", f"{each.reason}, since ...") for each in MAY_SKIP]
    assert unexpected(listed) == []
    assert unexpected([(MAY_SKIP[0].test, "nft is missing")]) == [
        f"{MAY_SKIP[0].test}: nft is missing"
    ]
    assert unexpected([("tests/kernel/test_it.py::test_it", MAY_SKIP[0].reason)])


def test_such_a_skip_fails_a_run_of_everything(tmp_path: Path) -> None:
    test = tmp_path / "test_skipped.py"
    test.write_text("import pytest\n\n\ndef test_it():\n    pytest.skip('nft is missing')\n")
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    done = [
        subprocess.run(
            [*argv, *more, str(test)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        for more in ((), ("--part=full",))
    ]
    assert [each.returncode for each in done] == [0, 1], done[1].stdout
    assert "SKIPPED, BUT IT MUST RUN" in done[1].stdout
