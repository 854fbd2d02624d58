"""Laws of the nftables mode's pure half."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from steersman.model.names import Family, PlanKey
from steersman.model.plan import EndpointChange, Frontend, FrontendKind, ServicePlan, Verdict
from steersman.model.ruleset import diff, diff_of_owners, patch
from steersman.modes.nftables.layout import Kind, size_for, unpack_slot
from steersman.modes.nftables.render import Slots, assign_slots, render_endpoints, render_service
from steersman.modes.nftables.text import ruleset_text
from tests.support.builders import nftables_plans as make
from tests.support.builders.plans import PLAIN
from tests.support.builders.plans import plan as a_plan

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


ADDRESSES = {
    Family.IPV4: ("10.96.0.1", "10.97.0.1", "10.98.0.1", ""),
    Family.IPV6: ("fd00:96::1", "fd00:97::1", "fd00:98::1", ""),
}
NUMBERED = st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=5)


@given(
    st.sampled_from(make.BOTH),
    st.sampled_from([0, 0, 0, 30]),
    st.booleans(),
    NUMBERED,
    NUMBERED | st.none(),
    st.data(),
)
def test_new_endpoints_alone_are_rendered_as_the_whole_is(
    family: Family,
    affinity: int,
    node_port: bool,
    first: list[int],
    second: list[int] | None,
    data: st.DataObject,
) -> None:
    if second is None:  # one in the place of another
        second = [*first[1:], data.draw(st.integers(10, 19))]
    slots: Slots = {}
    frontends = [
        Frontend(kind, "" if kind is FrontendKind.NODE_PORT else address, 80, *PLAIN)
        for kind, address in zip(FrontendKind, ADDRESSES[family], strict=True)
        if node_port or kind is not FrontendKind.NODE_PORT
    ]
    of = make.key(family=family)
    old, new = (
        a_plan(of, *frontends, cluster=make.pods(sorted(some), family), affinity=affinity)
        for some in (first, second)
    )
    rendered = render_service(old, make.SETTINGS, slots)
    twin = dict(slots)
    had, has = frozenset(old.cluster), frozenset(new.cluster)
    lists = EndpointChange(tuple(had - has), tuple(has - had))
    change = render_endpoints(new, lists, rendered, slots)
    whole = render_service(new, make.SETTINGS, twin)
    one_for_another = len(had - has) == len(has - had) == 1
    assert (change is not None) is (one_for_another and not affinity and not node_port)
    if change is not None:
        assert change == diff(rendered, whole)
        assert slots == twin
        assert len(change) == len(frontends)


def test_slots_that_differ_from_what_is_rendered_take_the_long_way() -> None:
    one, two, three = make.pods([1, 2, 3], Family.IPV4)
    frontend = Frontend(FrontendKind.CLUSTER_IP, "10.96.0.1", 80, *PLAIN)
    key, slots = make.key(family=Family.IPV4), dict[bytes, bytes]()
    rendered = render_service(a_plan(key, frontend, cluster=(one, two)), make.SETTINGS, slots)
    plan = a_plan(key, frontend, cluster=(one, three))
    change = EndpointChange((two,), (three,))
    for other in ({}, {first: ends[8:] + ends[:8] for first, ends in slots.items()}):
        before = dict(other)
        assert render_endpoints(plan, change, rendered, other) is None
        assert other == before
    assert render_endpoints(plan, change, {}, slots) is None
    assert render_endpoints(plan, change, rendered, slots) is not None
