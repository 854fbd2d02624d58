"""Build endpoints from EndpointSlices, and choose those that traffic may use (behaviour 4, 5).

The theory of `categorize`: a ServicePort has up to two lists. `cluster` serves every policy but
Local; hints may narrow it. `local` serves the policy Local; hints never do. Each list holds ready
endpoints, or, when it would be empty, those that are shutting down but still serve: a rolling
update with a single replica then loses no connection. The lists fall back independently.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TypeAlias

from steersman.compile.notes import MAX_PORT, PROTOCOLS, Notes
from steersman.compile.service import PortSpec
from steersman.model.addresses import canonical_ip, special_range
from steersman.model.findings import Finding, Severity, quoted
from steersman.model.kube import EndpointHints, EndpointSlice, ForZone, SliceEndpoint
from steersman.model.names import Family, Protocol
from steersman.model.plan import Endpoint, Value

MAX_ENDPOINTS = 50_000
"""Endpoints of a Service that are served in one family, counted over all its ports
(docs/limits.md): planning that many takes about 40 ms."""
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
    """How hints narrow the cluster list of a ServicePort on this node (behaviour 5)."""

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


# From slices to endpoints (behaviour 4)


def build_endpoints(
    slices: Iterable[EndpointSlice],
    family: Family,
    node_name: str,
    wanted: Container[PortKey] | None = None,
) -> EndpointsByPort:
    """Return a Service's endpoints in one family by port, each list in printed order.

    Slices of another address type are ignored. Endpoints that are not ready are kept. Where two
    slices name one `ip:port`, the later (by slice name) counts, but never one that is terminating.
    An address of the other family is kept as upstream's tracker does (the API server refuses it);
    plans are made of what `read_endpoints` lets through.

    Args:
        slices: those of the Service, of all families.
        family: the family.
        node_name: this node.
        wanted: the ports to read; None for all. Of a slice that has none of them the first port is
            read, so that `local_ready_count` knows its addresses.
    """
    return _Reading(family, node_name, wanted, strict=False).read(slices)[0]


def read_endpoints(
    slices: Iterable[EndpointSlice],
    family: Family,
    node_name: str,
    wanted: Container[PortKey] | None = None,
) -> tuple[EndpointsByPort, tuple[Finding, ...]]:
    """Do what `build_endpoints` does, with only the addresses that endpoints may have.

    The second result says what is wrong with the slices.
    """
    return _Reading(family, node_name, wanted, strict=True).read(slices)


def check_address_types(slices: Iterable[EndpointSlice]) -> tuple[Finding, ...]:
    """Say which slices are of no family at all (behaviour 2: FQDN is ignored)."""
    findings: list[Finding] = []
    for slice_ in slices:
        if slice_.address_type not in _ADDRESS_TYPES.values():
            name, word = slice_.metadata.object_name, quoted(slice_.address_type)
            reason = f"{word} is not served; write IPv4 or IPv6"
            findings.append(Finding(f"EndpointSlice {name}", "addressType", reason))
    return tuple(findings)


def local_ready_count(endpoints: Mapping[PortKey, Sequence[EndpointState]]) -> int:
    """Count the distinct addresses of ready endpoints on this node (health checks, behaviour 4)."""
    return len(
        {
            state.endpoint.ip
            for states in endpoints.values()
            for state in states
            if state.endpoint.local and state.ready
        }
    )


class _Reading:
    """The endpoints of one Service in one family, as its slices are read."""

    def __init__(
        self,
        family: Family,
        node_name: str,
        wanted: Container[PortKey] | None,
        *,
        strict: bool,
    ) -> None:
        self._type = _ADDRESS_TYPES[family]
        self._node_name = node_name or _NOWHERE
        self._wanted = wanted
        self._strict = strict
        self._is_ipv6 = family is Family.IPV6
        self._found: dict[PortKey, dict[str, EndpointState]] = {}
        self._room = MAX_ENDPOINTS

    def read(self, slices: Iterable[EndpointSlice]) -> tuple[EndpointsByPort, tuple[Finding, ...]]:
        """Return the endpoints by port, and what is wrong with the slices."""
        findings: list[Finding] = []
        for slice_ in _in_order(slices):
            if slice_.address_type == self._type and self._room >= 0:
                notes = Notes("EndpointSlice", slice_.metadata)
                self._read_slice(slice_, notes)
                findings += notes.findings
        return {port: _sorted(states) for port, states in self._found.items()}, tuple(findings)

    def _read_slice(self, slice_: EndpointSlice, notes: Notes) -> None:
        ports = [
            (self._found.setdefault(key, {}), port, f":{port}")
            for key, port in self._ports(slice_, notes)
        ]
        width, room = len(ports), self._room
        strict, is_ipv6, here = self._strict, self._is_ipv6, self._node_name
        for index, entry in enumerate(slice_.endpoints or ()):
            if not entry.addresses:
                continue
            ip = canonical_ip(entry.addresses[0])  # the one that counts (behaviour 4)
            if ip is None or (strict and ((":" in ip) is not is_ipv6 or special_range(ip))):
                reason = _unusable(entry.addresses[0], ip, slice_.address_type)
                notes.add(f"endpoints[{index}].addresses[0]", f"{reason}; the endpoint is ignored")
                continue
            room -= width
            if room < 0:
                reason = "the Service has more endpoints, counted over all its ports, than the"
                reason += f" {MAX_ENDPOINTS} that are served; the others are ignored"
                notes.add(f"endpoints[{index}]", reason, Severity.ERROR)
                break
            known = None if entry.conditions is None and entry.hints is None else _known(entry)
            host = f"[{ip}]" if ":" in ip else ip
            for states, port, printed_port in ports:
                endpoint = Endpoint(ip, port, entry.node_name == here)
                state = EndpointState(endpoint, *known) if known else EndpointState(endpoint)
                printed = host + printed_port
                if not (state.terminating and printed in states):
                    states[printed] = state
        self._room = room

    def _ports(self, slice_: EndpointSlice, notes: Notes) -> list[tuple[PortKey, int]]:
        ports = _slice_ports(slice_, notes)
        wanted = self._wanted
        if wanted is None:
            return ports
        return [each for each in ports if each[0] in wanted] or ports[:1]


def _unusable(address: str, ip: str | None, address_type: str) -> str:
    word = special_range(ip) if ip else ""
    if word:
        return f"{ip} is {word}, which no endpoint may be"
    return f"{quoted(address)} is not an {address_type} address"


def _in_order(slices: Iterable[EndpointSlice]) -> Sequence[EndpointSlice]:
    listed = [s for s in slices if s.metadata.labels is None or s.metadata.labels.headless is None]
    if len(listed) > 1:
        listed.sort(key=lambda slice_: slice_.metadata.name)
    return listed


def _sorted(states: dict[str, EndpointState]) -> tuple[EndpointState, ...]:
    if len(states) == 1:
        return tuple(states.values())
    return tuple([states[printed] for printed in sorted(states)])


def _slice_ports(slice_: EndpointSlice, notes: Notes) -> list[tuple[PortKey, int]]:
    out: list[tuple[PortKey, int]] = []
    for index, port in enumerate(slice_.ports or ()):
        protocol = PROTOCOLS.get(port.protocol)
        if port.name is None:
            notes.add(
                f"ports[{index}].name", 'is absent: ignored; an unnamed port is written name: ""'
            )
        elif protocol is None:
            reason = f"{quoted(port.protocol)} is not TCP, UDP or SCTP; ignored"
            notes.add(f"ports[{index}].protocol", reason)
        elif port.port and not 0 < port.port <= MAX_PORT:
            notes.add(f"ports[{index}].port", f"{port.port} must be 1 to {MAX_PORT}; ignored")
        elif port.port:
            out.append(((port.name, protocol), port.port))
    return out


_Known: TypeAlias = tuple[bool, bool, bool, tuple[str, ...], tuple[str, ...]]


def _known(entry: SliceEndpoint) -> _Known:
    """Return all of an EndpointState but the endpoint."""
    conditions, hints = entry.conditions, entry.hints
    zones, nodes = _hints(hints) if hints else ((), ())
    if conditions is None:
        return True, True, False, zones, nodes
    return (
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


# From endpoints to lists (behaviour 5)


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
    """Tell how hints narrow the cluster list; only ready endpoints are asked (behaviour 5)."""
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
