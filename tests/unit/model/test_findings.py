from __future__ import annotations

import pytest

from steersman.model.findings import (
    Finding,
    Severity,
    clipped,
    listed,
    printable,
    quoted,
    safe,
    worst,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, öäü", "plain text, öäü"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\x1b[31mred\x00", "\\x1b[31mred\\x00"),
        ("a\u2028b\u2029c\x85d\u202ee\udcff", "a\\u2028b\\u2029c\\x85d\\u202ee\\udcff"),
    ],
)
def test_printable_text(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_long_text_is_cut_and_says_so() -> None:
    assert clipped("abc", 3) == "abc"
    assert clipped("abcd", 3) == "abc... (4 characters)"
    assert quoted(None) == "None"
    assert quoted("a\n") == "'a\\n'"
    assert quoted("x" * 100_000) == f"'{'x' * 64}'... (100000 characters)"
    assert listed(["a", "b"]) == "'a', 'b'"
    assert listed(["a"] * 10) == "'a', 'a', 'a' and 7 more"


def test_a_finding_is_short_and_printable() -> None:
    finding = Finding("a\udcff.yaml", "\x1b[1m", "long" * 1000, Severity.ERROR, "SM3002")
    cut = f"{'long' * 150}... (4000 characters)"
    assert safe(finding) == Finding("a\\udcff.yaml", "\\x1b[1m", cut, Severity.ERROR, "SM3002")


def test_the_worst_come_first_within_bounds() -> None:
    warnings = [Finding(f"Service shop/s{n}", "", "w" * 90) for n in range(4)]
    error = Finding("Service shop/z", "", "e", Severity.ERROR)
    assert worst((*warnings, error), 10, 10_000) == (error, *warnings)
    assert worst((*warnings, error), 2, 10_000) == (error, warnings[0])
    assert worst((*warnings, error), 10, 250) == (error, *warnings[:2])
    assert worst((), 10, 10) == ()
