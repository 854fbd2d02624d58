"""Every behaviour of tests/cases in every mode: by trace, by the rendered rules, by packets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from steersman.model.plan import NodePlan
from tests.support.builders import case_files
from tests.support.builders.worlds import LabPool, program
from tests.support.lab.userspace import patient_dials
from tests.support.modes.flows import Answer, FlowCase, by_packets, by_trace, compare
from tests.support.modes.ipvs import IPVS
from tests.support.modes.registry import MODES, Ask, ModeUnderTest, answered

NAMES = case_files.names()
RENDERED = (*MODES.values(), IPVS)  # packets in ipvs mode: tests/vm/guest/test_ipvs.py
BY_MODE = [pytest.param(n, m, id=f"{m.name}-{n}") for m in RENDERED for n in NAMES]
BY_VARIANT = [
    pytest.param(n, m, v, id=f"{m.name}-{v}-{n}")
    for m in MODES.values()
    for v in m.variants
    for n in NAMES
]
in_every_mode = pytest.mark.parametrize(("name", "mode"), BY_MODE)
EVALUATED = [p for p in BY_MODE if p.values[1].evaluator]  # type: ignore[union-attr]
where_rules_can_be_walked = pytest.mark.parametrize(("name", "mode"), EVALUATED)
WITHOUT_GOLDEN = {"ebpf", "iptables", "userspace"}
"""Modes whose golden files would find no mutant that flows do not (scripts/mutants.py)."""


def failures(flows: tuple[FlowCase, ...], ask: Ask) -> list[str]:
    return [wrong for flow in flows if (wrong := compare(flow, ask(flow)))]


@in_every_mode
def test_trace(name: str, mode: ModeUnderTest) -> None:
    world = case_files.world(name, mode.traits)
    plan = world.plan(mode.traits)
    assert world.flows
    assert not failures(world.flows, lambda flow: by_trace(plan, flow))


@where_rules_can_be_walked
def test_rules(name: str, mode: ModeUnderTest) -> None:
    assert mode.evaluator is not None
    world = case_files.world(name, mode.traits)
    assert not failures(world.flows, mode.evaluator(world.plan(mode.traits)))


@where_rules_can_be_walked
def test_rules_of_a_large_cluster(name: str, mode: ModeUnderTest) -> None:
    """Modes write other rules where there is much; they must mean the same."""
    assert mode.evaluator is not None
    world = case_files.world(name, mode.traits)
    plan = world.plan(mode.traits)
    settings = replace(plan.settings, split_dispatch=True, large_cluster=True)
    ask = mode.evaluator(NodePlan(settings, plan.services))
    assert not failures(world.flows, ask)


@pytest.mark.parametrize(
    ("name", "mode"),
    [p for p in BY_MODE if p.values[1].name not in WITHOUT_GOLDEN],  # type: ignore[union-attr]
)
def test_golden(name: str, mode: ModeUnderTest, update: bool) -> None:
    text = mode.golden(case_files.world(name, mode.traits).plan(mode.traits))
    path = case_files.CASES / name / f"{mode.name}.txt"
    if update:
        path.write_text(text)
    assert path.exists(), f"no {path.name}: run pytest --update and review what it writes"
    assert text == path.read_text()


@in_every_mode
def test_findings(name: str, mode: ModeUnderTest) -> None:
    findings = [str(f) for f in case_files.world(name, mode.traits).plan(mode.traits).findings]
    words: list[str] = [*case_files.read(name).get("findings", [])]
    if not mode.traits.forwards_sctp and "sctp" in name:
        words.append("SCTP cannot be forwarded")
    if mode.traits.assigns_vips and name == "external-ip-of-this-node":
        words.append("is an address of this node")
    for word in words:
        assert any(word in finding for finding in findings), f"{word} is in none of {findings}"
    for finding in findings:
        assert any(word in finding for word in words), f"not expected: {finding}"


@pytest.fixture(scope="module")
def pool() -> Iterator[LabPool]:
    pool = LabPool()
    with patient_dials():
        yield pool
    pool.close()


@pytest.mark.kernel
@pytest.mark.parametrize(("name", "mode", "variant"), BY_VARIANT)
def test_packets(name: str, mode: ModeUnderTest, variant: str, pool: LabPool) -> None:
    world = case_files.world(name, mode.traits)
    lab, plan = pool.lab(world, mode.name + variant), world.plan(mode.traits)
    program(lab, plan, mode, variant)
    flows = tuple(answered(plan, world.flows))
    assert flows
    assert not failures(flows, lambda flow: by_packets(lab, flow))


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("mode", "variant"),
    [pytest.param(m, v, id=f"{m.name}-{v}") for m in MODES.values() for v in m.variants],
)
def test_endpoints_are_equally_likely(mode: ModeUnderTest, variant: str, pool: LabPool) -> None:
    world = case_files.world("many-endpoints", mode.traits)
    lab = pool.lab(world, mode.name + variant)
    program(lab, world.plan(mode.traits), mode, variant)
    (flow,) = world.flows
    seen = Counter(
        lab.probe(flow.source, flow.address, flow.port).endpoint for _ in range(100 * 12)
    )
    assert seen.keys() == flow.endpoints
    assert all(50 < count < 150 for count in seen.values()), seen  # more than five sigma


TWO = frozenset({("10.0.0.1:80", False), ("10.0.0.2:80", True)})


@pytest.mark.parametrize(
    ("given", "right"),
    [
        (Answer("forward", TWO), True),
        (Answer("forward", frozenset({("10.0.0.1:80", False), ("10.0.0.2:80", False)})), False),
        (Answer("forward", frozenset({("10.0.0.1:80", False)})), False),
        (Answer("forward", TWO | {("10.0.0.3:80", False)}), False),
        (Answer("forward", TWO, "seen from 9.9.9.9"), False),
        (Answer("drop"), False),
        (Answer("untouched"), False),
    ],
)
def test_only_the_same_answer_will_do(given: Answer, right: bool) -> None:
    endpoints = frozenset({"10.0.0.1:80", "10.0.0.2:80"})
    flow = FlowCase("a hairpin", "10.0.0.2", "10.96.0.1", 80, "TCP", "forward", endpoints)
    assert (compare(flow, given) == "") is right


def test_a_case_that_says_something_unknown_is_refused(monkeypatch: Any, tmp_path: Any) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/case.yaml").write_text("flows: []\nflow: []\n")
    monkeypatch.setattr(case_files, "CASES", tmp_path)
    with pytest.raises(AssertionError, match="mean nothing"):
        case_files.read("odd")
