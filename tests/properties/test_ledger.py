"""Whoever is refused, and in whatever order: the kernel has what it should have now."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from steersman.model.names import Owner
from steersman.model.ruleset import Diff, patch
from steersman.run.sync.ledger import STALE, ObjectLedger

OWNERS: tuple[Owner, ...] = ("a", "b", "c")
worlds = st.dictionaries(st.integers(0, 5), st.tuples(st.sampled_from(OWNERS), st.integers(0, 2)))
"""The wanted objects: owner and value of each."""
PARTS: list[list[Owner]] = [["a"], ["b"], ["c"], ["a", "b"], ["b", "c"]]
steps = st.tuples(worlds, st.permutations(PARTS), st.sets(st.sampled_from(OWNERS)))


def of(world: dict[int, tuple[Owner, int]], owner: Owner) -> dict[int, int]:
    return {key: value for key, (whose, value) in world.items() if whose == owner}


def put(ledger: ObjectLedger, world: dict[int, tuple[Owner, int]]) -> None:
    for owner in OWNERS:
        ledger.put(owner, of(world, owner))


@given(
    st.lists(steps, max_size=4),
    st.dictionaries(st.integers(0, 8), st.integers(0, 2)),
    st.booleans(),
)
def test_the_kernel_has_what_is_in_force(
    history: list[tuple[dict[int, tuple[Owner, int]], list[list[Owner]], set[Owner]]],
    found: dict[int, int],
    packs: bool,
) -> None:
    ledger, kernel = ObjectLedger(), dict(found)
    for world, order, refused in history:
        put(ledger, world)
        for part in order:
            if refused.intersection(part):
                ledger.reject(part, "no", kernel)
            else:
                kernel = patch(kernel, ledger.part(kernel, part))
                ledger.accept(part)
            if packs:
                ledger.use_packed(ledger.packed())
        kernel = patch(kernel, ledger.part(kernel, [STALE]))
        assert kernel == ledger.effective() == dict(ledger.in_force())
        assert ledger.objects == len(list(ledger.in_force()))
        for owner in OWNERS:
            if owner not in ledger.rejected:
                assert of(world, owner).items() <= kernel.items()


def test_a_change_may_come_before_what_is_in_force_is_packed() -> None:
    ledger = ObjectLedger()
    ledger.put("a", {1: 1})
    ledger.mark_written()
    ledger.put("a", {1: 2})
    ledger.use_packed(ledger.packed())
    assert dict(ledger.in_force()) == {1: 1}
    change = ledger.changes()
    assert change is not None
    assert patch({1: 1}, change) == {1: 2}


def test_two_owners_that_claim_one_object_have_no_diff() -> None:
    ledger = ObjectLedger()
    ledger.put("a", {1: 1})
    ledger.put("b", {2: 1})
    ledger.mark_written()
    assert not ledger.owes
    ledger.put("a", {1: 1, 3: 1})
    ledger.put("b", {2: 1, 3: 2})
    assert ledger.changes() is None
    assert ledger.owes


def test_an_outdated_owner_loses_what_others_want() -> None:
    ledger = ObjectLedger()
    ledger.put("a", {1: 1, 2: 1})
    ledger.mark_written()
    ledger.put("b", {2: 2})
    ledger.drop_claimed(["a"])
    assert ledger.changes() == Diff({}, {}, {2: (1, 2)})
    ledger.mark_written()
    ledger.put("a", {})
    assert ledger.changes() == Diff({}, {1: 1}, {}), "what b has now is not removed with a"


@given(worlds, worlds, st.booleans())
def test_changes_lead_from_one_world_to_the_next(
    first: dict[int, tuple[Owner, int]],
    second: dict[int, tuple[Owner, int]],
    packs: bool,
) -> None:
    """Also where an object changes hands."""
    ledger = ObjectLedger()
    put(ledger, first)
    ledger.mark_written()
    if packs:
        ledger.use_packed(ledger.packed())
    have: dict[Any, Any] = ledger.effective()
    put(ledger, second)
    change = ledger.changes()
    assert change is not None
    assert patch(have, change) == ledger.wanted() == ledger.effective()
    ledger.mark_written()
    assert dict(ledger.in_force()) == ledger.wanted()
    assert ledger.objects == len(list(ledger.in_force()))
    assert not ledger.changes()


def test_two_who_want_the_same_object_have_no_changes_that_lead_there() -> None:
    ledger = ObjectLedger()
    ledger.put("a", {1: 1})
    ledger.put("b", {1: 2})
    assert ledger.changes() is None


def test_an_owner_without_objects_is_forgotten_once_they_are_removed() -> None:
    ledger = ObjectLedger()
    ledger.put("a", {1: 1})
    ledger.mark_written()
    ledger.put("a", {})
    change = ledger.changes()
    assert change is not None
    assert change.removed == {1: 1}
    assert ledger.owners == {"a"}
    ledger.mark_written()
    assert ledger.owners == set()
