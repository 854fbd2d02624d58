"""A soak of ten minutes finds nothing, and it would find rules that are left over."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.soak.__main__ import MODES, differences, errors_in, run_all
from tests.soak.node import Size


@pytest.mark.kernel
@pytest.mark.slow(seconds=700)
def test_ten_minutes_in_each_mode_find_nothing(tmp_path: Path) -> None:
    figures = run_all(MODES, 1 / 6, 1, tmp_path)
    assert [each["problems"] for each in figures.values()] == [[]] * len(MODES), figures
    for each in figures.values():
        assert each["changes"] > 0
        assert each["connections"] > 0
    assert (tmp_path / "figures.json").exists()


def test_what_differs_is_named() -> None:
    new = Size(50.0, 20, 3, Counter({"a rule": 1, "another": 1}))
    assert differences(new, new) == []
    old = Size(70.0, 40, 3, Counter({"a rule": 2}))
    assert differences(old, new) == [
        "memory: 70 MB, 50 MB in a new process",
        "descriptors: 40, 20 in a new process",
        "1 lines of the kernel are left over: ['a rule']",
        "1 lines of the kernel are missing: ['another']",
    ]


def test_tracebacks_are_errors(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("fine\nTraceback (most recent call last):\n")
    assert errors_in(tmp_path / "log") == ["Traceback (most recent call last):"]
