"""Tell why each endpoint of a ServicePort is used on this node or not (behaviour 4, 5).

`compile.endpoints` decides; this module puts the same decisions into words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from steersman.compile.endpoints import (
    EndpointsByPort,
    EndpointState,
    Topology,
    allowed,
    read_endpoints,
    topology,
    with_ejections,
)
from steersman.compile.service import PortSpec, PortSpecs, service_ports
from steersman.model.failover import Ejection
from steersman.model.findings import Finding
from steersman.model.kube import EndpointSlice, Service
from steersman.model.names import Family, PlanKey
from steersman.model.plan import Endpoint, NodeSettings, Value

_NAMES = 10
"""Names of ports that a sentence lists."""


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

    @property
    def ready(self) -> tuple[EndpointReason, ...]:
        """The endpoints that are ready."""
        return tuple(each for each in self.endpoints if each.ready)

    @property
    def lines(self) -> tuple[str, ...]:
        """The report for people."""
        endpoints = (f"{each.endpoint}: {each.why}" for each in self.endpoints)
        return (*self.notes, *endpoints, *map(str, self.findings))


class ServiceReports:
    """The reports on the ports of one Service, up to 10,000; what they share is read once."""

    def __init__(
        self,
        service: Service,
        slices: Iterable[EndpointSlice],
        settings: NodeSettings,
        zone: str,
        *,
        ejections: tuple[Ejection, ...] = (),
    ) -> None:
        """Report nothing yet; `ejections` are endpoints of the Service that do not answer."""
        self.slices = tuple(slices)
        self._service = service
        self._settings = settings
        self._zone = zone
        self._ejections = ejections
        self._names: set[str] | None = None
        """Names of the ports of all slices."""
        self._listed = ""
        """Some of them, as text."""
        self._read: dict[Family, tuple[PortSpecs, EndpointsByPort, tuple[Finding, ...]]] = {}

    def of(self, port: PlanKey) -> EndpointReport:
        """List every endpoint of one ServicePort in one family, in or out, with the reason."""
        node_name, zone = self._settings.node_name, self._zone
        if port.family not in self._read:
            specs = service_ports(self._service, port.family)
            names = {(name.port, name.protocol) for name in specs}
            found, findings = read_endpoints(self.slices, port.family, node_name, names)
            self._read[port.family] = specs, found, findings
        specs, found, findings = self._read[port.family]
        spec = specs.get(port.name)
        if spec is None:
            about = f"see the Findings on Service {port.name.object_name}"
            return EndpointReport((f"{port} is not served: {about}",))
        listed = found.get((port.name.port, port.name.protocol), ())
        states = with_ejections(listed, port.name.protocol, self._ejections)
        if not states:
            return EndpointReport((self._what_is_missing(port),), (), findings)
        ready = [state for state in states if state.ready]
        mode = topology(ready, node_name, zone)
        lines: tuple[str, ...] = ()
        if spec.uses_cluster and any(s.zone_hints or s.node_hints for s in ready):
            lines = (_about_hints(ready, mode, node_name, zone),)
        reasons: list[EndpointReason] = []
        for state in states:
            hinted = allowed(state, mode, node_name, zone)
            used, why = _why_endpoint(state, ready, spec, None if hinted else mode)
            reasons.append(EndpointReason(state.endpoint, used, why, state.ready))
        return EndpointReport(lines, tuple(reasons), findings)

    def _what_is_missing(self, port: PlanKey) -> str:
        """Tell why a port has no endpoints: for lack of slices, of the port or of the family."""
        if not self.slices and self._service.spec.selector is None:
            return (
                "no EndpointSlice belongs to the Service, and it has no selector: somebody must"
                " write its EndpointSlices"
            )
        if not self.slices:
            return "no EndpointSlice belongs to the Service: does its selector match any pod?"
        if self._names is None:
            self._names = {each.name or "" for slice_ in self.slices for each in slice_.ports or ()}
            some = ", ".join(map(repr, sorted(self._names)[:_NAMES])) or "none"
            others = len(self._names) - _NAMES
            self._listed = f"{some} and {others} more" if others > 0 else some
        if port.name.port in self._names:
            family = port.family.kubernetes
            return f"no EndpointSlice has an {family} endpoint for {port.name.protocol}"
        return f"no EndpointSlice has a port named {port.name.port!r} (there are: {self._listed})"


def _about_hints(ready: Sequence[EndpointState], mode: Topology, node_name: str, zone: str) -> str:
    """Tell whether the hints of ready endpoints count on this node."""
    unhinted = [str(state.endpoint) for state in ready if not state.zone_hints]
    if mode is Topology.SAME_NODE:
        return f"node hints count: only endpoints meant for node {node_name} are used"
    if mode is Topology.SAME_ZONE:
        return f"zone hints count: only endpoints meant for zone {zone} are used"
    if unhinted and all(state.node_hints for state in ready):
        why = f"no ready endpoint is meant for node {node_name}"
    elif unhinted:
        others = len(unhinted) - _NAMES
        some = ", ".join(unhinted[:_NAMES]) + (f" and {others} more" if others > 0 else "")
        why = f"{some}: without a hint of a zone, and all ready endpoints must have one"
    elif not zone:
        why = "this node has no zone label (topology.kubernetes.io/zone)"
    else:
        why = f"no ready endpoint is meant for this node's zone {zone}"
    return f"hints are ignored: {why}"


def _why_endpoint(
    state: EndpointState, ready: Sequence[EndpointState], spec: PortSpec, excluded: Topology | None
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
            others_here = any(other.endpoint.local for other in ready)
            why = _why_not_ready(state, others_here, " on this node")
        words.append(f"for policy Local {why}")
        used |= why.startswith("in: ")
    return used, "; ".join(words)


def _why_not_ready(state: EndpointState, others_ready: bool, where: str = "") -> str:
    if state.ejection is not None:
        return f"out: ejected: {state.ejection.why}"
    if not state.draining:
        return "out: not ready" + (", terminating" if state.terminating else "")
    if others_ready:
        return f"out: terminating, and others{where} are ready"
    return f"in: terminating, but it still serves and nothing{where} is ready"
