"""Rates of a Service over the last minutes, and the map of a cluster."""

from __future__ import annotations

import tracemalloc

import pytest

from steersman.model.node_state import NodeState
from steersman.model.top import TopRow, TopSample
from steersman.operate.traffic import (
    KEPT_SECONDS,
    MOST_SAMPLES,
    NOT_COUNTED,
    Rate,
    RateHistory,
    service_rates,
)
from steersman.operate.traffic_map import Graph, Passing, busiest, traffic_graph


def sample(
    *rows: TopRow, interval: float = 1.0, counted: bool = True, problem: str = ""
) -> TopSample:
    return TopSample(
        NodeState("node-a", "memory"),
        counted=counted,
        interval=interval,
        rows=rows,
        matching=len(rows),
        problem=problem,
    )


def row(name: str, rate: float | None, failures: float | None = None) -> TopRow:
    return TopRow(name, rate=rate, failure_rate=failures)


def test_charts_have_the_sum_and_each_endpoint() -> None:
    history = RateHistory()
    history.add(100.0, sample(row("b", 2.0, 0.5), row("a", 1.0, None)))
    history.add(102.0, sample(row("a", 4.0, 0.0)))
    chart = history.chart("connections")
    assert chart is not None
    assert chart.unit == "/s"
    assert chart.times == [100.0, 102.0]
    assert {each.label: each.values for each in chart.series} == {
        "all endpoints": [3.0, 4.0],
        "a": [1.0, 4.0],
        "b": [2.0, None],
    }
    failures = history.chart("failures")
    assert failures is not None
    assert failures.series[0].values == [0.5, 0.0]
    assert failures.series[1].values == [None, 0.0]


def test_a_mode_that_knows_no_failures_has_no_chart_of_them() -> None:
    history = RateHistory()
    history.add(100.0, sample(row("a", 1.0)))
    assert history.chart("failures") is None
    assert RateHistory().chart("connections") is None


def test_the_first_count_gives_no_rate() -> None:
    history = RateHistory()
    history.add(100.0, sample(row("a", None), interval=0.0))
    assert history.chart("connections") is None


def test_a_history_is_bounded_in_time_samples_and_endpoints() -> None:
    history = RateHistory()
    many = [row(f"e{n}", float(n)) for n in range(50, 0, -1)]
    for second in range(0, 4 * MOST_SAMPLES, 2):
        history.add(float(second), sample(*many))
    chart = history.chart("connections")
    assert chart is not None
    assert len(chart.times) == MOST_SAMPLES
    assert [each.label for each in chart.series] == [
        "all endpoints",
        *(f"e{n}" for n in range(44, 51)),
    ]
    assert chart.series[0].values[0] == sum(range(51))
    late = 4.0 * MOST_SAMPLES + KEPT_SECONDS
    history.add(late, sample(row("new", 1.0)))
    chart = history.chart("connections")
    assert chart is not None
    assert chart.times[-1] == late
    assert "e50" not in [each.label for each in chart.series]


def test_a_history_is_small() -> None:
    tracemalloc.start()
    history = RateHistory()
    for second in range(0, 2 * MOST_SAMPLES, 2):
        history.add(float(second), sample(*(row(f"e{n}:8080", n + 0.1, 0.1) for n in range(20))))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 2_000_000


def test_two_readers_do_not_double_the_samples() -> None:
    history = RateHistory()
    for at in (100.0, 101.0, 102.0, 103.0, 104.0):
        history.add(at, sample(row("a", at)))
    chart = history.chart("connections")
    assert chart is not None
    assert chart.times == [100.0, 102.0, 104.0]


def test_the_line_breaks_where_nobody_looked() -> None:
    history = RateHistory()
    for at in (100.0, 102.0, 160.0):
        history.add(at, sample(row("a", 1.0)))
    chart = history.chart("connections")
    assert chart is not None
    values = chart.series[1].values
    assert values[:2] == [1.0, 1.0]
    assert values[2:] == [None, 1.0]


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        (sample(row("a", 1.5)), ""),
        (sample(row("a", None), counted=False), NOT_COUNTED),
        (sample(row("a", None), problem="the table is busy"), "the table is busy"),
    ],
)
def test_rates_of_a_service(counts: TopSample, problem: str) -> None:
    answer = service_rates("shop/web", 100.0, counts, RateHistory())
    assert (answer.problem, answer.node, answer.endpoints) == (problem, "node-a", 1)


def test_the_busiest_pairs_of_nodes_and_services() -> None:
    samples = {
        "node-a": sample(
            row("shop/web:http", 5.0, 0.5), row("shop/web:admin", 1.0), row("shop/idle", 0.0)
        ),
        "node-b": sample(row("shop/cart", None, 9.0), row("shop/web:http", 2.0)),
    }
    assert busiest(samples, 2) == [
        Passing("node-b", "shop/cart", Rate(0.0, 9.0)),
        Passing("node-a", "shop/web", Rate(6.0, 0.5)),
    ]
    assert len(busiest(samples, 9)) == 3


def test_the_map_joins_what_goes_to_the_same_endpoint() -> None:
    passing = [
        Passing("node-a", "shop/web", Rate(6.0, 0.5)),
        Passing("node-b", "shop/web", Rate(2.0, None)),
        Passing("node-b", "shop/cart", Rate(1.0, None)),
    ]
    ends = [row(f"10.0.0.{n}:80", float(n)) for n in (3, 2, 1)]
    details = {
        ("node-a", "shop/web"): sample(*ends),
        ("node-b", "shop/web"): sample(row("10.0.0.3:80", 2.0, 1.0), row("10.0.0.9:80", None)),
    }
    graph = traffic_graph(passing, details, 2)
    assert [(each.kind, each.label) for each in graph.points] == [
        ("node", "node-a"),
        ("service", "shop/web"),
        ("node", "node-b"),
        ("service", "shop/cart"),
        ("endpoint", "10.0.0.3:80"),
        ("endpoint", "10.0.0.2:80"),
        ("endpoint", "1 more endpoint"),
    ]
    assert graph.points[1].href == "/services/shop/web?node=node-a"
    known = {(each.source, each.target): (each.rate, each.failures) for each in graph.streams}
    assert known["node node-a", "service shop/web"] == (6.0, 0.5)
    assert known["service shop/web", "endpoint shop/web 10.0.0.3:80"] == (5.0, 1.0)
    assert known["service shop/web", "endpoint shop/web others"] == (1.0, 0.0)
    assert {end for pair in known for end in pair} == {point.id for point in graph.points}


def test_a_map_without_connections_is_empty() -> None:
    assert traffic_graph([], {}, 3) == Graph()


def test_hostile_names_stay_inside_of_their_address() -> None:
    graph = traffic_graph([Passing("a b&c=d", "shop/web?x", Rate(1.0, 0.0))], {}, 3)
    assert [each.href for each in graph.points] == [
        "/map?node=a%20b%26c%3Dd",
        "/services/shop/web%3Fx?node=a%20b%26c%3Dd",
    ]
