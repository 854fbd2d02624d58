"""Every case of the ipvs_state suite."""

from __future__ import annotations

import pytest

from tests.conformance.suites_ipvs import DIFFERENT, SUITES
from tests.conformance.world import Case, load

CASES = load("ipvs_state")
pytestmark = pytest.mark.skipif(not CASES, reason="the conformance data is not beside the project")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(case: Case) -> None:
    SUITES["ipvs_state"](case)


def test_every_difference_is_of_a_case() -> None:
    assert DIFFERENT.keys() <= {case["id"] for case in CASES}
