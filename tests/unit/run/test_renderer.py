"""Filling an empty kernel in parts."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from steersman.model.errors import ApplyError
from steersman.model.names import NODE, Owner
from steersman.model.ruleset import Diff
from steersman.run.sync import ledger, renderer, sync
from tests.support.builders.store import service, slice_
from tests.support.modes.memory import MemoryMode, World


class PartsMode(MemoryMode):
    """Fills its kernel in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Diff] = []

    def fill(self, parts: Iterable[Diff]) -> None:
        for part in parts:
            self.parts.append(part)
            self.apply(part)


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


async def test_a_flush_is_drift_of_everything_that_was_in_force(world: World) -> None:
    assert isinstance(world.mode, PartsMode)
    await world.run()
    number = len(world.mode.kernel)
    world.mode.kernel.clear()
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.1", "10.1.0.99")))  # ours, not written yet
    # The clock goes on with each part that is written.
    written = world.mode.parts
    written.clear()
    world.sync._wall = lambda: 1000.0 + len(written)
    report = await world.sync.check()
    assert report is not None
    assert report.drift is not None
    assert written
    assert (report.drift.at, report.drift.repaired_at) == (1000, 1000 + len(written))
    assert (report.drift.missing, report.drift.foreign, report.drift.changed) == (number, 0, 0)
    assert report.drift.examples
    assert world.mode.kernel == world.fresh()


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
