"""The conformance flows by the rendered rules and by real packets, in every mode.

By trace they are checked in test_pure_suites.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.runner import Case, Runner, Tally
from tests.conformance.world import load
from tests.support.modes.registry import MODES, ModeUnderTest

FILES = ("packetflow_{mode}", "packetflow_common")
CASES = [
    pytest.param(mode, case, id=f"{mode.name}-{case['id']}")
    for mode in MODES.values()
    for name in FILES
    for case in load(name.format(mode=mode.like or mode.name))
]
pytestmark = pytest.mark.skipif(not CASES, reason="the conformance data is not beside the project")
each_case = pytest.mark.parametrize(("mode", "case"), CASES)
EVALUATED = [p for p in CASES if p.values[0].evaluator]  # type: ignore[union-attr]


def check(runner: Runner, case: Case) -> None:
    tally = Tally()
    runner.flows(Path("data"), case, tally)
    assert not tally.failures
    assert tally.passed == len(case["flows"]) + bool(case.get("steps"))


@pytest.mark.parametrize(("mode", "case"), EVALUATED)
def test_rules(mode: ModeUnderTest, case: Case) -> None:
    check(Runner(mode, "rules", ""), case)


@pytest.fixture(scope="module")
def runners() -> Iterator[dict[str, Runner]]:
    runners = {
        mode.name + variant: Runner(mode, "packets", variant)
        for mode in MODES.values()
        for variant in mode.variants
    }
    yield runners
    for runner in runners.values():
        runner.pool.close()


@pytest.mark.kernel
@each_case
def test_packets(mode: ModeUnderTest, case: Case, runners: dict[str, Runner]) -> None:
    for variant in mode.variants:
        check(runners[mode.name + variant], case)
