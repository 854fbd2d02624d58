"""Times in RFC 3339."""

from __future__ import annotations

import pytest

from steersman.model.times import rfc3339


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "1970-01-01T00:00:00Z"),
        (1_500_000_000, "1970-01-01T00:00:01.5Z"),
        (1_000_000_001, "1970-01-01T00:00:01.000000001Z"),
        (1_795_232_331_101_931_518, "2026-11-21T03:38:51.101931518Z"),
        (-62135596800 * 10**9, "0001-01-01T00:00:00Z"),
    ],
)
def test_times_are_printed_as_go_does(nanoseconds: int, text: str) -> None:
    assert rfc3339(nanoseconds) == text


def test_the_digits_of_the_fraction_can_be_fixed() -> None:
    assert rfc3339(1_500_000_999, 6) == "1970-01-01T00:00:01.500000Z"
    assert rfc3339(1_999_999_999, 0) == "1970-01-01T00:00:01Z"
