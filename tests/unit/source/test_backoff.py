from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from steersman.source.base import Backoff, Timing


def test_waits_grow_to_their_limit_and_start_anew() -> None:
    backoff = Backoff(Timing(random=lambda: 0.5, first=1.0, longest=5.0))
    assert [backoff.next() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.next() == 1.0


@given(dice=st.floats(0, 1, exclude_max=True), wish=st.floats(0, 1e6), tries=st.integers(1, 8))
def test_waits_have_bounds(dice: float, wish: float, tries: int) -> None:
    backoff = Backoff(Timing(random=lambda: dice, first=1.0, longest=8.0))
    wait = [backoff.next(wish) for _ in range(tries)][-1]
    assert min(wish, 300.0) <= wait <= 312.0
    assert wait >= 0.5
