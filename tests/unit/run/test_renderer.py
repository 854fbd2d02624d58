"""Filling an empty kernel: in parts, and while the rest is rendered."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import pytest

from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import NODE, Owner
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import Diff, Ruleset
from steersman.run.sync import ledger, renderer, sync
from tests.support.builders.store import service, slice_
from tests.support.modes.memory import MemoryMode, World


class PartsMode(MemoryMode):
    """Fills its kernel in parts."""

    writes_in_parts = True

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Diff] = []

    async def apply_parts(self, parts: Iterable[Diff]) -> None:
        for part in parts:
            self.parts.append(part)
            await self.apply(part)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Nine Services with two addresses each; three of them go in together."""
    monkeypatch.setattr(sync, "_PARTS_FROM", 1)
    monkeypatch.setattr(ledger, "_SMALLEST_PART", 3)
    monkeypatch.setattr(renderer, "_PACKED_FROM", 9)
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


async def test_objects_of_a_first_sync_are_packed_as_they_are_rendered(world: World) -> None:
    result = await world.run()
    assert result is not None
    assert world.mode.kernel == world.fresh()
    assert result.added == len(world.mode.kernel)

    def unpacked() -> set[Owner]:
        kept = world.sync._ledger._want
        return {owner for owner, part in kept.items() if not isinstance(part, bytes)}

    assert unpacked() == {NODE}
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.1", "10.1.0.99")))
    await world.run()
    assert len(unpacked()) == 2, "one change is packed after the sync"
    assert world.mode.kernel == world.fresh()


async def test_after_a_flush_each_service_is_written_whole(world: World) -> None:
    assert isinstance(world.mode, PartsMode)
    await world.run()
    assert [len(part) for part in parts_of(world)] == [2, 3, 3, 1], "the node comes first"
    world.mode.parts.clear()
    world.mode.kernel.clear()
    result = await world.check()
    parts = parts_of(world)
    assert {"node", "masq"} <= world.mode.parts[0].added.keys()
    assert len(set().union(*parts)) == sum(map(len, parts)) == 9, "no Service is in two parts"
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


def test_few_objects_are_not_worth_parts() -> None:
    owned = ledger.ObjectLedger()
    owned.put("one", {"a": 1, "b": 1})
    assert owned.parts(3) is None
    assert owned.parts(2) is not None


async def test_two_claims_of_one_object_are_written_together(world: World) -> None:
    """Which of the two is in force depends on the order of the owners."""
    assert isinstance(world.mode, PartsMode)
    await world.run()
    world.mode.parts.clear()
    owned = ledger.ObjectLedger()
    owned.put("one", {"a": 1, "b": 1})
    owned.put("other", {"b": 2})
    found = owned.parts(1)
    assert found is not None
    with pytest.raises(ApplyError, match="two Services claim"):
        list(found)
    assert owned.parts(4) is None, "too few"
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.1", "10.1.0.99")))
    await world.run()
    assert world.mode.kernel == world.fresh()


# Writing while the rest is rendered


class FillingMode(MemoryMode):
    """Its tool reads the first objects while others are rendered."""

    def __init__(self) -> None:
        super().__init__()
        self.rendered: list[str] = []
        self.read_at: list[int] = []
        """How many Services were rendered when each part came."""
        self.fail: Exception | None = None
        self.claim = ""
        """A Service that claims the objects of s1, too."""

    @property
    def fills(self) -> bool:
        return True

    def comes_first(self, plan: ServicePlan) -> bool:
        return plan.key.name.service == "s8"

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        self.rendered.append(plan.key.name.service)
        rules = super().render_service(plan, settings)
        return {**rules, "of s1": 1} if plan.key.name.service in ("s1", self.claim) else rules

    async def fill(self, first: Diff, rest: AsyncIterator[Ruleset]) -> None:
        self.read_at.append(len(self.rendered))
        async for part in rest:
            self.read_at.append(len(self.rendered))
            if self.fail:
                raise self.fail
            first.added.update(part)
        await self.apply(first)


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(sync, "_FILL_FROM", 9)
    monkeypatch.setattr(renderer, "_FIRST_PART", 2)
    world = World(9)
    world.mode = FillingMode()
    world.start()
    return world


async def test_an_empty_kernel_is_filled_while_the_rest_is_rendered(filled: World) -> None:
    mode = filled.mode
    assert isinstance(mode, FillingMode)
    result = await filled.run()
    assert mode.read_at == [1, 3, 6, 9], "each part is half as large again"
    assert mode.rendered[0] == "s8"
    fresh = filled.fresh()
    assert mode.kernel == dict(filled.sync.objects()) == fresh
    assert len(mode.applied) == 1, "all or nothing"
    assert result is not None
    assert (result.dirty, result.added, result.refused) == (9, len(fresh), 0)
    assert mode.reads == 1
    assert await filled.run() is None
    filled.store.upsert(slice_("s1-x", "s1", ("10.1.0.99",)))
    await filled.run()
    assert (len(mode.applied), mode.reads) == (2, 1), "only the change is written, nothing read"


async def test_what_the_node_has_left_is_replaced_by_the_way(filled: World) -> None:
    filled.mode.kernel = {"masq": "of an earlier process"}
    result = await filled.run()
    assert result is not None
    assert (result.changed, result.added) == (1, len(filled.fresh()) - 1)
    assert filled.mode.kernel == filled.fresh()
    assert isinstance(filled.mode, FillingMode)
    assert filled.mode.read_at, "it was filled"


async def test_a_kernel_with_services_is_compared_and_read_once(filled: World) -> None:
    await filled.run()
    left = {"old": 1, **filled.mode.kernel}
    filled.mode.kernel = dict(left)
    filled.mode.reads = 0
    assert isinstance(filled.mode, FillingMode)
    filled.mode.read_at.clear()
    filled.start()
    result = await filled.run()
    assert result is not None
    assert (result.dirty, result.removed, result.added) == (9, 1, 0)
    assert (filled.mode.read_at, filled.mode.reads) == ([], 1)
    assert filled.mode.kernel == filled.fresh()


@pytest.mark.parametrize("number", [8, 2], ids=["of the first part", "of another one"])
async def test_a_culprit_is_found_though_the_kernel_was_filled(filled: World, number: int) -> None:
    filled.mode.poison = {f"shop/s{number} (TCP, IPv4)"}
    result = await filled.run()
    fresh = filled.fresh()
    assert result is not None
    assert (result.dirty, result.refused) == (9, 1)
    assert filled.mode.kernel == {k: v for k, v in fresh.items() if v not in filled.mode.poison}
    filled.mode.poison = set()
    await filled.check()
    assert filled.mode.kernel == fresh


async def test_a_fill_that_fails_half_way_is_done_by_the_next_run(filled: World) -> None:
    assert isinstance(filled.mode, FillingMode)
    filled.mode.fail = BusyError("somebody holds the lock")
    with pytest.raises(BusyError):
        await filled.run()
    assert filled.sync.owes
    assert filled.mode.kernel == {}
    assert len(filled.mode.rendered) < 9
    filled.mode.fail = None
    await filled.run()
    assert filled.mode.kernel == dict(filled.sync.objects()) == filled.fresh()


async def test_two_claims_of_one_object_end_a_fill(filled: World) -> None:
    assert isinstance(filled.mode, FillingMode)
    filled.mode.claim = "s9"
    await filled.run()
    assert filled.mode.kernel == {**filled.fresh(), "of s1": 1}
    assert len(filled.mode.read_at) == 4, "it was begun"
    assert not filled.sync.state.findings


async def test_a_mode_may_take_all_parts_at_once(filled: World) -> None:
    class Collecting(FillingMode):
        fill = MemoryMode.fill

    filled.mode = Collecting()
    filled.start()
    await filled.run()
    assert len(filled.mode.applied) == 1
    assert filled.mode.kernel == filled.fresh()
