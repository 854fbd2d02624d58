"""Why each endpoint of a Service is used on this node or not, in plain words (behaviour 4, 5).

Tells what `compile.endpoints` decided, from the objects themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from steersman.compile.endpoints import EndpointState, Topology, allowed, read_endpoints, topology
from steersman.compile.service import PortSpec, service_ports
from steersman.model.kube import EndpointSlice, Service
from steersman.model.names import PlanKey
from steersman.model.plan import NodeSettings


def why_endpoints(
    service: Service,
    slices: Iterable[EndpointSlice],
    settings: NodeSettings,
    zone: str,
    port: PlanKey,
) -> tuple[str, ...]:
    """List every endpoint of one port of a Service in one family, in or out, with the reason.

    First what holds for all of them: whether hints count on this node, and why not.
    """
    spec = service_ports(service, port.family).get(port.name)
    if spec is None:
        return (f"{port} is not served: see the Findings on Service {port.name.object_name}",)
    slices = tuple(slices)
    found, findings = read_endpoints(
        slices, port.family, settings.node_name, {(port.name.port, port.name.protocol)}
    )
    states = found.get((port.name.port, port.name.protocol), ())
    if not states:
        return (_nothing(slices, port), *map(str, findings))
    ready = [state for state in states if state.ready]
    lines = list(_hints(ready, spec, settings.node_name, zone))
    for state in states:
        lines.append(f"{state.endpoint}: {_why(state, ready, spec, settings.node_name, zone)}")
    return (*lines, *map(str, findings))


def _nothing(slices: Sequence[EndpointSlice], port: PlanKey) -> str:
    if not slices:
        return "no EndpointSlice belongs to the Service: does its selector match any pod?"
    have = {entry.name or "" for slice_ in slices for entry in slice_.ports or ()}
    if port.name.port not in have:
        names = ", ".join(sorted(repr(name) for name in have)) or "none"
        return f"no EndpointSlice has a port named {port.name.port!r} (there are: {names})"
    return f"no EndpointSlice has an {port.family.kubernetes} endpoint for {port.name.protocol}"


def _hints(
    ready: Sequence[EndpointState], spec: PortSpec, node_name: str, zone: str
) -> Iterable[str]:
    if not spec.uses_cluster or not any(s.zone_hints or s.node_hints for s in ready):
        return
    match topology(ready, node_name, zone):
        case Topology.SAME_NODE:
            yield f"node hints count: only endpoints meant for node {node_name} are used"
        case Topology.SAME_ZONE:
            yield f"zone hints count: only endpoints meant for zone {zone} are used"
        case _:
            yield f"hints are ignored: {_ignored(ready, zone)}"


def _ignored(ready: Sequence[EndpointState], zone: str) -> str:
    unhinted = [str(s.endpoint) for s in ready if not s.zone_hints]
    if unhinted:
        return f"{', '.join(unhinted)} has none, and all ready endpoints must"
    if not zone:
        return "this node has no zone label (topology.kubernetes.io/zone)"
    return f"no ready endpoint is meant for this node's zone {zone}"


def _why(
    state: EndpointState, ready: Sequence[EndpointState], spec: PortSpec, node: str, zone: str
) -> str:
    """Tell of one endpoint where it is used."""
    words = []
    if spec.uses_cluster:
        prefix = "" if not spec.uses_local else "for policy Cluster "
        words.append(prefix + _in_cluster(state, ready, node, zone))
    if spec.uses_local:
        words.append(f"for policy Local {_in_local(state, ready)}")
    return "; ".join(words)


def _in_cluster(state: EndpointState, ready: Sequence[EndpointState], node: str, zone: str) -> str:
    if not state.ready:
        return _not_ready(state, ready)
    mode = topology(ready, node, zone)
    if allowed(state, mode, node, zone):
        return "in: ready"
    hints = state.node_hints if mode is Topology.SAME_NODE else state.zone_hints
    what = "node" if mode is Topology.SAME_NODE else "zone"
    return f"out: ready, but meant for {what} {', '.join(hints)}"


def _in_local(state: EndpointState, ready: Sequence[EndpointState]) -> str:
    if not state.endpoint.local:
        return "out: on another node"
    if state.ready:
        return "in: ready, on this node"
    return _not_ready(state, [other for other in ready if other.endpoint.local])


def _not_ready(state: EndpointState, ready: Sequence[EndpointState]) -> str:
    if not state.draining:
        return "out: not ready" + (", terminating" if state.terminating else "")
    if ready:
        return "out: terminating, and others are ready"
    return "in: terminating, but it still serves and nothing is ready"
