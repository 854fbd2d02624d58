"""Whoever is refused, and in whatever order: the kernel has what it should have now."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from steersman.model.ruleset import patch
from steersman.run.holdings import STALE, Holdings, Owner

OWNERS: tuple[Owner, ...] = ("a", "b", "c")
worlds = st.dictionaries(st.integers(0, 5), st.tuples(st.sampled_from(OWNERS), st.integers(0, 2)))
"""What is wanted: who an object belongs to, and its value."""
PARTS: list[list[Owner]] = [["a"], ["b"], ["c"], ["a", "b"], ["b", "c"]]
steps = st.tuples(worlds, st.permutations(PARTS), st.sets(st.sampled_from(OWNERS)))


def of(world: dict[int, tuple[Owner, int]], owner: Owner) -> dict[int, int]:
    return {key: value for key, (whose, value) in world.items() if whose == owner}


def put(holdings: Holdings, world: dict[int, tuple[Owner, int]]) -> None:
    for owner in OWNERS:
        holdings.put(owner, of(world, owner))


@given(st.lists(steps, max_size=4), st.dictionaries(st.integers(0, 8), st.integers(0, 2)))
def test_the_kernel_has_what_is_in_force(
    history: list[tuple[dict[int, tuple[Owner, int]], list[list[Owner]], set[Owner]]],
    found: dict[int, int],
) -> None:
    holdings, kernel = Holdings(), dict(found)
    for world, order, refused in history:
        put(holdings, world)
        for part in order:
            if refused.intersection(part):
                holdings.refuse(part, "no", kernel)
            else:
                kernel = patch(kernel, holdings.part(kernel, part))
                holdings.accept(part)
        kernel = patch(kernel, holdings.part(kernel, [STALE]))
        assert kernel == holdings.effective() == dict(holdings.in_force())
        assert holdings.objects == len(list(holdings.in_force()))
        for owner in OWNERS:
            if owner not in holdings.refused:
                assert of(world, owner).items() <= kernel.items()


@given(worlds, worlds)
def test_changes_lead_from_one_world_to_the_next(
    first: dict[int, tuple[Owner, int]], second: dict[int, tuple[Owner, int]]
) -> None:
    """Also where an object changes hands."""
    holdings = Holdings()
    put(holdings, first)
    holdings.written()
    have: dict[Any, Any] = holdings.effective()
    put(holdings, second)
    change = holdings.changes()
    assert change is not None
    assert patch(have, change) == holdings.wanted() == holdings.effective()
    holdings.compared()
    assert not holdings.changes()


def test_two_who_want_the_same_object_have_no_changes_that_lead_there() -> None:
    holdings = Holdings()
    holdings.put("a", {1: 1})
    holdings.put("b", {1: 2})
    assert holdings.changes() is None


def test_an_owner_without_objects_is_forgotten_once_they_are_removed() -> None:
    holdings = Holdings()
    holdings.put("a", {1: 1})
    holdings.written()
    holdings.put("a", {})
    change = holdings.changes()
    assert change is not None
    assert change.removed == {1: 1}
    assert holdings.owners == {"a"}
    holdings.written()
    assert holdings.owners == set()
