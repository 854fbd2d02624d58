"""Packet flow cases checked by `trace`: compile the case's world, then trace each flow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from steersman.compile.planner import compile_all
from steersman.compile.trace import Flow, TraceResult, trace
from steersman.model.names import Protocol
from steersman.model.plan import NodePlan
from tests.conformance.world import TRAITS, Case, world

VERDICTS = {"dnat": "forward", "drop": "drop", "reject": "reject", "accept": "accept"}


def trace_flow_case(case: Case, mode: str = "") -> None:
    """Check every flow of a case.

    Args:
        case: a case of a packet flow file.
        mode: whose traits count; "" for the case's own mode (`any`: nftables').

    Raises:
        AssertionError: some flow is decided otherwise; the message names each.
    """
    failures = list(failed_flows(case, mode))
    assert not failures, "\n".join(failures)


def failed_flows(case: Case, mode: str = "") -> Iterator[str]:
    """Yield a line for each flow that is not decided as the case says."""
    plan = case_plan(case, mode)
    for flow in case["flows"]:
        decision = trace(plan, case_flow(flow))
        if seen(decision, flow["expect"]) != wanted(flow["expect"]):
            why = "; ".join(decision.reasons)
            yield f"{case['id']} {flow['name']}: {seen(decision, flow['expect'])} ({why})"


def case_plan(case: Case, mode: str = "") -> NodePlan:
    """Compile a case's world."""
    name = mode or (case["mode"] if case["mode"] in TRAITS else "nftables")
    return compile_all(*world(case), TRAITS[name])


def case_flow(flow: dict[str, Any]) -> Flow:
    """Return a case's flow as ours."""
    protocol = Protocol(flow["protocol"])
    return Flow(flow["sourceIP"], flow["destIP"], flow["destPort"], protocol)


def wanted(expect: dict[str, Any]) -> tuple[str, set[str], bool]:
    """Return the part of an expectation that is compared."""
    verdict = VERDICTS.get(expect["kind"], "accept")
    return verdict, set(expect["endpoints"]), bool(expect["masq"]) and verdict == "forward"


def seen(decision: TraceResult, expect: dict[str, Any]) -> tuple[str, set[str], bool]:
    """Return the same of a TraceResult; where several endpoints may be a hairpin, per endpoint."""
    endpoints = {str(endpoint) for endpoint in decision.endpoints}
    return decision.verdict, endpoints, decision.masquerade
