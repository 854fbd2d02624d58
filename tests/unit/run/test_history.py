"""What the process remembers of its syncs."""

from __future__ import annotations

from steersman.run.history import Lags


def test_the_lag_is_that_of_the_oldest_change() -> None:
    lags = Lags()
    assert (lags.last, lags.p99(0.0)) == (None, None)
    lags.add(10.0, 9.5, ())
    assert lags.last == 0.5
    lags.add(10.0, 9.5, (3.0, 1.0))
    assert lags.last == 3.0
    lags.add(10.0, None, ())
    assert lags.last is None
    assert lags.p99(10.0) == 3.0


def test_the_percentile_is_of_the_last_minutes() -> None:
    lags = Lags()
    lags.add(0.0, None, (60.0,))
    for number in range(100):
        lags.add(200.0, None, (number / 100,))
    assert lags.p99(250.0) == 0.99
    assert lags.p99(301.0) == 0.99
    lags.add(302.0, None, (5.0,))
    assert lags.p99(302.0) == 0.99
    assert lags.p99(900.0) is None
