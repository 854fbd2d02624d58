"""Tell why each endpoint of a ServicePort is used on this node or not (behaviour 4, 5).

`compile.endpoints` decides; this module puts the same decisions into words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from steersman.compile.endpoints import (
    EndpointState,
    Topology,
    allowed,
    read_endpoints,
    topology,
    with_ejections,
)
from steersman.compile.service import PortSpec, service_ports
from steersman.model.failover import Ejection
from steersman.model.findings import Finding
from steersman.model.kube import EndpointSlice, Service
from steersman.model.names import PlanKey
from steersman.model.plan import Endpoint, NodeSettings, Value


class EndpointReason(Value, frozen=True):
    """One endpoint, and the reason why traffic goes there or not."""

    endpoint: Endpoint
    used: bool
    """Whether some traffic on this node may go there."""
    why: str
    """`in: ready`, `out: not ready`; by traffic policy if the Service needs both lists."""
    ready: bool


class EndpointReport(Value, frozen=True):
    """All endpoints of one ServicePort in one family."""

    notes: tuple[str, ...] = ()
    """Whether hints count on this node, if there are any; without endpoints, the missing part."""
    endpoints: tuple[EndpointReason, ...] = ()
    findings: tuple[Finding, ...] = ()
    """The problems of the EndpointSlices."""


def why_endpoints(
    service: Service,
    slices: Iterable[EndpointSlice],
    settings: NodeSettings,
    zone: str,
    port: PlanKey,
    *,
    ejections: tuple[Ejection, ...] = (),
) -> tuple[str, ...]:
    """Return the lines of `endpoint_report`."""
    report = endpoint_report(service, slices, settings, zone, port, ejections=ejections)
    lines = (f"{each.endpoint}: {each.why}" for each in report.endpoints)
    return (*report.notes, *lines, *map(str, report.findings))


def endpoint_report(
    service: Service,
    slices: Iterable[EndpointSlice],
    settings: NodeSettings,
    zone: str,
    port: PlanKey,
    *,
    ejections: tuple[Ejection, ...] = (),
) -> EndpointReport:
    """List every endpoint of one ServicePort in one family, in or out, with the reason.

    Args:
        service: the Service.
        slices: its EndpointSlices.
        settings: of this node.
        zone: of this node; "" if it has none.
        port: the ServicePort and the family.
        ejections: endpoints of the Service that do not answer.
    """
    spec = service_ports(service, port.family).get(port.name)
    if spec is None:
        about = f"see the Findings on Service {port.name.object_name}"
        return EndpointReport((f"{port} is not served: {about}",))
    slices = tuple(slices)
    wanted = port.name.port, port.name.protocol
    found, findings = read_endpoints(slices, port.family, settings.node_name, {wanted})
    states = with_ejections(found.get(wanted, ()), port.name.protocol, ejections)
    # Without endpoints, tell the missing part: slices, port or family.
    lines: list[str] = []
    reasons: list[EndpointReason] = []
    if states:
        ready = [state for state in states if state.ready]
        mode = topology(ready, settings.node_name, zone)
        if spec.uses_cluster and any(s.zone_hints or s.node_hints for s in ready):
            lines.append(_about_hints(ready, mode, settings.node_name, zone))
        for state in states:
            hinted = allowed(state, mode, settings.node_name, zone)
            used, why = _why_endpoint(state, ready, spec, None if hinted else mode)
            reasons.append(EndpointReason(state.endpoint, used, why, state.ready))
    elif not slices and service.spec.selector is None:
        lines.append(
            "no EndpointSlice belongs to the Service, and it has no selector: somebody must write"
            " its EndpointSlices"
        )
    elif not slices:
        lines.append("no EndpointSlice belongs to the Service: does its selector match any pod?")
    else:
        have = {entry.name or "" for slice_ in slices for entry in slice_.ports or ()}
        names = ", ".join(sorted(repr(name) for name in have)) or "none"
        what = f"has an {port.family.kubernetes} endpoint for {port.name.protocol}"
        if port.name.port not in have:
            what = f"has a port named {port.name.port!r} (there are: {names})"
        lines.append(f"no EndpointSlice {what}")
    return EndpointReport(tuple(lines), tuple(reasons), findings)


def _about_hints(ready: Sequence[EndpointState], mode: Topology, node_name: str, zone: str) -> str:
    """Tell whether the hints of ready endpoints count on this node."""
    unhinted = [str(state.endpoint) for state in ready if not state.zone_hints]
    if mode is Topology.SAME_NODE:
        return f"node hints count: only endpoints meant for node {node_name} are used"
    if mode is Topology.SAME_ZONE:
        return f"zone hints count: only endpoints meant for zone {zone} are used"
    if unhinted:
        why = f"{', '.join(unhinted)} has none, and all ready endpoints must"
    elif not zone:
        why = "this node has no zone label (topology.kubernetes.io/zone)"
    else:
        why = f"no ready endpoint is meant for this node's zone {zone}"
    return f"hints are ignored: {why}"


def _why_endpoint(
    state: EndpointState,
    ready: Sequence[EndpointState],
    spec: PortSpec,
    excluded: Topology | None,
) -> tuple[bool, str]:
    """Tell whether an endpoint is used, and in which lists it is.

    `excluded` names the hints that leave it out of the list for policy Cluster.
    """
    words: list[str] = []
    used = False
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
        used = why.startswith("in: ")
    if spec.uses_local:
        if not state.endpoint.local:
            why = "out: on another node"
        elif state.ready:
            why = "in: ready, on this node"
        else:
            why = _why_not_ready(state, any(other.endpoint.local for other in ready))
        words.append(f"for policy Local {why}")
        used |= why.startswith("in: ")
    return used, "; ".join(words)


def _why_not_ready(state: EndpointState, others_ready: bool) -> str:
    if state.ejection is not None:
        return f"out: ejected: {state.ejection.why}"
    if not state.draining:
        return "out: not ready" + (", terminating" if state.terminating else "")
    if others_ready:
        return "out: terminating, and others are ready"
    return "in: terminating, but it still serves and nothing is ready"
