"""Which tests `make test` leaves out, and which ones may be skipped in a run of everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.parts import MAY_SKIP, ONLY_FULL, is_quick, unexpected

ROOT = Path(__file__).parents[3]


def collected(*arguments: str) -> str:
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only"]
    done = subprocess.run(
        [*argv, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout


def test_the_quick_part_has_no_soak() -> None:
    folder = "tests/soak"
    assert "test_ten_minutes_in_each_mode_find_nothing" in collected(folder)
    assert "test_ten_minutes_in_each_mode_find_nothing" in collected("--part=full", folder)
    assert "test_ten_minutes_in_each_mode_find_nothing" not in collected("--part=quick", folder)


def test_everything_that_is_left_out_exists() -> None:
    paths = [start.partition("::")[0] for start in ONLY_FULL]
    assert all(Path(ROOT, path).exists() for path in paths)
    found = "\n" + collected(*{path for path in paths if path.endswith(".py")})
    assert [start for start in ONLY_FULL if "::" in start and f"\n{start}" not in found] == []
    assert is_quick("tests/unit/model/test_names.py::test_it")
    assert not is_quick(f"{ONLY_FULL[0]}test_it.py::test_it")


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
