"""What comes first if all rules are missing: the node's objects and the Services in use."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

import pytest

from steersman.model.errors import BusyError
from steersman.model.names import ObjectName, Protocol, ServicePortName
from steersman.model.plan import ServicePlan
from steersman.model.ruleset import Diff
from steersman.model.stats import ConnectionStats
from steersman.run import ledger, repair_order, sync
from steersman.run.repair_order import Usage
from tests.support.apiserver.reading import until
from tests.support.builders.store import service, slice_
from tests.support.modes.memory import MemoryMode, World


def counted(**connections: int) -> ConnectionStats:
    """Connections so far; the ports of a Service count together."""
    counts = {}
    for name, number in connections.items():
        for port, part in (("http", number - number // 3), ("https", number // 3)):
            counts[ServicePortName("shop", name, port, Protocol.TCP), "10.96.0.1:80"] = part
    return ConnectionStats(counts, {})


def busiest(usage: Usage) -> list[str]:
    return [name.name for name in usage.busiest()]


def test_the_most_new_connections_come_first() -> None:
    usage = Usage()
    assert usage.busiest() == []
    usage.note(counted(a=10, b=1000, c=0))
    assert busiest(usage) == ["b", "a"]
    usage.note(counted(a=800, b=1001, c=0))
    assert busiest(usage) == ["a", "b"], "the past counts half"


def test_what_is_not_used_any_more_is_forgotten() -> None:
    usage = Usage()
    usage.note(counted(a=3, b=4))
    for connections in range(5, 15):
        usage.note(counted(b=connections))
    assert busiest(usage) == ["b"]


class PartsMode(MemoryMode):
    """Fills its kernel in parts."""

    writes_in_parts = True

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Diff] = []
        self.stats_: list[ConnectionStats | Exception | None] = []

    async def apply_parts(self, parts: Iterable[Diff]) -> None:
        for part in parts:
            self.parts.append(part)
            await self.apply(part)

    async def stats(self, plans: Collection[ServicePlan]) -> ConnectionStats | None:
        assert plans
        if not self.stats_:
            await asyncio.get_running_loop().create_future()
        stats = self.stats_.pop(0)
        if isinstance(stats, Exception):
            raise stats
        return stats


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Nine Services with two addresses each; the used ones and three others go in together."""
    monkeypatch.setattr(sync, "_PARTS_FROM", 1)
    monkeypatch.setattr(ledger, "_MOST_USED", 2)
    monkeypatch.setattr(ledger, "_PART", 3)
    world = World(9)
    world.mode = PartsMode()
    world.start()
    for number in range(1, 10):
        more = [f"192.0.2.{number + 20}"]
        world.store.upsert(service(f"s{number}", clusterIP=f"10.96.0.{number}", externalIPs=more))
    return world


def parts_of(world: World) -> list[set[str]]:
    """The Services of each part that was written."""
    assert isinstance(world.mode, PartsMode)
    return [
        {value.partition(" ")[0] for value in part.added.values() if "shop/" in str(value)}
        for part in world.mode.parts
    ]


async def test_after_a_flush_the_services_in_use_come_first_and_whole(world: World) -> None:
    assert isinstance(world.mode, PartsMode)
    await world.run()
    assert sorted(map(len, parts_of(world))) == [0, 3, 3, 3], "no counts yet: only the node"
    world.mode.parts.clear()
    world.sync.usage.note(counted(s7=5, s3=900, s5=40, gone=1000))
    world.mode.kernel.clear()
    result = await world.check()
    first, *others = parts_of(world)
    assert first == {"shop/s3", "shop/s5"}
    assert sum(map(len, others)) == 7
    assert {"node", "masq"} <= world.mode.parts[0].added.keys()
    assert len(set().union(first, *others)) == 9, "no Service is in two parts"
    assert world.mode.kernel == world.fresh()
    assert result is not None
    assert result.added == len(world.mode.kernel)
    assert world.sync.drift is None, "it was reported"


async def test_a_part_that_is_refused_costs_the_others_nothing(world: World) -> None:
    assert isinstance(world.mode, PartsMode)
    await world.run()
    world.mode.parts.clear()
    world.mode.kernel.clear()
    world.mode.poison = {"shop/s4 (TCP, IPv4)"}
    await world.check()
    fresh = world.fresh()
    assert world.mode.kernel == {k: v for k, v in fresh.items() if v not in world.mode.poison}
    world.mode.poison = set()
    await world.check()
    assert world.mode.kernel == fresh


async def test_what_is_left_in_the_kernel_is_compared_as_ever(world: World) -> None:
    assert isinstance(world.mode, PartsMode)
    await world.run()
    world.mode.parts.clear()
    left = next(iter(world.mode.kernel))
    world.mode.kernel = {left: world.mode.kernel[left]}
    await world.check()
    assert world.mode.parts == []
    assert world.mode.kernel == world.fresh()


async def test_counters_that_cannot_be_read_leave_the_order_as_it_was(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(world.mode, PartsMode)
    monkeypatch.setattr(repair_order, "_FIRST", 0.0)
    monkeypatch.setattr(repair_order, "_PERIOD", 0.0)
    await world.run()
    world.mode.stats_ = [counted(s1=3), BusyError("not now"), OSError("no"), None, counted(s1=3)]
    plans = tuple(world.sync.state.plan.services.values())
    task = asyncio.create_task(world.sync.usage.follow(world.mode, lambda: plans))
    left = world.mode.stats_
    await until(lambda: not left, 20.0)
    task.cancel()
    assert world.sync.usage.busiest() == [ObjectName("shop", "s1")]


async def test_a_mode_that_cannot_write_in_parts_is_not_asked() -> None:
    async with asyncio.timeout(20):
        await Usage().follow(MemoryMode(), tuple)


async def test_two_claims_of_one_object_are_written_together(world: World) -> None:
    """Which of the two is in force depends on the order of the owners."""
    assert isinstance(world.mode, PartsMode)
    await world.run()
    world.mode.parts.clear()
    owned = ledger.ObjectLedger()
    owned.put("one", {"a": 1, "b": 1})
    owned.put("other", {"b": 2})
    assert owned.parts(len(owned.effective()), []) is None
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.1", "10.1.0.99")))
    await world.run()
    assert world.mode.kernel == world.fresh()
