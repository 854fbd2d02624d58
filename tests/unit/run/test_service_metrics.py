"""Series by Service: bounded in number, and none of them ever falls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.model.names import Protocol, ServicePortName
from steersman.model.plan import Endpoint, ServicePlan
from steersman.run.observe import service_metrics
from steersman.run.observe.prometheus import Counter, Declared
from steersman.run.observe.service_metrics import (
    MOST_SERIES,
    MOST_VIEWS,
    REST,
    Column,
    Counts,
    Ledger,
    Name,
    ServiceFilter,
    Table,
    View,
)
from tests.support.builders.plans import cluster_ip, plan

OWNER = ("namespace", "service", "port", "protocol")
CONNECTIONS = Declared(Counter, "connections_total", "Connections.", (*OWNER, "endpoint"))
BYTES = Declared(Counter, "bytes_total", "Bytes.", (*OWNER, "endpoint", "direction"))
ENDPOINT = Table(
    "endpoint",
    (Column(CONNECTIONS), Column(BYTES, "to_endpoint"), Column(BYTES, "to_client")),
)
FRONTEND = Table(
    "frontend",
    (Column(Declared(Counter, "frontend_connections_total", "x", (*OWNER, "frontend"))),),
)


def port(service: str, namespace: str = "shop") -> ServicePortName:
    return ServicePortName(namespace, service, "http", Protocol.TCP)


def served(name: str, ends: int = 1, namespace: str = "shop") -> ServicePlan:
    """The plan of a ServicePort that `row` counts for."""
    reachable = [Endpoint(f"10.0.{n >> 8}.{n & 255}", 80) for n in range(ends)]
    return plan(f"{namespace}/{name}:http", cluster_ip("10.96.0.1"), cluster=reachable)


def row(service: str, end: int = 0, namespace: str = "shop") -> Name:
    return port(service, namespace), f"10.0.{end >> 8}.{end & 255}:80"


def page(view: View, plans: Iterable[ServicePlan], counts: Counts) -> dict[tuple[str, ...], float]:
    """Return samples by metric, Service, end and direction."""
    return {
        (s.name, s.labels["service"], *list(s.labels.values())[4:]): s.value
        for metric in view.metrics(plans, counts)
        for s in metric.samples
    }


def test_the_busiest_are_listed_and_the_others_summed() -> None:
    ledger, plans = Ledger(), [served(name) for name in "abc"]
    counts: Counts = {ENDPOINT: {row("a"): (1, 10, 20), row("b"): (5, 50, 60), row("c"): (3, 4, 5)}}
    ledger.update(counts)
    found = page(ledger.view(ServiceFilter(top=1)), plans, counts)
    assert found == {
        ("connections_total", "b", "10.0.0.0:80"): 5,
        ("bytes_total", "b", "10.0.0.0:80", "to_endpoint"): 50,
        ("bytes_total", "b", "10.0.0.0:80", "to_client"): 60,
        ("connections_total", REST, ""): 4,
        ("bytes_total", REST, "", "to_endpoint"): 14,
        ("bytes_total", REST, "", "to_client"): 25,
    }


def test_what_has_counted_nothing_is_listed_as_zero() -> None:
    ledger = Ledger()
    counts: Counts = {ENDPOINT: {}, FRONTEND: {(port("a"), "10.96.0.1:80"): (2,)}}
    ledger.update(counts)
    found = page(ledger.default, [served("a", 2)], counts)
    assert found == {
        ("connections_total", "a", "10.0.0.0:80"): 0,
        ("connections_total", "a", "10.0.0.1:80"): 0,
        ("connections_total", REST, ""): 0,
        ("frontend_connections_total", "a", "10.96.0.1:80"): 2,
        ("frontend_connections_total", REST, ""): 0,
    }


def test_a_filter_is_about_its_services_only() -> None:
    plans = [served("a"), served("b"), served("a", namespace="other")]
    counts: Counts = {ENDPOINT: {row("a"): (1,), row("b"): (2,), row("a", namespace="other"): (4,)}}
    ledger = Ledger()
    ledger.update(counts)
    in_shop = ServiceFilter("shop", top=1)
    assert page(ledger.view(in_shop), plans, counts) == {
        ("connections_total", "b", "10.0.0.0:80"): 2,
        ("connections_total", REST, ""): 1,
    }
    assert page(ledger.view(ServiceFilter("other", "a")), plans, counts) == {
        ("connections_total", "a", "10.0.0.0:80"): 4,
        ("connections_total", REST, ""): 0,
    }
    assert page(ledger.view(ServiceFilter(service="a", top=1)), plans, counts) == {
        ("connections_total", "a", "10.0.0.0:80"): 4,
        ("connections_total", REST, ""): 1,
    }


@pytest.mark.parametrize(("services", "ends"), [(10_000, 3), (2, 20_000)])
def test_series_are_bounded(services: int, ends: int) -> None:
    plans = [served(f"s{n}", ends) for n in range(services)]
    rows = {row(f"s{n}", end): (1, 2, 3) for n in range(services) for end in range(ends)}
    counts: Counts = {ENDPOINT: rows, FRONTEND: {}}
    ledger = Ledger()
    ledger.update(counts)
    found = page(ledger.default, plans, counts)
    assert MOST_SERIES - 10 <= len(found) <= MOST_SERIES + 4
    listed = sum(value for key, value in found.items() if key[0] == "connections_total")
    assert listed == services * ends, "nothing is lost"


def test_the_busiest_endpoints_of_a_large_service_are_listed() -> None:
    rows = {row("a", n): (n,) for n in range(20_000)}
    counts: Counts = {ENDPOINT: rows}
    ledger = Ledger()
    ledger.update(counts)
    found = page(ledger.default, [served("a", 20_000)], counts)
    assert min(value for key, value in found.items() if key[1] == "a") == 20_000 - MOST_SERIES


def test_an_endpoint_that_comes_back_is_not_counted_again() -> None:
    ledger = Ledger(ServiceFilter(top=0))
    for rows in ({row("a"): (7,)}, {}, {row("a"): (9,)}, {}, {row("a"): (1,)}):
        counts: Counts = {ENDPOINT: rows}
        ledger.update(counts)
        found = page(ledger.default, [], counts)
    assert found == {("connections_total", REST, ""): 10}, "7, then 2 more, then 1 from zero"


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_metrics, "_MOST_GONE", 3)
    ledger = Ledger()
    ledger.update({ENDPOINT: {row("a", n): (1,) for n in range(5)}})
    ledger.update({ENDPOINT: {}})
    assert len(ledger._gone) == 3
    first = ledger.view(ServiceFilter(top=1))
    assert ledger.view(ServiceFilter(top=1)) is first
    for n in range(MOST_VIEWS):
        ledger.view(ServiceFilter(f"n{n}"))
    assert len(ledger._views) == MOST_VIEWS
    assert ledger.view(ServiceFilter(top=1)) is not first


SERVICES = "abcd"
STEPS = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(SERVICES), st.integers(0, 9)),  # connections since then
        st.sets(st.sampled_from(SERVICES)),  # those with the annotation, or in the filter
        st.booleans(),  # whether this page is asked for
    ),
    max_size=12,
)


@given(STEPS, st.integers(0, 3))
def test_no_series_ever_falls_and_the_rates_add_up(
    steps: list[tuple[Mapping[str, int], set[str], bool]], top: int
) -> None:
    ledger, totals = Ledger(ServiceFilter(top=top)), dict.fromkeys(SERVICES, 0)
    highest: dict[tuple[str, ...], float] = {}
    before: dict[tuple[str, ...], float] = {}
    made = made_before = 0
    for more, annotated, asked in steps:
        for service, count in more.items():
            totals[service] += count
            made += count
        rows = {row(service): (count, 2 * count, 0) for service, count in totals.items() if count}
        counts: Counts = {ENDPOINT: rows}
        ledger.update(counts)
        if not asked:
            continue
        found = page(ledger.default, [served(name) for name in sorted(annotated)], counts)
        assert len({key[1] for key in found}) <= top + 1
        for key, value in found.items():
            assert value >= highest.get(key, 0)
            highest[key] = value
        if before:
            grown = sum(
                value - before[key]
                for key, value in found.items()
                if key in before and key[0] == "connections_total"
            )
            assert grown == made - made_before
        before, made_before = found, made
