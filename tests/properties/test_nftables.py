"""Laws of the nftables mode's pure half."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from steersman.model.names import PlanKey
from steersman.model.plan import ServicePlan, Verdict
from steersman.model.ruleset import diff, diff_of_owners, patch
from steersman.modes.nftables.layout import Kind, size_for, unpack_slot
from steersman.modes.nftables.render import Slots, assign_slots, render_service
from steersman.modes.nftables.text import ruleset_text
from tests.support.builders import nftables_plans as make

Ends = tuple[bytes, ...]
ENDS = st.lists(st.integers(0, 40).map(lambda n: bytes((n,))), unique=True).map(tuple)


@given(ENDS, ENDS)
def test_slots_are_dense_complete_and_stable(previous: Ends, wanted: Ends) -> None:
    got = assign_slots(previous, wanted)
    assert sorted(got) == sorted(wanted)
    kept = sum(before == after for before, after in zip(previous, got, strict=False))
    stays = len(set(previous) & set(wanted))
    shorter = max(0, len(previous) - len(wanted))
    assert kept >= stays - shorter
    assert assign_slots(got, wanted) == got


@given(ENDS, st.data())
def test_one_endpoint_less_moves_one(previous: Ends, data: st.DataObject) -> None:
    if previous:
        gone = data.draw(st.sampled_from(previous))
        got = assign_slots(previous, tuple(end for end in previous if end != gone))
        moved = [n for n, (a, b) in enumerate(zip(previous, got, strict=False)) if a != b]
        assert len(moved) <= 1


@given(st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=6).map(tuple))
def test_slots_that_the_kernel_holds_twice_become_unique(previous: Ends) -> None:
    assert sorted(assign_slots(previous, (b"a", b"b"))) == [b"a", b"b"]


def everything(world: dict[PlanKey, ServicePlan], slots: Slots) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for plan in world.values():
        part = render_service(plan, make.SETTINGS, slots)
        assert not out.keys() & part.keys()  # one owner for every key
        out.update(part)
    return out


@given(make.worlds())
def test_render_again_changes_nothing_and_all_of_it_can_be_printed(
    world: dict[PlanKey, ServicePlan],
) -> None:
    slots: Slots = {}
    first = everything(world, slots)
    assert not diff(first, everything(world, slots))
    assert len(ruleset_text(first).splitlines()) == len(first)


@given(make.worlds(), make.worlds())
def test_changes_by_owner_lead_to_the_same_whole(
    before: dict[PlanKey, ServicePlan], after: dict[PlanKey, ServicePlan]
) -> None:
    slots: Slots = {}
    old = {key: render_service(plan, make.SETTINGS, slots) for key, plan in before.items()}
    new = {key: render_service(plan, make.SETTINGS, slots) for key, plan in after.items()}
    change = diff_of_owners((old.get(k, {}), new.get(k, {})) for k in old.keys() | new.keys())
    whole = {k: v for part in old.values() for k, v in part.items()}
    assert patch(whole, change) == {k: v for part in new.values() for k, v in part.items()}


@given(make.worlds())
def test_every_slot_is_below_the_size_of_its_chain(
    world: dict[PlanKey, ServicePlan],
) -> None:
    """Slots are dense, and the chain draws from the smallest size that holds them all."""
    for plan in world.values():
        for actions in ((f.pod, f.node, f.external) for f in plan.frontends):
            for action in actions:
                if action.verdict is Verdict.FORWARD:
                    assert plan.pool(action.pool)
        rules = render_service(plan, make.SETTINGS, {})
        slots = [unpack_slot(k) % 65536 for k in rules if k[0] == Kind.SERVICE_ENDPOINTS]
        if slots:
            assert max(slots) < size_for(max(len(plan.cluster), len(plan.local)))
