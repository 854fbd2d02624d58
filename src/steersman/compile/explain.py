"""What `steersman explain` says: of one connection, and of one Service; as text and as data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from steersman.compile.claims import describe
from steersman.compile.node import zone_of
from steersman.compile.reasons import why_endpoints
from steersman.compile.trace import Decision, Flow, trace
from steersman.model.findings import Finding
from steersman.model.inputs import Snapshot
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import (
    Action,
    Frontend,
    FrontendKind,
    NodePlan,
    ServicePlan,
    SourceClass,
    Value,
    Verdict,
)


class Explanation(Value, frozen=True):
    """An answer in both forms."""

    text: str
    """For people; lines, without a newline at the end."""
    data: dict[str, Any]
    """The same, of JSON's types only."""
    found: bool = True
    """Whether there is what was asked about."""


def explain_flow(plan: NodePlan, flow: Flow) -> Explanation:
    """Say what happens to a connection, and why, rule by rule."""
    decision = trace(plan, flow)
    lines = [f"{flow}: {_outcome(decision)}"]
    lines += [f"  {number}. {reason}" for number, reason in enumerate(decision.reasons, 1)]
    return Explanation("\n".join(lines), _flow_data(flow, decision))


def _outcome(decision: Decision) -> str:
    if decision.verdict != "forward":
        return _OUTCOMES[decision.verdict]
    masqueraded = "masqueraded" if decision.masquerade else "not masqueraded"
    return f"forwarded to {_list(map(str, decision.endpoints))}, {masqueraded}"


_OUTCOMES = {
    "drop": "dropped (the client waits until it times out)",
    "reject": "rejected (the client gets an error at once)",
    "accept": "not touched",
}


def _list(words: Iterable[str]) -> str:
    return " or ".join(words)


def _flow_data(flow: Flow, decision: Decision) -> dict[str, Any]:
    return {
        "source": str(flow.source),
        "destination": flow.destination,
        "port": flow.port,
        "protocol": flow.protocol.value,
        "verdict": decision.verdict,
        "endpoints": [str(endpoint) for endpoint in decision.endpoints],
        "masquerade": decision.masquerade,
        "service": str(decision.plan.name) if decision.plan else None,
        "frontend": decision.frontend.kind.value if decision.frontend else None,
        "reasons": list(decision.reasons),
    }


def explain_service(snapshot: Snapshot, plan: NodePlan, name: ObjectName) -> Explanation:
    """Say at which destinations a Service is served here, and why its endpoints are in or out."""
    plans = {key: p for key, p in plan.services.items() if key.name.object_name == name}
    findings = [f for f in plan.findings if _concerns(f, name, snapshot)]
    whys = {key: _why(snapshot, plan, name, key) for key in plans}
    lines = [f"Service {name}"]
    for key, service_plan in plans.items():
        lines += _port_lines(service_plan, whys[key])
    if not plans:
        lines.append(f"  {_absent(snapshot, name)}")
    lines += [f"  {finding.severity.value}: {finding}" for finding in findings]
    ports = [_port_data(service_plan, whys[key]) for key, service_plan in plans.items()]
    data = {"service": str(name), "ports": ports, "findings": [str(f) for f in findings]}
    return Explanation("\n".join(lines), data, bool(plans or name in snapshot.services))


def _concerns(finding: Finding, name: ObjectName, snapshot: Snapshot) -> bool:
    slices = snapshot.slices.get(name, {})
    mine = {f"Service {name}"} | {f"EndpointSlice {name.namespace}/{slice_}" for slice_ in slices}
    return finding.object in mine


def _absent(snapshot: Snapshot, name: ObjectName) -> str:
    service = snapshot.services.get(name)
    if service is None:
        return "is not known: check namespace and name (headless Services are not kept)"
    return "is not served here: it has no port, or no clusterIP in a family of this node"


def _why(snapshot: Snapshot, plan: NodePlan, name: ObjectName, key: PlanKey) -> tuple[str, ...]:
    service = snapshot.services.get(name)
    if service is None:  # the snapshot is a live view and may be ahead of the plan
        return ()
    slices = snapshot.slices.get(name, {}).values()
    return why_endpoints(service, slices, plan.settings, zone_of(snapshot.node), key)


def _port_lines(plan: ServicePlan, why: Iterable[str]) -> list[str]:
    lines = [f"  port {plan.key.name.port!r} {plan.key.name.protocol} {plan.key.family.kubernetes}"]
    for frontend in plan.frontends:
        kind = "" if frontend.kind is FrontendKind.NODE_PORT else f"{frontend.kind.value} "
        lines.append(f"    {kind}{describe(plan.key, frontend)}")
        lines += [f"      {words}" for words in _action_lines(plan, frontend)]
    if plan.affinity_seconds:
        lines.append(f"    session affinity by client address, {plan.affinity_seconds} s")
    if plan.health_check_node_port:
        lines.append(f"    health check node port {plan.health_check_node_port}")
    lines.append("    endpoints:")
    return lines + [f"      {line}" for line in why]


def _action_lines(plan: ServicePlan, frontend: Frontend) -> list[str]:
    lines = []
    if frontend.source_ranges:
        lines.append(f"only for clients in {', '.join(frontend.source_ranges)}, others are dropped")
    if frontend.pod == frontend.node == frontend.external:
        return [*lines, f"everyone: {_action(plan, frontend.external)}"]
    return lines + [
        f"from {source.value}: {_action(plan, frontend.action(source))}" for source in SourceClass
    ]


def _action(plan: ServicePlan, action: Action) -> str:
    if action.verdict is not Verdict.FORWARD:
        return action.verdict.value
    masqueraded = ", masqueraded" if action.masquerade else ""
    return f"to {_list(map(str, plan.pool(action.pool)))}{masqueraded}"


def _port_data(plan: ServicePlan, why: Iterable[str]) -> dict[str, Any]:
    return {
        "port": plan.key.name.port,
        "protocol": plan.key.name.protocol.value,
        "family": plan.key.family.kubernetes,
        "frontends": [_frontend_data(plan, frontend) for frontend in plan.frontends],
        "affinitySeconds": plan.affinity_seconds,
        "healthCheckNodePort": plan.health_check_node_port,
        "endpoints": list(why),
    }


def _frontend_data(plan: ServicePlan, frontend: Frontend) -> dict[str, Any]:
    actions = {source.value: _action_data(plan, frontend.action(source)) for source in SourceClass}
    return {
        "kind": frontend.kind.value,
        "address": frontend.address,
        "port": frontend.port,
        "sourceRanges": list(frontend.source_ranges),
        "actions": actions,
    }


def _action_data(plan: ServicePlan, action: Action) -> dict[str, Any]:
    if action.verdict is not Verdict.FORWARD:
        return {"verdict": action.verdict.value}
    return {
        "verdict": action.verdict.value,
        "endpoints": [str(endpoint) for endpoint in plan.pool(action.pool)],
        "masquerade": action.masquerade,
    }
