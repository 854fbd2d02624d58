"""Packing the objects of an owner."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.model.names import Family
from steersman.model.plan import NodeSettings
from steersman.modes.ebpf import render as ebpf
from steersman.modes.iptables import render as iptables
from steersman.modes.nftables import render as nftables
from steersman.run.sync.ledger import ObjectLedger
from steersman.run.sync.packer import Packer
from tests.support.builders import plans

SETTINGS = NodeSettings()
PARTS: dict[str, Any] = {
    "ebpf": ebpf.render_service,
    "iptables": lambda plan: iptables.render_service(plan, SETTINGS, iptables.Features()),
    "nftables": lambda plan: nftables.render_service(plan, SETTINGS, {}),
}


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


def test_objects_that_cannot_be_packed_stay_in_the_ledger_as_they_are() -> None:
    ledger = ObjectLedger()
    ledger.put("the node", {"family": Family.IPV4})
    ledger.put("other", {"number": 1})
    ledger.mark_written()
    ledger.use_packed(ledger.packed())
    assert dict(ledger.in_force()) == {"family": Family.IPV4, "number": 1}
    assert ledger.unpacked == 0
