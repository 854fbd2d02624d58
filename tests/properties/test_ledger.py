"""Whoever is refused, and in whatever order: the kernel has what it should have now."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from steersman.model.ruleset import diff, patch
from steersman.run.sync.ledger import STALE, ObjectLedger, Owner

OWNERS: tuple[Owner, ...] = ("a", "b", "c")
worlds = st.dictionaries(st.integers(0, 5), st.tuples(st.sampled_from(OWNERS), st.integers(0, 2)))
"""The wanted objects: owner and value of each."""
PARTS: list[list[Owner]] = [["a"], ["b"], ["c"], ["a", "b"], ["b", "c"]]
steps = st.tuples(worlds, st.permutations(PARTS), st.sets(st.sampled_from(OWNERS)))


def of(world: dict[int, tuple[Owner, int]], owner: Owner) -> dict[int, int]:
    return {key: value for key, (whose, value) in world.items() if whose == owner}


def put(ledger: ObjectLedger, world: dict[int, tuple[Owner, int]], *, knows: bool = False) -> None:
    for owner in OWNERS:
        want = of(world, owner)
        if knows:
            amend(ledger, owner, want)
        else:
            ledger.put(owner, want)


def amend(ledger: ObjectLedger, owner: Owner, want: dict[int, int]) -> None:
    had = ledger.wants(owner)
    ledger.amend(owner, had, diff(had, want))


@given(
    st.lists(steps, max_size=4),
    st.dictionaries(st.integers(0, 8), st.integers(0, 2)),
    st.booleans(),
    st.booleans(),
)
def test_the_kernel_has_what_is_in_force(
    history: list[tuple[dict[int, tuple[Owner, int]], list[list[Owner]], set[Owner]]],
    found: dict[int, int],
    packs: bool,
    knows: bool,
) -> None:
    ledger, kernel = ObjectLedger(), dict(found)
    for world, order, refused in history:
        put(ledger, world, knows=knows)
        for part in order:
            if refused.intersection(part):
                ledger.reject(part, "no", kernel)
            else:
                kernel = patch(kernel, ledger.part(kernel, part))
                ledger.accept(part)
            if packs:
                ledger.pack()
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
    ledger.pack()
    assert dict(ledger.in_force()) == {1: 1}
    change = ledger.changes()
    assert change is not None
    assert patch({1: 1}, change) == {1: 2}


def test_a_known_change_counts_only_for_what_it_was_made_of() -> None:
    ledger = ObjectLedger()
    ledger.put("a", {1: 1, 2: 1})
    ledger.mark_written()
    amend(ledger, "a", {1: 2, 2: 1})
    ledger.put("b", {2: 2})
    ledger.drop_claimed(["a"])  # it wants something else now
    change = ledger.changes()
    assert change is not None
    assert patch({1: 1, 2: 1}, change) == {1: 2, 2: 2}
    ledger.mark_written()
    amend(ledger, "a", {1: 3})
    ledger.accept(["a"])  # and it has something else now
    assert ledger.changes() == diff({}, {})
    amend(ledger, "a", {1: 4})
    ledger.put("a", {1: 5})
    assert ledger.changes() == diff({1: 3}, {1: 5})
    amend(ledger, "a", {1: 6})  # it has not what it has wanted so far
    assert ledger.changes() == diff({1: 3}, {1: 6})
    ledger.reject(["a"], "no", {1: 3})
    amend(ledger, "a", {1: 7})
    assert not ledger.rejected
    assert ledger.changes() == diff({1: 3}, {1: 7})


def test_owners_whose_change_is_known_may_claim_one_object() -> None:
    for amended in (("a", "b"), ("a",)):
        ledger = ObjectLedger()
        ledger.put("a", {1: 1})
        ledger.put("b", {2: 1})
        ledger.mark_written()
        amend(ledger, "a", {1: 1, 3: 1})
        if "b" in amended:
            amend(ledger, "b", {2: 1, 3: 2})
        else:
            ledger.put("b", {2: 1, 3: 2})
        assert ledger.changes() is None
        assert ledger.outstanding >= 1


@given(worlds, worlds, st.booleans(), st.booleans())
def test_changes_lead_from_one_world_to_the_next(
    first: dict[int, tuple[Owner, int]],
    second: dict[int, tuple[Owner, int]],
    packs: bool,
    knows: bool,
) -> None:
    """Also where an object changes hands."""
    ledger = ObjectLedger()
    put(ledger, first)
    ledger.mark_written()
    if packs:
        ledger.pack()
    have: dict[Any, Any] = ledger.effective()
    put(ledger, second, knows=knows)
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
