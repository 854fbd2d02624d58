"""Runs a file of conformance cases in one way, and says what failed.

The schema is described beside the data. A suite is found by the file's `suite` name; packet flows
can be asked three ways, the other suites have one.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import tests.conformance
from steersman.model.plan import Traits
from tests.conformance.replay import replay
from tests.conformance.suites_names import not_here
from tests.conformance.world import world
from tests.support.builders.worlds import LabPool, World, program
from tests.support.modes.flows import FlowCase, as_served, by_packets, by_trace, compare
from tests.support.modes.registry import Ask, ModeUnderTest

Case: TypeAlias = Mapping[str, Any]
Suite: TypeAlias = Callable[[Any], None]


def _suites() -> Iterator[tuple[str, Suite]]:
    for module in pkgutil.iter_modules(tests.conformance.__path__, "tests.conformance."):
        if module.name.rpartition(".")[2].startswith("suites_"):
            yield from importlib.import_module(module.name).SUITES.items()


SUITES: Mapping[str, Suite] = dict(_suites())
"""By `suite` name, from every suites_*.py beside this file: they raise AssertionError."""
KINDS = {"dnat": "forward", "drop": "drop", "reject": "reject"}
"""Other kinds of the data, `none` and `accept`, mean that a packet is left alone."""


class Skipped(Exception):
    """A check cannot be made, and why."""


@dataclass
class Tally:
    """What came of the checks."""

    passed: int = 0
    failures: list[str] = field(default_factory=list)
    skips: list[str] = field(default_factory=list)

    def take(self, name: str, check: Callable[[], str]) -> None:
        """Make one check; it returns or raises the problem."""
        try:
            wrong = check()
        except Skipped as why:
            self.skips.append(f"{name}: {why}")
            return
        except Exception as error:  # a crash in one case is a failure of that case
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            self.failures.append(f"{name}: {wrong}")
        else:
            self.passed += 1


@dataclass
class Runner:
    """The way in which flows are checked."""

    mode: ModeUnderTest
    how: str
    variant: str
    pool: LabPool = field(default_factory=LabPool)

    def run(self, path: Path, tally: Tally, wanted: str = "") -> None:
        """Check the cases of a file whose id contains `wanted`."""
        data = json.loads(path.read_text())
        for case in data["cases"]:
            if wanted not in case["id"]:
                continue
            if "flows" in case:
                self.flows(path, case, tally)
            else:
                tally.take(f"{path.name} {case['id']}", suite_check(data["suite"], case))

    def flows(self, path: Path, case: Case, tally: Tally) -> None:
        """Check every flow of a case."""
        try:
            setting = flow_world(case, self.mode.traits)
            ask = self._ask(setting)
        except Skipped as why:
            tally.skips.append(f"{path.name} {case['id']}: {why}")
            return
        except Exception as error:
            tally.failures.append(f"{path.name} {case['id']}: {type(error).__name__}: {error}")
            return
        if case.get("steps"):
            tally.take(f"{path.name} {case['id']} steps", lambda: self._replay(case, setting))
        for flow, expected in zip(setting.flows, case["flows"], strict=True):
            check = self._check(flow, ask, case, expected)
            tally.take(f"{path.name} {case['id']}", check)

    def _replay(self, case: Case, setting: World) -> str:
        """Whether the history of a case leads to the plan of its end."""
        traits = self.mode.traits
        same = dict(replay(dict(case), traits).services) == dict(setting.plan(traits).services)
        return "" if same else "replaying the steps gives another plan than their end"

    def _check(
        self, flow: FlowCase, ask: Ask, case: Case, expected: Mapping[str, Any]
    ) -> Callable[[], str]:
        def check() -> str:
            known = case.get("mode") in (self.mode.name, self.mode.like, "any", None)
            if not known and not expected.get("agrees"):
                raise Skipped(f"{flow}: this is said of mode {case['mode']} only")
            return compare(flow, ask(flow))

        return check

    def _ask(self, setting: World) -> Ask:
        plan = setting.plan(self.mode.traits)
        if self.how == "trace":
            return lambda flow: by_trace(plan, flow)
        if self.how == "rules":
            if self.mode.evaluator is None:
                raise Skipped(f"rules of mode {self.mode.name} cannot be evaluated")
            return self.mode.evaluator(plan)
        lab = self.pool.lab(setting)
        program(lab, plan, self.mode, self.variant)
        return lambda flow: by_packets(lab, flow)


def suite_check(suite: str, case: Case) -> Callable[[], str]:
    """The check of a case without flows."""

    def check() -> str:
        if suite not in SUITES:
            raise Skipped(f"no suite {suite} here")
        if why := not_here(suite, case):
            raise Skipped(why)
        try:
            SUITES[suite](case)
        except AssertionError as error:
            return str(error) or "assertion failed"
        return ""

    return check


def flow_world(case: Case, traits: Traits) -> World:
    """The world of a case with flows, as modes of these traits serve them."""
    snapshot, config, facts = world(dict(case))
    flows = tuple(as_served(flow, traits) for flow in _flow_cases(case))
    return World(case["id"], snapshot, config, facts, flows)


def _flow_cases(case: Case) -> Iterator[FlowCase]:
    for flow in case["flows"]:
        expect = flow["expect"]
        kind = KINDS.get(expect["kind"], "untouched")
        yield FlowCase(
            flow["name"],
            flow["sourceIP"],
            flow["destIP"],
            flow["destPort"],
            flow["protocol"],
            kind,
            frozenset(expect["endpoints"] if kind == "forward" else ()),
            bool(expect["masq"]) and kind == "forward",
        )
