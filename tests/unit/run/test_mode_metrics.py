"""What modes count, as metrics: while plans change, kernels fail and Services are many."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Generator, Iterable

import pytest

from steersman.host.worker import KernelWorker
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.model.plan import ServicePlan
from steersman.model.stats import ConnectionStats, NodeTotals, TrafficCounters
from steersman.modes.base import Mode
from steersman.modes.ebpf import layout
from steersman.modes.specs import SPECS
from steersman.run.observe import mode_metrics
from steersman.run.observe.metrics import Metrics
from steersman.run.observe.mode_metrics import ModeMetrics
from steersman.run.observe.prometheus import Metric, exposition
from steersman.run.observe.service_metrics import MOST_SERIES, REST, ServiceFilter
from tests.support.builders.plans import cluster_ip, endpoints, plan
from tests.support.modes.bare import BareMode
from tests.support.modes.userspace_proxy import (
    answering,
    ask,
    endpoint,
    key,
    listener,
    proxy,
    refusing,
)
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of 10,000 Services takes more than five seconds on a machine under load."""
    monkeypatch.setattr(mode_metrics, "_TIMEOUT", 60.0)


def served(name: str, *, metrics: bool = False) -> ServicePlan:
    ends = endpoints(*(f"10.244.0.{n}" for n in (1, 2, 3)))
    return plan(f"shop/{name}:http", cluster_ip("10.96.0.1"), cluster=ends, metrics=metrics)


class Busy(BareMode):
    """A mode in which everything has counted."""

    def __init__(self) -> None:
        self.asked = 0

    def stats(self, plans: Collection[ServicePlan]) -> Generator[None, None, ConnectionStats]:
        yield
        self.asked += 1
        ends = {(p.key.name, str(end)): 3 for p in plans for end in p.reachable}
        fronts = {(p.key.name, "10.96.0.1:80"): 9 for p in plans}
        moved = dict.fromkeys(ends, TrafficCounters(10, 20, 1000, 2000))
        return ConnectionStats(fronts, ends, {}, moved)

    def totals(self) -> NodeTotals:
        return NodeTotals(
            9,
            TrafficCounters(1, 2, 3, 4),
            dict.fromkeys(layout.COUNTERS, 7),
            tables={"flows": (5, 262144)},
        )


def samples(metrics: Iterable[Metric]) -> dict[tuple[str, ...], float]:
    """Return samples by name and labels, buckets but for the last one left out."""
    return {
        (s.name, *s.labels.values()): s.value
        for metric in metrics
        for s in metric.samples
        if s.labels.get("le", "+Inf") == "+Inf"
    }


async def default(mode: Mode, plans: list[ServicePlan], *, all_of_them: bool = False) -> str:
    """Return the page, as a client gets it."""
    metrics = Metrics("ebpf")
    more = await ModeMetrics(mode, lambda: plans, lambda: all_of_them).default()
    pieces = exposition([*metrics.collect(), *more])
    return b"".join(pieces).decode()


@pytest.mark.parametrize("mode", SPECS)
async def test_the_page_of_a_large_cluster_is_small(mode: str) -> None:
    """At 10,000 Services as at none: with every label that a process can make."""
    metrics, busy = Metrics(mode), Busy()
    plans = [served(f"s{n}") for n in range(10_000)]
    for family in Family:
        metrics.count_refused(family, full=0, partial=1)
        metrics.programming_seconds(family.kubernetes).observe(1)
    for phase in ("plan", "render", "read", "diff", "apply"):
        metrics.phase_seconds(phase).observe(0.1)
    more = await ModeMetrics(busy, lambda: plans, lambda: False).default()
    body = b"".join(exposition([*metrics.collect(), *more]))
    lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
    assert len(body) < 60_000, "150 kB are allowed, for what other parts add"
    assert len(lines) < 600
    assert busy.asked == 0, "nothing is collected that is not shown"


async def test_what_is_shown_of_services_is_limited_too() -> None:
    page = await default(Busy(), [served(f"s{n}") for n in range(10_000)], all_of_them=True)
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    assert MOST_SERIES < len(lines) < MOST_SERIES + 600
    assert (
        f'steersman_connections_total{{endpoint="",namespace="",port="",protocol="",service="{REST}"}}'
        in page
    )


async def test_a_service_is_shown_if_its_annotation_asks_for_it() -> None:
    page = await default(Busy(), [served("a"), served("b", metrics=True)])
    assert 'service="b"' in page
    assert 'service="a"' not in page
    assert f'service="{REST}"' in page
    assert "service=" not in await default(Busy(), [served("a")])


async def test_sums_of_the_node_are_shown_always() -> None:
    found = samples(await ModeMetrics(Busy(), list, lambda: False).default())
    assert found["steersman_forwarded_connections_total",] == 9
    assert found["steersman_forwarded_packets_total", "to_client"] == 2
    assert found["steersman_forwarded_bytes_total", "to_endpoint"] == 3
    assert found["steersman_mode_events_total", "flows_made"] == 7
    assert found["steersman_mode_table_entries", "flows"] == 5
    assert found["steersman_mode_table_capacity", "flows"] == 262144


async def test_series_of_services_can_be_had_by_filter() -> None:
    busy = Busy()
    metrics = ModeMetrics(busy, lambda: [served("a"), served("b")], lambda: False)
    found = samples(await metrics.services(ServiceFilter(service="a")))
    name = ("shop", "a", "http", "TCP", "10.244.0.1:8080")
    assert found["steersman_connections_total", *name] == 3
    assert found["steersman_proxied_packets_total", *name, "to_client"] == 20
    assert found["steersman_proxied_bytes_total", *name, "to_endpoint"] == 1000
    front = ("shop", "a", "http", "TCP", "10.96.0.1:80")
    assert found["steersman_frontend_connections_total", *front] == 9
    assert not any("b" in key for key in found)


class Reading(BareMode):
    """Goes through the plans in a thread, and is at the first one when they change."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.changed = threading.Event()
        self.asked = 0
        self.worker = KernelWorker()
        self._loop = asyncio.get_running_loop()

    def stats(self, plans: Collection[ServicePlan]) -> Generator[None, None, ConnectionStats]:
        self.asked += 1
        found = {}
        for each in plans:
            found[each.key.name, "10.96.0.1:80"] = 1
            self._loop.call_soon_threadsafe(self.begun.set)
            self.changed.wait(60)
            yield
        return ConnectionStats(found, {})


async def test_plans_may_change_while_connections_are_counted() -> None:
    mode, plans = Reading(), {name: served(name) for name in "ab"}
    metrics = ModeMetrics(mode, plans.values, lambda: True)
    scrape = asyncio.create_task(metrics.services(ServiceFilter()))
    await mode.begun.wait()
    plans["c"] = served("c")
    mode.changed.set()
    (frontends,) = [m for m in await scrape if m.name == "steersman_frontend_connections_total"]
    assert [sample.labels["service"] for sample in frontends.samples] == ["a", "b", REST]
    await mode.worker.close()


@pytest.mark.parametrize("error", [OSError(24, "x"), TimeoutError(), ApplyError(), BusyError()])
async def test_the_other_metrics_do_not_go_with_these(error: Exception) -> None:
    class Failing(BareMode):
        def stats(self, _: Collection[ServicePlan]) -> Generator[None, None, ConnectionStats]:
            yield
            raise error

        def totals(self) -> NodeTotals:
            raise error

    page = await default(Failing(), [served("a")], all_of_them=True)
    assert "kubeproxy_sync_proxy_rules_duration_seconds" in page
    with pytest.raises(type(error)):
        await ModeMetrics(Failing(), lambda: [served("a")], lambda: True).services(ServiceFilter())


async def test_a_collection_that_takes_too_long_ends_before_the_next_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mode_metrics, "_TIMEOUT", 0.05)
    mode, plans = Reading(), [served("a")]
    metrics = ModeMetrics(mode, lambda: plans, lambda: True)
    with pytest.raises(TimeoutError):
        await metrics.services(ServiceFilter())
    with pytest.raises(TimeoutError):
        await metrics.services(ServiceFilter())
    assert mode.asked == 1
    monkeypatch.setattr(mode_metrics, "_TIMEOUT", 60.0)
    mode.changed.set()
    assert await metrics.services(ServiceFilter())
    assert mode.asked == 2
    await mode.worker.close()


async def test_a_mode_that_counts_nothing_has_no_series() -> None:
    assert (
        await ModeMetrics(BareMode(), lambda: [served("a")], lambda: True).services(ServiceFilter())
        == []
    )


async def test_what_went_through_the_proxy_is_counted() -> None:
    gone = await refusing()
    async with endpoint(answering(b"one")) as one, proxy() as made:
        await made.start({key(): listener(gone, one)})
        for _ in range(3):
            assert await ask(made.port(key()), b"12345") == b"one12345"
        await until(lambda: made.open_connections == 0)

        class Userspace(BareMode):
            def stats(self, _: Collection[ServicePlan]) -> Generator[None, None, ConnectionStats]:
                return made.traffic.stats()

            def totals(self) -> NodeTotals:
                return made.totals()

        of = ServicePlan(listener(gone, one).owner, (), reachable=(gone, one))
        metrics = ModeMetrics(Userspace(), lambda: [of], lambda: False)
        name = (*of.key.name, str(one))
        found = samples(await metrics.services(ServiceFilter()))
        assert found["steersman_connections_total", *name] == 3
        assert found["steersman_dial_failures_total", *of.key.name, str(gone)] == 1
        assert found["steersman_endpoint_dial_seconds_total", *name] > 0
        assert found["steersman_proxied_bytes_total", *name, "to_endpoint"] == 15
        assert found["steersman_proxied_bytes_total", *name, "to_client"] == 24
        made.traffic.forget(of.key)
        sums = samples(await metrics.default())
        assert sums["steersman_forwarded_connections_total",] == 3
        assert sums["steersman_forwarded_bytes_total", "to_client"] == 24
        assert sums["steersman_dial_seconds_count",] == 3
        assert sums["steersman_dial_seconds_bucket", "+Inf"] == 3
        assert sums["steersman_failed_dials_total",] == 1
        assert sums["steersman_proxied_connections",] == 0
        assert sums["steersman_refused_connections_total",] == 0
