"""A Context for the checks of doctor: a World of a few objects, and a fake machine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steersman.host.link_state import Link
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.kube import EndpointSlice, Node, Service
from steersman.model.names import ObjectName
from steersman.model.plan import Traits
from steersman.model.world import Origin, World
from steersman.operate.doctor import CHECKS
from steersman.operate.doctor.check import Check, Diagnosis, diagnose
from steersman.operate.doctor.context import Context, Question
from steersman.operate.doctor.result import CheckResult, Verdict
from steersman.operate.trace_loss import Hop
from tests.support.builders import objects
from tests.support.builders.objects import plan_of, snapshot
from tests.support.modes.scripted import Scripted

CART = ObjectName("shop", "cart")


class FakeNetwork:
    """Interfaces and ways to addresses that a test names; other addresses have no route."""

    def __init__(self, *links: Link, ways: Mapping[str, Hop] | None = None) -> None:
        self._links = {link.name: link for link in links}
        self._ways = ways or {}

    def links(self) -> Mapping[str, Link]:
        return self._links

    def hop(self, address: str) -> Hop:
        return self._ways.get(address, Hop(trouble="Network is unreachable"))


NOON = 1_700_000_000.0


def world_of(
    *things: Service | EndpointSlice | Node,
    config: NodeConfig = objects.CONFIG,
    facts: HostFacts = objects.FACTS,
    traits: Traits = objects.NFTABLES,
    **more: Any,
) -> World:
    """A World of these objects; further arguments are its fields."""
    plan = plan_of(*things, config=config, traits=traits)
    fields: dict[str, Any] = {
        "origin": Origin("manifests", "test manifests"),
        "snapshot": snapshot(*things),
        "plan": plan,
        "findings": plan.findings,
        "mode": "memory",
        "config": config,
        "facts": facts,
    }
    return World(**(fields | more))


def context_of(
    *things: Service | EndpointSlice | Node,
    root: Path | None = None,
    files: Mapping[str, str] | None = None,
    programs: Scripted | None = None,
    question: Question | None = None,
    world: Mapping[str, Any] | None = None,
    network: FakeNetwork | None = None,
    **more: Any,
) -> Context:
    """A Context.

    Args:
        things: the objects of its World.
        root: directory of the machine's file system.
        files: what it has there, by path.
        programs: what programs answer; by default none is installed.
        question: of the user; by default about shop/cart if there is a Service.
        world: further arguments of `world_of`.
        network: interfaces and routes; without any by default.
        more: further arguments of `Context`.
    """
    for name, text in (files or {}).items():
        assert root is not None
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    if question is None:
        question = Question(CART if any(isinstance(t, Service) for t in things) else None)
    network = network or FakeNetwork()
    fields: dict[str, Any] = {
        "now": lambda: NOON,
        "list_links": network.links,
        "look_up": network.hop,
        "list_tables": list[tuple[str, str]],
    }
    return Context(
        world_of(*things, **(world or {})),
        question,
        execute=programs or Scripted(),
        root=root or Path("/nowhere"),
        **(fields | more),
    )


def named(*names: str) -> tuple[Check, ...]:
    """The checks of these names."""
    known = {check.name: check for check in CHECKS}
    return tuple(known[name] for name in names)


def results(check: Check, context: Context) -> tuple[CheckResult, ...]:
    """Run one check, as doctor does."""
    return asyncio.run(diagnose(context, [check])).results


def only(check: Check, context: Context) -> CheckResult:
    """The one result of a check."""
    (result,) = results(check, context)
    return result


def verdicts(check: Check, context: Context) -> list[Verdict]:
    """The verdicts of all results of a check, worst first."""
    return [result.verdict for result in results(check, context)]


def run_checks(context: Context, *checks: Check) -> Diagnosis:
    """Run several checks."""
    return asyncio.run(diagnose(context, checks))
