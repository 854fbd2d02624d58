"""From EndpointSlices to endpoints, and from endpoints to those that traffic may go to (SPEC 4, 5).

The theory of `categorize`: a ServicePort has up to two lists. `cluster` serves every policy but
Local; hints may narrow it. `local` serves the policy Local; hints never do. Each list holds ready
endpoints, or, when it would be empty, those that are shutting down but still serve: a rolling
update with a single replica then loses no connection. The lists fall back independently.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from steersman.compile.notes import MAX_PORT, PROTOCOLS, Notes
from steersman.compile.service import PortSpec
from steersman.model.addresses import canonical_ip, family_of
from steersman.model.kube import EndpointHints, EndpointSlice, ForZone, SliceEndpoint
from steersman.model.names import Family, Protocol
from steersman.model.plan import Endpoint, Finding, Value

PortKey: TypeAlias = tuple[str, Protocol]
"""Port name and protocol: what joins a Service's port with a slice's."""


_ADDRESS_TYPES = {family: family.kubernetes for family in Family}
_NOWHERE = (
    "\0"  # a node without a name has no endpoints, and some slices do not say where theirs are
)


class EndpointState(Value, frozen=True):
    """An endpoint of a ServicePort and all that decides whether traffic goes there."""

    endpoint: Endpoint
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    zone_hints: tuple[str, ...] = ()
    """Zones that should use it; () where there is no hint."""
    node_hints: tuple[str, ...] = ()
    """Nodes that should use it, likewise."""

    @property
    def draining(self) -> bool:
        """Whether it shuts down and still serves: used only where nothing is ready."""
        return self.serving and self.terminating


EndpointsByPort: TypeAlias = dict[PortKey, tuple[EndpointState, ...]]


class Topology(enum.StrEnum):
    """How hints narrow the cluster list of a ServicePort on this node (SPEC 5)."""

    NONE = "none"
    SAME_NODE = "PreferSameNode"
    SAME_ZONE = "PreferSameZone"


class Categories(Value, frozen=True):
    """Where a ServicePort's traffic may go on this node; all lists in printed order."""

    cluster: tuple[Endpoint, ...] = ()
    """For policy Cluster; empty also where no traffic uses it."""
    local: tuple[Endpoint, ...] = ()
    """For policy Local; empty also where no traffic uses it."""
    reachable: tuple[Endpoint, ...] = ()
    """The union of both."""
    has_any: bool = False
    """Whether an endpoint exists anywhere: tells "none here" (DROP) from "none" (REJECT)."""


# From slices to endpoints (SPEC 4)


def build_endpoints(
    slices: Iterable[EndpointSlice], family: Family, node_name: str
) -> EndpointsByPort:
    """Return a Service's endpoints in one family by port, each list in printed order.

    Slices of another address type are ignored. Endpoints that are not ready are kept. Where two
    slices name one `ip:port`, the later (by slice name) counts, but never one that is terminating.
    An address of the other family is kept as upstream's tracker does (the API server refuses it);
    plans are made of what `read_endpoints` lets through.
    """
    return _read(slices, family, node_name, tuple(Family))[0]


def read_endpoints(
    slices: Iterable[EndpointSlice], family: Family, node_name: str
) -> tuple[EndpointsByPort, tuple[Finding, ...]]:
    """Do what `build_endpoints` does, for one family alone; say what is wrong with the slices."""
    return _read(slices, family, node_name, (family,))


def _read(
    slices: Iterable[EndpointSlice], family: Family, node_name: str, accepted: tuple[Family, ...]
) -> tuple[EndpointsByPort, tuple[Finding, ...]]:
    found: dict[PortKey, dict[str, EndpointState]] = {}
    findings: tuple[Finding, ...] = ()
    address_type = _ADDRESS_TYPES[family]
    for slice_ in _in_order(slices):
        if slice_.address_type == address_type:
            notes = Notes("EndpointSlice", slice_.metadata)
            _read_slice(slice_, accepted, node_name, found, notes)
            findings += notes.findings
    return {port: _sorted(states) for port, states in found.items()}, findings


def check_address_types(slices: Sequence[EndpointSlice]) -> tuple[Finding, ...]:
    """Say which slices are of no family at all (SPEC 2: FQDN is ignored)."""
    findings: tuple[Finding, ...] = ()
    for slice_ in slices:
        if slice_.address_type not in _ADDRESS_TYPES.values():
            name, word = slice_.metadata.object_name, slice_.address_type
            reason = f"{word!r} is not served; write IPv4 or IPv6"
            findings += (Finding(f"EndpointSlice {name}", "addressType", reason),)
    return findings


def local_ready_count(endpoints: Mapping[PortKey, Sequence[EndpointState]]) -> int:
    """Count the distinct addresses of ready endpoints on this node (health checks, SPEC 4)."""
    return len(
        {
            state.endpoint.ip
            for states in endpoints.values()
            for state in states
            if state.endpoint.local and state.ready
        }
    )


def _in_order(slices: Iterable[EndpointSlice]) -> Sequence[EndpointSlice]:
    listed = [s for s in slices if s.metadata.labels is None or s.metadata.labels.headless is None]
    if len(listed) > 1:
        listed.sort(key=lambda slice_: slice_.metadata.name)
    return listed


def _sorted(states: dict[str, EndpointState]) -> tuple[EndpointState, ...]:
    if len(states) == 1:
        return tuple(states.values())
    return tuple([states[printed] for printed in sorted(states)])


def _read_slice(
    slice_: EndpointSlice,
    accepted: tuple[Family, ...],
    node_name: str,
    found: dict[PortKey, dict[str, EndpointState]],
    notes: Notes,
) -> None:
    ports = [
        (found.setdefault(key, {}), port, f":{port}") for key, port in _slice_ports(slice_, notes)
    ]
    node_name = node_name or _NOWHERE
    for index, entry in enumerate(slice_.endpoints or ()):
        if not entry.addresses:
            continue
        address = entry.addresses[0]  # the one that counts (SPEC 4)
        ip = canonical_ip(address)
        if ip is None or family_of(ip) not in accepted:
            reason = f"{address!r} is not an {slice_.address_type} address"
            notes.add(f"endpoints[{index}].addresses[0]", f"{reason}; the endpoint is ignored")
            continue
        host = f"[{ip}]" if ":" in ip else ip
        for states, port, printed_port in ports:
            state = _state(entry, Endpoint(ip, port, entry.node_name == node_name))
            printed = host + printed_port
            if not (state.terminating and printed in states):
                states[printed] = state


def _slice_ports(slice_: EndpointSlice, notes: Notes) -> list[tuple[PortKey, int]]:
    out: list[tuple[PortKey, int]] = []
    for index, port in enumerate(slice_.ports or ()):
        protocol = PROTOCOLS.get(port.protocol)
        if port.name is None:
            notes.add(
                f"ports[{index}].name", 'is absent: ignored; an unnamed port is written name: ""'
            )
        elif protocol is None:
            notes.add(
                f"ports[{index}].protocol", f"{port.protocol!r} is not TCP, UDP or SCTP; ignored"
            )
        elif port.port and not 0 < port.port <= MAX_PORT:
            notes.add(f"ports[{index}].port", f"{port.port} must be 1 to {MAX_PORT}; ignored")
        elif port.port:
            out.append(((port.name, protocol), port.port))
    return out


def _state(entry: SliceEndpoint, endpoint: Endpoint) -> EndpointState:
    conditions, hints = entry.conditions, entry.hints
    if conditions is None and hints is None:
        return EndpointState(endpoint)
    zones, nodes = _hints(hints) if hints else ((), ())
    if conditions is None:
        return EndpointState(endpoint, zone_hints=zones, node_hints=nodes)
    return EndpointState(
        endpoint,
        conditions.ready is not False,
        conditions.serving is not False,
        conditions.terminating is True,
        zones,
        nodes,
    )


def _hints(hints: EndpointHints) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return _names(hints.for_zones), _names(hints.for_nodes)


def _names(hints: list[ForZone] | None) -> tuple[str, ...]:
    return tuple([hint.name for hint in hints]) if hints else ()


# From endpoints to lists (SPEC 5)


def categorize(
    endpoints: Sequence[EndpointState], spec: PortSpec, node_name: str, zone: str
) -> Categories:
    """Decide which endpoints a ServicePort's traffic may go to on this node.

    Args:
        endpoints: of the ServicePort, in printed order.
        spec: the ServicePort; its policies decide which lists are needed.
        node_name: this node; local endpoints are marked already, this is for hints.
        zone: this node's zone, "" where it has none.
    """
    if not endpoints:
        return Categories()
    ready = [state for state in endpoints if state.ready]
    cluster = _cluster_list(endpoints, ready, node_name, zone) if spec.uses_cluster else ()
    if not spec.uses_local:
        return Categories(cluster, (), cluster, bool(cluster))
    local = _local_list(endpoints, ready)
    has_any = bool(ready) or any(state.draining for state in endpoints)
    return Categories(cluster, local, union(cluster, local), has_any)


def topology(ready: Sequence[EndpointState], node_name: str, zone: str) -> Topology:
    """Tell how hints narrow the cluster list; only ready endpoints are asked (SPEC 5)."""
    if _all_hint([state.node_hints for state in ready], node_name):
        return Topology.SAME_NODE
    if _all_hint([state.zone_hints for state in ready], zone):
        return Topology.SAME_ZONE
    return Topology.NONE


def allowed(state: EndpointState, mode: Topology, node_name: str, zone: str) -> bool:
    """Whether hints let this node use an endpoint."""
    match mode:
        case Topology.SAME_NODE:
            return node_name in state.node_hints
        case Topology.SAME_ZONE:
            return zone in state.zone_hints
        case _:
            return True


def union(one: tuple[Endpoint, ...], other: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
    """Unite two lists, in printed order."""
    if not other or one == other:
        return one
    if not one:
        return other
    return tuple(sorted({*one, *other}, key=str))


def _all_hint(hints: Sequence[tuple[str, ...]], name: str) -> bool:
    return bool(name) and all(hints) and any(name in names for names in hints)


def _cluster_list(
    endpoints: Sequence[EndpointState], ready: Sequence[EndpointState], node_name: str, zone: str
) -> tuple[Endpoint, ...]:
    if not ready:
        return tuple([state.endpoint for state in endpoints if state.draining])
    if not (ready[0].zone_hints or ready[0].node_hints):  # one without hints: none count
        return tuple([state.endpoint for state in ready])
    mode = topology(ready, node_name, zone)
    return tuple([s.endpoint for s in ready if allowed(s, mode, node_name, zone)])


def _local_list(
    endpoints: Sequence[EndpointState], ready: Sequence[EndpointState]
) -> tuple[Endpoint, ...]:
    local = tuple([state.endpoint for state in ready if state.endpoint.local])
    return local or tuple([s.endpoint for s in endpoints if s.endpoint.local and s.draining])
