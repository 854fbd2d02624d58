"""The page of `steersman top`: rates of the busiest ServicePorts, at little cost."""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Any

import msgspec
import pytest

from steersman.model.errors import BusyError
from steersman.model.names import PlanKey, ServicePortName
from steersman.model.plan import NodePlan, ServicePlan
from steersman.model.stats import ConnectionStats, DialCounters, NodeTotals, ProxyTotals
from steersman.model.top import TopRow
from steersman.run.pages.top import MOST_ROWS, Rates, TopPage
from tests.support.modes.memory import MemoryMode, World
from tests.support.node_states import states_of


class CountingMode(MemoryMode):
    """Counts what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.failures: dict[str, tuple[int, float]] | None = None
        self.calls = 0
        self.counting = True

    def stats(
        self, plans: Collection[ServicePlan]
    ) -> Generator[None, None, ConnectionStats | None]:
        yield
        self.calls += 1
        if self.busy:
            raise BusyError("somebody holds the lock")
        if not self.counting:
            return None
        names = {plan.key.name.service: plan.key.name for plan in plans}

        def key(end: str) -> tuple[ServicePortName, str]:
            number = end.rsplit(".", 1)[1].partition(":")[0]
            return names[f"s{number}"], end

        dials = None
        if self.failures is not None:
            dials = {key(end): DialCounters(*row) for end, row in self.failures.items()}
        counts = {key(end): count for end, count in self.counts.items()}
        return ConnectionStats({}, counts, dials=dials)

    def totals(self) -> NodeTotals:
        return NodeTotals(proxy=ProxyTotals(0, 0.0, (), 9, 0)) if self.failures else NodeTotals()


class Page:
    """A page on a world of four Services, with a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.world = World()
        self.mode = self.world.mode = CountingMode()
        self.world.start()
        self.page = TopPage(
            states_of(self.world),
            lambda: self.world.sync,
            clock=lambda: self.now,
        )

    async def names(self, **question: str) -> list[str]:
        return [row.name for row in (await self.page.sample(**question)).rows]


async def page() -> Page:
    made = Page()
    await made.world.run()
    return made


async def test_rates_are_of_the_last_two_counts() -> None:
    page_ = await page()
    page_.mode.counts = {"10.1.0.2:8080": 10}
    first = await page_.page.sample()
    assert (first.interval, first.rows[0].rate, first.rows[0].connections) == (0.0, None, 10)
    page_.now += 2
    page_.mode.counts = {"10.1.0.2:8080": 30, "10.1.0.3:8080": 4}
    sample = await page_.page.sample()
    busy = {row.name.split(":")[0]: row.rate for row in sample.rows}
    assert (busy["shop/s2"], busy["shop/s3"], busy["shop/s1"]) == (10.0, 2.0, 0.0)
    assert (sample.total.rate, sample.total.connections, sample.interval) == (12.0, 34, 2.0)
    assert [row.name.split(":")[0] for row in sample.rows][:2] == ["shop/s2", "shop/s3"]
    assert (sample.status.services, sample.matching) == (4, 4)


async def test_counts_are_read_rarely_if_that_is_expensive() -> None:
    page_ = await page()
    read = page_.mode.stats

    def slow(plans: Collection[ServicePlan]) -> Generator[None, None, ConnectionStats | None]:
        page_.now += 0.5
        return read(plans)

    page_.mode.stats = slow  # type: ignore[method-assign]
    for _ in range(9):
        await page_.page.sample()
        page_.now += 1.0
    assert page_.mode.calls == 1, "half a second in ten is a twentieth"
    page_.now += 1.0
    await page_.page.sample()
    assert page_.mode.calls == 2


async def test_failures_and_latency_where_the_mode_dials() -> None:
    page_ = await page()
    page_.mode.counts = {"10.1.0.1:8080": 10}
    page_.mode.failures = {"10.1.0.1:8080": (1, 0.5)}
    await page_.page.sample()
    page_.now += 1
    page_.mode.counts = {"10.1.0.1:8080": 14}
    page_.mode.failures = {"10.1.0.1:8080": (3, 0.7)}
    sample = await page_.page.sample()
    row = sample.rows[0]
    assert (row.failures, row.failure_rate) == (3, 2.0)
    assert row.latency is not None
    assert abs(row.latency - 0.05) < 1e-9
    assert sample.open_connections == 9
    assert (await page_.page.sample("failures")).rows[0] == row


async def test_what_is_not_counted_is_none() -> None:
    page_ = await page()
    page_.mode.counting = False
    sample = await page_.page.sample()
    assert (sample.counted, sample.rows[0].connections, len(sample.rows)) == (False, None, 4)
    page_.mode.busy = True
    page_.now += 5
    assert (await page_.page.sample()).problem == "somebody holds the lock"


async def test_rows_are_filtered_sorted_and_opened() -> None:
    page_ = await page()
    page_.mode.counts = {"10.1.0.2:8080": 10, "10.1.0.4:8080": 5}
    await page_.page.sample()
    page_.now += 1
    short = [name.split(":")[0] for name in await page_.names(sort="connections")]
    assert short == ["shop/s2", "shop/s4", "shop/s1", "shop/s3"]
    assert [n.split(":")[0] for n in await page_.names(sort="name")] == [
        f"shop/s{n}" for n in (1, 2, 3, 4)
    ]
    assert len(await page_.names(sort="endpoints")) == 4
    assert len(await page_.names(sort="no such order")) == 4
    (only,) = await page_.names(text="s3")
    assert only.startswith("shop/s3")
    sample = await page_.page.sample(service="shop/s2")
    assert (sample.rows[0].name.split()[0], sample.rows[0].connections) == ("10.1.0.2:8080", 10)


async def test_another_mode_begins_to_count_at_zero() -> None:
    page_ = await page()
    page_.mode.counts = {"10.1.0.2:8080": 10}
    await page_.page.sample()
    page_.mode = page_.world.mode = CountingMode()
    page_.world.start()
    await page_.world.run()
    page_.mode.counts = {"10.1.0.2:8080": 1}
    sample = await page_.page.sample()
    assert (sample.interval, sample.total.connections) == (0.0, 1)


async def test_of_a_large_cluster_only_the_rows_of_a_screen_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page_ = await page()
    plan = next(iter(page_.world.sync.state.plan.services.values()))
    names = [plan.key.name._replace(service=f"s{number:05}") for number in range(10_000)]
    plans = {
        PlanKey(name, plan.key.family): msgspec.structs.replace(
            plan, key=PlanKey(name, plan.key.family)
        )
        for name in names
    }
    settings = page_.world.sync.state.plan.settings
    state = msgspec.structs.replace(page_.world.sync.state, plan=NodePlan(settings, plans))
    page_.world.sync.state = state
    ends = [f"10.244.0.{number}:8080" for number in range(3)]
    counts = ConnectionStats({}, {(name, end): 7 for name in names for end in ends})

    def stats(_: Collection[ServicePlan]) -> Generator[None, None, ConnectionStats]:
        yield
        return counts

    page_.mode.stats = stats  # type: ignore[method-assign, assignment]
    made = 0
    row = Rates.row

    def counted(rates: Rates, *named: Any) -> TopRow:
        nonlocal made
        made += 1
        return row(rates, *named)

    monkeypatch.setattr(Rates, "row", counted)
    page_.now += 1
    sample = await page_.page.sample()
    assert (sample.status.service_ports, len(sample.rows)) == (10_000, MOST_ROWS)
    assert made == MOST_ROWS + 1  # and that of all ServicePorts
