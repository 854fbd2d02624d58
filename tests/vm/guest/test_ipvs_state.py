"""The ipvs_state suite in a real kernel: what it has afterwards is what upstream's fake one had."""

from __future__ import annotations

import pytest

from tests.conformance.suites_ipvs import DIFFERENT, expected, planned
from tests.conformance.world import Case, load
from tests.support.lab.ipvs_node import Node, bring, node
from tests.vm.guest.ipvs import only_with_all

__all__ = ["node"]
CASES = [case for case in load("ipvs_state") if case["id"] not in DIFFERENT]
pytestmark = [
    only_with_all,
    pytest.mark.skipif(not CASES, reason="the conformance data is not beside the project"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(case: Case, node: Node) -> None:
    bring(planned(case), node.mode)
    assert {
        key: (server.scheduler, server.flags, server.timeout, frozenset(server.targets))
        for key, server in node.servers().items()
    } == expected(case["expect"])
