"""Pages of long lists, as every page that lists something has them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.operate.answer import page_number, rows_of_page


def test_the_rows_of_a_page() -> None:
    numbers = range(25)
    assert rows_of_page(numbers, 1, 10) == (range(10), 1, 3)
    assert rows_of_page(numbers, 3, 10) == (range(20, 25), 3, 3)
    assert rows_of_page(numbers, 9, 10) == (range(20, 25), 3, 3)
    assert rows_of_page(numbers, 0, 10).page == 1
    assert rows_of_page([], 1, 10) == ([], 1, 1)


@given(st.lists(st.integers(), max_size=30), st.integers(1, 5))
def test_pages_together_are_all_rows(rows: Sequence[int], size: int) -> None:
    pages = rows_of_page(rows, 1, size).pages
    found = [row for page in range(1, pages + 1) for row in rows_of_page(rows, page, size).rows]
    assert found == rows


@pytest.mark.parametrize(
    ("text", "page"), [("3", 3), ("", 1), ("x", 1), ("-1", 1), ("9" * 40, 1), ("\u0663", 1)]
)
def test_the_page_that_an_address_asks_for(text: str, page: int) -> None:
    assert page_number({"page": text}) == page
    assert page_number({}) == 1
