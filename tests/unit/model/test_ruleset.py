from __future__ import annotations

import pytest

from steersman.model.ruleset import Diff, diff, diff_of_owners, patch


def test_diff_names_what_is_added_removed_and_changed() -> None:
    change = diff({"a": 1, "b": 2, "c": 3}, {"b": 2, "c": 4, "d": 5})
    assert change == Diff({"d": 5}, {"a": 1}, {"c": (3, 4)})
    assert len(change) == 3
    assert patch({"a": 1, "b": 2, "c": 3}, change) == {"b": 2, "c": 4, "d": 5}
    assert [*change.old_and_new()] == [("a", 1, None), ("d", None, 5), ("c", 3, 4)]


def test_a_part_of_a_diff_has_the_steps_about_some_objects() -> None:
    change = Diff({"a": 1, "b": 2}, {"c": 3}, {"d": (4, 5)})
    assert change.where({"b", "d"}.__contains__) == Diff({"b": 2}, {}, {"d": (4, 5)})
    assert change.where(lambda key: key == "c").removed == {"c": 3}
    assert not change.where(lambda _: False)


def test_nothing_to_do_is_false() -> None:
    assert not diff({"a": 1}, {"a": 1})
    assert diff({}, {"a": None})


def test_the_differences_of_all_owners_are_one_diff() -> None:
    owners = [({}, {"a": 1}), ({"b": 2}, {}), ({"c": 1, "d": 1}, {"c": 2, "d": 1})]
    assert diff_of_owners(owners) == Diff({"a": 1}, {"b": 2}, {"c": (1, 2)})


@pytest.mark.parametrize(
    "owners",
    [
        [({}, {"a": 1}), ({}, {"a": 2})],
        [({"a": 1}, {}), ({"a": 1}, {})],
        [({"a": 1}, {"a": 2}), ({}, {"a": 3})],
        [({"a": 1}, {"a": 2}), ({"a": 1}, {})],
    ],
)
def test_two_owners_of_one_object_are_refused(
    owners: list[tuple[dict[str, int], dict[str, int]]],
) -> None:
    with pytest.raises(ValueError, match="two owners"):
        diff_of_owners(owners)


def test_a_key_that_changes_hands_is_a_change() -> None:
    assert diff_of_owners([({"a": 1}, {}), ({}, {"a": 2})]) == Diff({}, {}, {"a": (1, 2)})
