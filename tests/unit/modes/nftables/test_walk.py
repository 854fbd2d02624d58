"""The walker through our chains: what it does not know it refuses."""

from __future__ import annotations

import pytest

from steersman.model.names import Family
from steersman.modes.nftables.layout import Kind, named, prefix
from tests.support.builders import case_files
from tests.support.modes.flows import FlowCase
from tests.support.modes.nft_rules import NftRules
from tests.support.modes.registry import NFTABLES, render

WORLD = case_files.world("cluster-ip", NFTABLES.traits)
PLAN = WORLD.plan(NFTABLES.traits)
FLOW = next(flow for flow in WORLD.flows if flow.kind == "forward")


def kind_of(ruleset: dict[bytes, object], flow: FlowCase = FLOW) -> str:
    return NftRules(ruleset, PLAN, Family.IPV4).answer(flow).kind


def test_a_statement_that_it_does_not_know_is_an_error() -> None:
    rules = "add rule ip kube-proxy nat-prerouting meta length > 1500 drop\n"
    rules += "add rule ip kube-proxy nat-output meta length > 1500 drop\n"
    with pytest.raises(ValueError, match="unknown statement in 'meta length > 1500 drop'"):
        kind_of({named(Kind.RULES, Family.IPV4, ""): rules})


def test_without_rules_nothing_is_translated() -> None:
    assert kind_of({}) == "untouched"


def test_a_slot_that_is_empty_is_noticed() -> None:
    ruleset = dict(render(PLAN, NFTABLES.offline()))
    assert kind_of(ruleset) == "forward"
    start = prefix(Kind.SERVICE_ENDPOINTS, Family.IPV4)
    for key in [key for key in ruleset if key.startswith(start) and key.endswith(bytes(4))]:
        del ruleset[key]
    assert NftRules(ruleset, PLAN, Family.IPV4).answer(FLOW).note or kind_of(ruleset) != "forward"
