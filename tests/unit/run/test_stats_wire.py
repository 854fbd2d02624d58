"""Counts of connections as bytes."""

from __future__ import annotations

import msgspec
import pytest

from steersman.model.names import Protocol, ServicePortName
from steersman.model.stats import ConnectionStats, DialCounters, TimedStats, TrafficCounters

KEY = (ServicePortName("shop", "web", "http", Protocol.UDP), "10.1.0.1:80")


@pytest.mark.parametrize(
    "stats",
    [
        None,
        ConnectionStats({}, {}),
        ConnectionStats({KEY: 1}, {KEY: 2}),
        ConnectionStats(
            {KEY: 1},
            {KEY: 2},
            {KEY: TrafficCounters(1, 2, 3, 4)},
            {KEY: TrafficCounters(5, 6, 7, 8)},
            {KEY: DialCounters(3, 0.25)},
        ),
    ],
)
def test_what_is_encoded_comes_back(stats: ConnectionStats | None) -> None:
    counts: TimedStats = (12.5, stats)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(counts), type=TimedStats) == counts
