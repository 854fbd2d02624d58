from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.model.names import Family
from steersman.model.plan import NodeSettings
from steersman.model.ruleset import Diff, Packer, diff, diff_of_owners, format_diff, patch
from steersman.modes.ebpf import render as ebpf
from steersman.modes.iptables import render as iptables
from steersman.modes.nftables import render as nftables
from tests.support.builders import plans

SETTINGS = NodeSettings()
PARTS: dict[str, Any] = {
    "ebpf": ebpf.render_service,
    "iptables": lambda plan: iptables.render_service(plan, SETTINGS, iptables.Features()),
    "nftables": lambda plan: nftables.render_service(plan, SETTINGS, {}),
}


def test_diff_names_what_is_added_removed_and_changed() -> None:
    change = diff({"a": 1, "b": 2, "c": 3}, {"b": 2, "c": 4, "d": 5})
    assert change == Diff({"d": 5}, {"a": 1}, {"c": (3, 4)})
    assert len(change) == 3
    assert patch({"a": 1, "b": 2, "c": 3}, change) == {"b": 2, "c": 4, "d": 5}


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


def test_a_diff_is_printed_by_line() -> None:
    change = Diff(
        added={("nat", "B", ""): "-A B 1\n-A B 2", "empty": ""},
        removed={("nat", "A"): "-A A 1"},
        changed={"c": ("kept\nold", "kept\nnew")},
    )
    assert format_diff(change).splitlines() == [
        "- nat A: -A A 1",
        "+ nat B: -A B 1",
        "+ nat B: -A B 2",
        "+ empty: ",
        "- c: old",
        "+ c: new",
    ]
    assert format_diff(Diff()) == ""


@pytest.mark.parametrize("mode", PARTS)
@given(st.randoms(use_true_random=False), st.sampled_from(Family))
def test_every_part_of_a_mode_can_be_packed(mode: str, rng: Random, family: Family) -> None:
    packer = Packer()
    for number in range(3):
        part = PARTS[mode](plans.random_plan(rng, number, family))
        packed = packer.pack(part)
        assert isinstance(packed, bytes)
        assert packer.unpack(packed) == part


def test_the_text_of_rules_shrinks_by_what_it_shares_with_the_first() -> None:
    packer = Packer()
    size = 0
    for number in range(3):
        part = PARTS["iptables"](plans.simple(number))
        packed = packer.pack(part)
        assert isinstance(packed, bytes)
        size = len(packed)
        assert packer.unpack(packed) == part
    text = sum(len(value) for value in PARTS["iptables"](plans.simple(3)).values())
    assert size < text / 3


def test_a_part_with_values_of_other_types_stays_as_it_is() -> None:
    part = {"plan": plans.simple(1), "family": Family.IPV4}
    packer = Packer()
    assert packer.pack(part) is part
    assert packer.unpack(part) is part
