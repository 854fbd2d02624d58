"""Explain one connection or one Service, for `steersman explain`: as text and as data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from steersman.compile.conflicts import describe
from steersman.compile.endpoints import EndpointState, Topology, allowed, read_endpoints, topology
from steersman.compile.node import zone_of
from steersman.compile.service import PortSpec, service_ports
from steersman.compile.trace import Flow, trace
from steersman.model.inputs import Snapshot
from steersman.model.kube import EndpointSlice, Service
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import (
    FrontendKind,
    NodePlan,
    NodeSettings,
    ServicePlan,
    SourceClass,
    Value,
    Verdict,
)

_OUTCOMES = {
    "drop": "dropped (the client waits until it times out)",
    "reject": "rejected (the client gets an error at once)",
    "accept": "not touched",
}


class Explanation(Value, frozen=True):
    """An answer in both forms."""

    text: str
    """Lines for people, without a newline at the end."""
    data: dict[str, Any]
    """The same as JSON types."""
    found: bool = True
    """Whether the object in question exists."""


def explain_flow(plan: NodePlan, flow: Flow) -> Explanation:
    """Explain what happens to a connection, rule by rule."""
    decision = trace(plan, flow)
    endpoints = [str(endpoint) for endpoint in decision.endpoints]
    if decision.verdict == "forward":
        masqueraded = "masqueraded" if decision.masquerade else "not masqueraded"
        outcome = f"forwarded to {' or '.join(endpoints)}, {masqueraded}"
    else:
        outcome = _OUTCOMES[decision.verdict]
    lines = [f"{flow}: {outcome}"]
    lines += [f"  {number}. {reason}" for number, reason in enumerate(decision.reasons, 1)]
    data = {
        "source": str(flow.source),
        "destination": flow.destination,
        "port": flow.port,
        "protocol": flow.protocol.value,
        "verdict": decision.verdict,
        "endpoints": endpoints,
        "masquerade": decision.masquerade,
        "service": str(decision.plan.name) if decision.plan else None,
        "frontend": decision.frontend.kind.value if decision.frontend else None,
        "reasons": list(decision.reasons),
    }
    return Explanation("\n".join(lines), data)


def explain_service(snapshot: Snapshot, plan: NodePlan, name: ObjectName) -> Explanation:
    """Explain where a Service is served on this node, and why its endpoints are in or out."""
    service, slices = snapshot.services.get(name), snapshot.slices.get(name, {})
    # The Service's Findings are those about itself and its EndpointSlices.
    mine = {f"Service {name}"} | {f"EndpointSlice {name.namespace}/{slice_}" for slice_ in slices}
    findings = [finding for finding in plan.findings if finding.object in mine]
    plans = {key: p for key, p in plan.services.items() if key.name.object_name == name}
    lines, ports = [f"Service {name}"], []
    for key, service_plan in plans.items():
        why: tuple[str, ...] = ()
        if service is not None:  # otherwise the snapshot, a live view, is ahead of the plan
            zone = zone_of(snapshot.node)
            why = why_endpoints(service, slices.values(), plan.settings, zone, key)
        more, data = _explain_port(service_plan, why)
        lines += more
        ports.append(data)
    if not plans and service is None:
        lines.append("  is not known: check namespace and name (headless Services are not kept)")
    elif not plans:
        lines.append(
            "  is not served here: it has no port, or no clusterIP in a family of this node"
        )
    lines += [f"  {finding.severity.value}: {finding}" for finding in findings]
    data = {"service": str(name), "ports": ports, "findings": [str(f) for f in findings]}
    return Explanation("\n".join(lines), data, bool(plans or service))


def _explain_port(plan: ServicePlan, why: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the lines and the data of one ServicePort."""
    name, family = plan.key.name, plan.key.family.kubernetes
    lines = [f"  port {name.port!r} {name.protocol} {family}"]
    frontends: list[dict[str, Any]] = []
    for frontend in plan.frontends:
        kind = "" if frontend.kind is FrontendKind.NODE_PORT else f"{frontend.kind.value} "
        lines.append(f"    {kind}{describe(plan.key, frontend)}")
        if frontend.source_ranges:
            ranges = ", ".join(frontend.source_ranges)
            lines.append(f"      only for clients in {ranges}, others are dropped")
        # The Actions: one line if all classes of clients are treated alike.
        words: dict[str, str] = {}
        actions: dict[str, dict[str, Any]] = {}
        for source in SourceClass:
            action = frontend.action(source)
            words[source.value] = action.verdict.value
            actions[source.value] = {"verdict": action.verdict.value}
            if action.verdict is Verdict.FORWARD:
                endpoints = [str(endpoint) for endpoint in plan.pool(action.pool)]
                masqueraded = ", masqueraded" if action.masquerade else ""
                words[source.value] = f"to {' or '.join(endpoints)}{masqueraded}"
                more = {"endpoints": endpoints, "masquerade": action.masquerade}
                actions[source.value] |= more
        if frontend.pod == frontend.node == frontend.external:
            lines.append(f"      everyone: {words['external']}")
        else:
            lines += [f"      from {source}: {what}" for source, what in words.items()]
        frontends.append(
            {
                "kind": frontend.kind.value,
                "address": frontend.address,
                "port": frontend.port,
                "sourceRanges": list(frontend.source_ranges),
                "actions": actions,
            }
        )
    if plan.affinity_seconds:
        lines.append(f"    session affinity by client address, {plan.affinity_seconds} s")
    if plan.health_check_node_port:
        lines.append(f"    health check node port {plan.health_check_node_port}")
    lines += ["    endpoints:", *(f"      {line}" for line in why)]
    return lines, {
        "port": name.port,
        "protocol": name.protocol.value,
        "family": family,
        "frontends": frontends,
        "affinitySeconds": plan.affinity_seconds,
        "healthCheckNodePort": plan.health_check_node_port,
        "endpoints": list(why),
    }


# Why each endpoint is used or not (behaviour 4, 5): the decisions of `compile.endpoints` in words


def why_endpoints(
    service: Service,
    slices: Iterable[EndpointSlice],
    settings: NodeSettings,
    zone: str,
    port: PlanKey,
) -> tuple[str, ...]:
    """List every endpoint of one ServicePort in one family, in or out, with the reason.

    The first line tells whether hints count on this node, if there are any.
    """
    spec = service_ports(service, port.family).get(port.name)
    if spec is None:
        return (f"{port} is not served: see the Findings on Service {port.name.object_name}",)
    slices = tuple(slices)
    wanted = port.name.port, port.name.protocol
    found, findings = read_endpoints(slices, port.family, settings.node_name, {wanted})
    states = found.get(wanted, ())
    # Without endpoints, tell what is missing: the slices, the port or the family.
    lines: list[str] = []
    if states:
        ready = [state for state in states if state.ready]
        mode = topology(ready, settings.node_name, zone)
        if spec.uses_cluster and any(s.zone_hints or s.node_hints for s in ready):
            unhinted = [str(state.endpoint) for state in ready if not state.zone_hints]
            if mode is Topology.SAME_NODE:
                why = f"node hints count: only endpoints meant for node {settings.node_name} are"
                lines.append(f"{why} used")
            elif mode is Topology.SAME_ZONE:
                lines.append(f"zone hints count: only endpoints meant for zone {zone} are used")
            elif unhinted:
                why = f"{', '.join(unhinted)} has none, and all ready endpoints must"
                lines.append(f"hints are ignored: {why}")
            elif not zone:
                why = "this node has no zone label (topology.kubernetes.io/zone)"
                lines.append(f"hints are ignored: {why}")
            else:
                why = f"no ready endpoint is meant for this node's zone {zone}"
                lines.append(f"hints are ignored: {why}")
        for state in states:
            hinted = allowed(state, mode, settings.node_name, zone)
            why = _why_endpoint(state, ready, spec, None if hinted else mode)
            lines.append(f"{state.endpoint}: {why}")
    elif not slices:
        lines.append("no EndpointSlice belongs to the Service: does its selector match any pod?")
    else:
        have = {entry.name or "" for slice_ in slices for entry in slice_.ports or ()}
        names = ", ".join(sorted(repr(name) for name in have)) or "none"
        what = f"has an {port.family.kubernetes} endpoint for {port.name.protocol}"
        if port.name.port not in have:
            what = f"has a port named {port.name.port!r} (there are: {names})"
        lines.append(f"no EndpointSlice {what}")
    return (*lines, *map(str, findings))


def _why_endpoint(
    state: EndpointState,
    ready: Sequence[EndpointState],
    spec: PortSpec,
    excluded: Topology | None,
) -> str:
    """Tell in which lists an endpoint is; `excluded` names the hints that leave it out."""
    words = []
    if spec.uses_cluster:
        prefix = "" if not spec.uses_local else "for policy Cluster "
        if not state.ready:
            why = _why_not_ready(state, bool(ready))
        elif excluded is None:
            why = "in: ready"
        else:
            by_node = excluded is Topology.SAME_NODE
            hints = ", ".join(state.node_hints if by_node else state.zone_hints)
            why = f"out: ready, but meant for {'node' if by_node else 'zone'} {hints}"
        words.append(prefix + why)
    if spec.uses_local:
        if not state.endpoint.local:
            why = "out: on another node"
        elif state.ready:
            why = "in: ready, on this node"
        else:
            why = _why_not_ready(state, any(other.endpoint.local for other in ready))
        words.append(f"for policy Local {why}")
    return "; ".join(words)


def _why_not_ready(state: EndpointState, others_ready: bool) -> str:
    if not state.draining:
        return "out: not ready" + (", terminating" if state.terminating else "")
    if others_ready:
        return "out: terminating, and others are ready"
    return "in: terminating, but it still serves and nothing is ready"
