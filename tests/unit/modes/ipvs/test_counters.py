"""ServerCounters of virtual and real servers, added up by ServicePort; as metrics."""

from __future__ import annotations

import errno
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from steersman.model.errors import BusyError
from steersman.model.names import Protocol
from steersman.model.stats import ConnectionStats, NodeTotals, TrafficCounters
from steersman.modes.ipvs import counters
from steersman.modes.ipvs.counters import (
    Counted,
    MonotonicStats,
    ServerCounters,
    ServerOwners,
    parse_totals,
)
from steersman.modes.ipvs.objects import ServerKey
from steersman.modes.ipvs.wire import ServerStats
from tests.support.builders.plans import cluster_ip, endpoints, key, node_port, plan

ONE, TWO = ("10.244.0.1", 8080), ("10.244.0.2", 8080)
PLAN = plan(
    key("shop/cart:http"),
    cluster_ip("10.96.0.1"),
    node_port(30080),
    cluster=endpoints(ONE[0], TWO[0]),
)
NAME = PLAN.key.name
VIP = ServerKey(Protocol.TCP, "10.96.0.1", 80)
HERE, THERE = (ServerKey(Protocol.TCP, f"192.0.2.{n}", 30080) for n in (1, 2))
FOREIGN = ServerKey(Protocol.TCP, "192.0.2.9", 99)


class Listing(NamedTuple):
    key: ServerKey
    stats: ServerStats


def stats(connections: int) -> ServerStats:
    return ServerStats(*(connections * each for each in (1, 10, 20, 1000, 2000)))


def test_a_frontend_is_all_its_virtual_servers_and_an_endpoint_all_its_real_ones() -> None:
    counts: dict[Counted, ServerStats] = {
        (VIP, None): stats(3),
        (VIP, ONE): stats(2),
        (VIP, TWO): stats(1),
        (HERE, None): stats(4),
        (HERE, ONE): stats(4),
        (THERE, None): stats(5),
        (FOREIGN, None): stats(9),
        (VIP, ("10.244.0.9", 8080)): stats(9),  # it drains: no endpoint any more
    }
    made = MonotonicStats().update(counts, ServerOwners([PLAN]))
    assert made.frontends == {(NAME, "10.96.0.1:80"): 3, (NAME, "nodePort:30080"): 9}
    assert made.endpoints == {(NAME, "10.244.0.1:8080"): 6, (NAME, "10.244.0.2:8080"): 1}
    assert made.traffic_by_endpoint[NAME, "10.244.0.1:8080"] == TrafficCounters(
        60, 120, 6000, 12000
    )
    assert made.traffic_by_frontend[NAME, "nodePort:30080"] == TrafficCounters(90, 180, 9000, 18000)


def test_what_was_away_goes_on_where_it_was() -> None:
    totals, owners = MonotonicStats(), ServerOwners([PLAN])

    def after(count: int | None) -> int:
        counts: dict[Counted, ServerStats] = {} if count is None else {(VIP, ONE): stats(count)}
        return totals.update(counts, owners).endpoints[NAME, "10.244.0.1:8080"]

    assert [after(n) for n in (5, 7, 2, None, 1, 4)] == [5, 7, 9, 9, 10, 13]


def test_totals_of_removed_endpoints_are_dropped() -> None:
    totals = MonotonicStats()
    totals.update({(VIP, None): stats(5)}, ServerOwners([PLAN]))
    assert totals.update({}, ServerOwners([])) == ConnectionStats({}, {})
    assert set(totals.update({}, ServerOwners([PLAN])).frontends.values()) == {0}


STATS = """   Total Incoming Outgoing         Incoming         Outgoing
   Conns  Packets  Packets            Bytes            Bytes
      1F       20       30             4000       1FFFFFFFF

 Conns/s   Pkts/s   Pkts/s          Bytes/s          Bytes/s
       0        0        0                0                0
"""


def test_the_kernel_sums_up_for_the_node() -> None:
    assert parse_totals(STATS) == NodeTotals(31, TrafficCounters(32, 48, 16384, 8589934591))


def test_real_servers_are_listed_only_of_virtual_ones_that_have_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[ServerKey] = []

    def destinations(_netlink: object, _family: int, key: ServerKey) -> Iterator[Any]:
        asked.append(key)
        yield ONE, stats(4)

    idle, foreign = Listing(HERE, stats(0)), Listing(FOREIGN, stats(9))
    listed = [Listing(VIP, stats(4)), idle, foreign]
    monkeypatch.setattr(counters, "list_services", lambda *_: listed)
    monkeypatch.setattr(counters, "list_destinations", destinations)
    monkeypatch.setattr(counters, "resolve", lambda _: 7)
    monkeypatch.setattr(counters, "Netlink", unused_socket)
    made = ends(ServerCounters().stats([PLAN]))
    assert asked == [VIP]
    assert made.endpoints[NAME, "10.244.0.1:8080"] == 4


def test_a_scrape_waits_for_the_end_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counts would be older than those of the other: servers would seem to begin at zero."""
    count = 4

    def listed(*_: object) -> list[Listing]:
        return [Listing(VIP, stats(count))]

    monkeypatch.setattr(counters, "list_services", listed)
    monkeypatch.setattr(counters, "list_destinations", lambda *_: ())
    monkeypatch.setattr(counters, "resolve", lambda _: 7)
    monkeypatch.setattr(counters, "Netlink", unused_socket)
    counted = ServerCounters()
    first, second = counted.stats([PLAN]), counted.stats([PLAN])
    next(first)
    count = 6
    for _ in range(5):
        next(second)
    assert ends(first).frontends[NAME, "10.96.0.1:80"] == 4
    assert ends(second).frontends[NAME, "10.96.0.1:80"] == 6
    third, count = counted.stats([PLAN]), 9
    next(third)
    third.close()  # cancelled
    assert ends(counted.stats([PLAN])).frontends[NAME, "10.96.0.1:80"] == 9


def ends(steps: Generator[None, None, ConnectionStats]) -> ConnectionStats:
    """What a scrape returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(ConnectionStats, end.value)


def unused_socket(_protocol: int, *, buffer: int) -> AbstractContextManager[None]:
    """A socket that nobody uses."""
    assert buffer
    return nullcontext()


@pytest.mark.parametrize("text", ["", "nonsense", None])
def test_sums_that_cannot_be_read_are_tried_again_later(
    text: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "ip_vs_stats").write_text(text)
    monkeypatch.setattr(counters, "_STATS", tmp_path / "ip_vs_stats")
    with pytest.raises(BusyError, match="ip_vs_stats"):
        ServerCounters().totals()


def test_counters_that_cannot_be_read_are_tried_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "no descriptors")

    monkeypatch.setattr(counters, "Netlink", refuse)
    with pytest.raises(BusyError, match="no descriptors"):
        ends(ServerCounters().stats([PLAN]))
