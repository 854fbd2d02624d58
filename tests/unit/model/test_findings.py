from __future__ import annotations

import pytest

from steersman.model.findings import clipped, listed, printable, quoted


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
