"""The connections so far as bytes, for the local socket (run/serve/control.py)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from steersman.model.stats import ConnectionStats, DialCounters, StatsKey, TrafficCounters

_Rows = list[tuple[StatsKey, list[float]]]


class _Document(msgspec.Struct, frozen=True):
    """All counts as lists: keys of maps have to be text."""

    at: float
    counted: bool
    frontends: _Rows = []
    endpoints: _Rows = []
    traffic_by_frontend: _Rows = []
    traffic_by_endpoint: _Rows = []
    dials: _Rows | None = None


def encode_stats(at: float, stats: ConnectionStats | None) -> bytes:
    """Return counts as bytes.

    Args:
        at: when they were read, in seconds of a clock that only goes forward.
        stats: the counts; None if the mode does not count connections.
    """
    # Not counted is another answer than no connections so far.
    if stats is None:
        return msgspec.msgpack.encode(_Document(at, False))
    return msgspec.msgpack.encode(
        _Document(
            at,
            True,
            [(key, [count]) for key, count in stats.frontends.items()],
            [(key, [count]) for key, count in stats.endpoints.items()],
            [(key, list(counts)) for key, counts in stats.traffic_by_frontend.items()],
            [(key, list(counts)) for key, counts in stats.traffic_by_endpoint.items()],
            None
            if stats.dials is None
            else [(key, list(counts)) for key, counts in stats.dials.items()],
        )
    )


def decode_stats(data: bytes) -> tuple[float, ConnectionStats | None]:
    """Return what `encode_stats` was given.

    Raises:
        msgspec.DecodeError: the bytes are something else.
    """
    found = msgspec.msgpack.decode(data, type=_Document)
    if not found.counted:
        return found.at, None
    return found.at, ConnectionStats(
        _numbers(found.frontends),
        _numbers(found.endpoints),
        _traffic(found.traffic_by_frontend),
        _traffic(found.traffic_by_endpoint),
        None
        if found.dials is None
        else {key: DialCounters(int(failed), seconds) for key, (failed, seconds) in found.dials},
    )


def _numbers(rows: _Rows) -> Mapping[StatsKey, int]:
    return {key: int(count) for key, (count,) in rows}


def _traffic(rows: _Rows) -> Mapping[StatsKey, TrafficCounters]:
    return {key: TrafficCounters(*map(int, counts)) for key, counts in rows}
