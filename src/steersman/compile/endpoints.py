"""Read endpoints from EndpointSlices, and choose those that traffic may use (behaviour 4, 5).

The theory. A ServicePort has up to two lists of endpoints on a node:

    all endpoints of the port
      |
      +-- any endpoint  --> cluster   for policy Cluster; hints may narrow it
      |
      +-- on this node  --> local     for policy Local; hints never narrow it

1. A list holds the ready endpoints. If none is ready, it holds those that terminate but still
   serve ("draining"): a rolling update of a single replica then loses no connection.
2. The two lists fall back independently of each other.
3. Hints narrow the cluster list only if all ready endpoints have one and at least one of them is
   meant for this node: its name first (KEP-3015), otherwise its zone (KEP-2433). In all other
   cases hints are ignored, and all ready endpoints are used.
4. No endpoint anywhere is another case than none on this node: clients are rejected at once,
   instead of dropped until they time out (`Categories.has_any`).
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TypeAlias

from msgspec import structs

from steersman.compile.findings import FindingCollector
from steersman.compile.service import MAX_PORT, PROTOCOLS, PortKey, PortSpec
from steersman.model import codes
from steersman.model.addresses import canonical_ip, special_range
from steersman.model.failover import Ejection
from steersman.model.findings import Finding, Severity, quoted
from steersman.model.kube import EndpointSlice
from steersman.model.names import Family, Protocol
from steersman.model.plan import Endpoint, Value

MAX_ENDPOINTS = 50_000
"""Endpoints of a Service that are served in one family, counted over all its ports
(docs/limits.md): planning that many takes about 40 ms."""
MAX_LISTED = 2 * MAX_ENDPOINTS
"""Endpoints in the EndpointSlices of one Service that are read (docs/limits.md)."""
_ADDRESS_TYPES = {family: family.kubernetes for family in Family}
ADDRESS_TYPES = frozenset(_ADDRESS_TYPES.values())
"""The address types of slices that are served."""
_SLICE_NAME = attrgetter("metadata.name")
_IPV6 = Family.IPV6  # a member by name costs ten times as much (Python 3.11)
_NUMBERS: dict[int, int] = {}
"""Every port number so far: those of endpoints are few, and each would be an object of 32 bytes."""
_NOWHERE = "\0"
"""The name of a node that has none. "" would match slices that do not name a node."""


class EndpointState(Value, frozen=True):
    """An endpoint of a ServicePort, and the conditions that decide whether traffic goes there."""

    endpoint: Endpoint
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    zone_hints: tuple[str, ...] = ()
    """Zones that should use it; () without a hint."""
    node_hints: tuple[str, ...] = ()
    """Nodes that should use it; () without a hint."""
    ejection: Ejection | None = None
    """If this node has taken it out, because it does not answer; then it is not ready."""

    @property
    def draining(self) -> bool:
        """Whether it terminates and still serves: used only if nothing is ready."""
        return self.serving and self.terminating


EndpointsByPort: TypeAlias = dict[PortKey, tuple[EndpointState, ...]]


class Topology(enum.StrEnum):
    """How hints narrow the cluster list of a ServicePort on this node (behaviour 5)."""

    NONE = "none"
    SAME_NODE = "PreferSameNode"
    SAME_ZONE = "PreferSameZone"


class Categories(Value, frozen=True):
    """The endpoints that a ServicePort's traffic may use on this node; lists in printed order."""

    cluster: tuple[Endpoint, ...] = ()
    """For policy Cluster; empty also if no traffic uses it."""
    local: tuple[Endpoint, ...] = ()
    """For policy Local; empty also if no traffic uses it."""
    reachable: tuple[Endpoint, ...] = ()
    """The union of both."""
    has_any: bool = False
    """Whether an endpoint exists anywhere: tells "none here" (DROP) from "none" (REJECT)."""
    draining: bool = False
    """Whether none is ready, and some terminate but still serve."""


_NO_ENDPOINTS = Categories()


# From slices to endpoints (behaviour 4)


def limited_slices(
    slices: Iterable[EndpointSlice],
) -> tuple[list[EndpointSlice], tuple[Finding, ...]]:
    """Return the slices of a Service that are read, and Findings about the others.

    These are the first ones, up to MAX_LISTED endpoints: later slices are not even decoded. Those
    of an unknown address type have no endpoints that count (behaviour 2: FQDN is ignored).
    """
    out: list[EndpointSlice] = []
    findings: list[Finding] = []
    room = MAX_LISTED
    for slice_ in slices:
        room -= max(1, len(slice_.endpoints or ()))
        if room < 0:
            reason = f"the Service's slices list more than {MAX_LISTED} endpoints; this one and"
            reason += " those after it are ignored"
            name = f"EndpointSlice {slice_.metadata.object_name}"
            findings.append(Finding(name, "endpoints", reason, Severity.ERROR, codes.LIMIT))
            break
        if slice_.address_type not in ADDRESS_TYPES:
            reason = f"{quoted(slice_.address_type)} is not served; write IPv4 or IPv6"
            name = f"EndpointSlice {slice_.metadata.object_name}"
            findings.append(Finding(name, "addressType", reason, code=codes.ENDPOINT))
        out.append(slice_)
    return out, tuple(findings)


def read_endpoints(
    slices: Iterable[EndpointSlice],
    family: Family,
    node_name: str,
    wanted: Container[PortKey] | None = None,
    *,
    strict: bool = True,
) -> tuple[EndpointsByPort, tuple[Finding, ...]]:
    """Return a Service's endpoints in one family by port, and the problems of its slices.

    Lists are in printed order, endpoints that are not ready included. Slices of another address
    type are ignored. If two slices name one `ip:port`, the later (by slice name) counts, but never
    a terminating entry.

    Args:
        wanted: the ports to read; None for all. Of a slice that has none of them, the first port
            is read, so that `local_ready_count` knows its addresses.
        strict: ignore addresses of the other family and of special ranges. Plans are strict;
            upstream's tracker is not, because the API server rejects such addresses.
    """
    found: dict[PortKey, dict[str, EndpointState]] = {}
    findings: list[Finding] = []
    here, is_ipv6, room = node_name or _NOWHERE, family is _IPV6, MAX_ENDPOINTS
    address_type = _ADDRESS_TYPES[family]
    for slice_ in sorted(slices, key=_SLICE_NAME):
        # 1. Which slices count: those of this family, but none of a headless Service.
        labels = slice_.metadata.labels
        if slice_.address_type != address_type or room < 0:
            continue
        if labels is not None and labels.headless is not None:
            continue
        # 2. Its ports. `targets` has for each the endpoints found so far, by their printed form.
        problems = FindingCollector("EndpointSlice", codes.ENDPOINT, slice_.metadata)
        ports = _ports(slice_, problems)
        if wanted is not None:
            ports = [each for each in ports if each[0] in wanted] or ports[:1]
        targets = [(found.setdefault(key, {}), port, f":{port}") for key, port in ports]
        # 3. Its addresses, each an endpoint of every port.
        for index, entry in enumerate(slice_.endpoints or ()):
            addresses, given, hints = entry.addresses, entry.conditions, entry.hints
            if not addresses:
                continue
            ip = canonical_ip(addresses[0])  # the others do not count (behaviour 4)
            if ip is None or (strict and ((":" in ip) is not is_ipv6 or special_range(ip))):
                word = special_range(ip) if ip else ""
                reason = (
                    f"{ip} is {word}, which no endpoint may be"
                    if word
                    else f"{quoted(addresses[0])} is not an {address_type} address"
                )
                field = f"endpoints[{index}].addresses[0]"
                problems.add(field, f"{reason}; the endpoint is ignored")
                continue
            room -= len(targets)
            if room < 0:
                reason = "the Service has more endpoints, counted over all its ports, than the"
                reason += f" {MAX_ENDPOINTS} that are served; the others are ignored"
                problems.add(f"endpoints[{index}]", reason, Severity.ERROR, codes.LIMIT)
                break
            # 4. Its conditions: null and absent ones mean ready, serving and not terminating.
            local = entry.node_name == here
            host = f"[{ip}]" if ":" in ip else ip
            if given is None and hints is None:  # almost always
                for states, port, printed_port in targets:
                    states[host + printed_port] = EndpointState(Endpoint(ip, port, local))
                continue
            ready = given is None or given.ready is not False
            serving = given is None or given.serving is not False
            terminating = given is not None and given.terminating is True
            zones = tuple([hint.name for hint in hints.for_zones or ()]) if hints else ()
            nodes = tuple([hint.name for hint in hints.for_nodes or ()]) if hints else ()
            for states, port, printed_port in targets:
                printed = host + printed_port
                if not (terminating and printed in states):
                    states[printed] = EndpointState(
                        Endpoint(ip, port, local), ready, serving, terminating, zones, nodes
                    )
        findings += problems.findings
    by_port = {
        key: tuple([states[name] for name in sorted(states)]) for key, states in found.items()
    }
    return by_port, tuple(findings)


def build_endpoints(
    slices: Iterable[EndpointSlice],
    family: Family,
    node_name: str,
    wanted: Container[PortKey] | None = None,
) -> EndpointsByPort:
    """Return the endpoints that `read_endpoints` reads if it is not strict."""
    return read_endpoints(slices, family, node_name, wanted, strict=False)[0]


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


def _ports(slice_: EndpointSlice, problems: FindingCollector) -> list[tuple[PortKey, int]]:
    """Return the valid ports of a slice."""
    out: list[tuple[PortKey, int]] = []
    for index, port in enumerate(slice_.ports or ()):
        protocol = PROTOCOLS.get(port.protocol)
        if port.name is None:
            reason = 'is absent: ignored; an unnamed port is written name: ""'
            problems.add(f"ports[{index}].name", reason)
        elif protocol is None:
            reason = f"{quoted(port.protocol)} is not TCP, UDP or SCTP; ignored"
            problems.add(f"ports[{index}].protocol", reason)
        elif port.port and not 0 < port.port <= MAX_PORT:
            problems.add(f"ports[{index}].port", f"{port.port} must be 1 to {MAX_PORT}; ignored")
        elif port.port:
            number = _NUMBERS.setdefault(port.port, port.port)
            out.append(((port.name, protocol), number))
    return out


# From endpoints to lists (behaviour 5)


def with_ejections(
    states: tuple[EndpointState, ...], protocol: Protocol, ejections: Iterable[Ejection]
) -> tuple[EndpointState, ...]:
    """Return the endpoints of a port with the ejected ones not ready.

    Policies and hints then work as if Kubernetes had said so. Health check node ports count the
    endpoints without this: they tell about pods, not about what this node can reach. If no other
    endpoint is ready all stay: Kubernetes may have taken out the others since they were ejected.
    """
    found = {(e.backend.ip, e.backend.port): e for e in ejections if e.backend.protocol is protocol}
    left = (s for s in states if s.ready and (s.endpoint.ip, s.endpoint.port) not in found)
    if not found or not any(left):
        return states
    return tuple(
        structs.replace(state, ready=False, serving=False, ejection=ejection)
        if (ejection := found.get((state.endpoint.ip, state.endpoint.port))) is not None
        else state
        for state in states
    )


def categorize(
    endpoints: Sequence[EndpointState], spec: PortSpec, node_name: str, zone: str
) -> Categories:
    """Decide which endpoints a ServicePort's traffic may go to on this node.

    Args:
        endpoints: of the ServicePort, in printed order.
        node_name: this node, for hints; local endpoints are already marked.
    """
    # The cluster list: ready endpoints, narrowed by hints; or else the draining ones.
    if not endpoints:
        return _NO_ENDPOINTS
    ready = [state for state in endpoints if state.ready]
    cluster: tuple[Endpoint, ...] = ()
    if not spec.uses_cluster:
        pass
    elif not ready:
        cluster = tuple([state.endpoint for state in endpoints if state.draining])
    elif not (ready[0].zone_hints or ready[0].node_hints):
        cluster = tuple([state.endpoint for state in ready])  # one has no hint: ignore them all
    else:
        mode = topology(ready, node_name, zone)
        cluster = tuple([s.endpoint for s in ready if allowed(s, mode, node_name, zone)])
    if not spec.uses_local:
        return Categories(cluster, (), cluster, bool(cluster), bool(cluster) and not ready)
    # The local list: the same on this node, but hints do not count.
    local = tuple([state.endpoint for state in ready if state.endpoint.local])
    if not local:
        local = tuple([s.endpoint for s in endpoints if s.endpoint.local and s.draining])
    draining = not ready and any(state.draining for state in endpoints)
    has_any = bool(ready) or draining
    return Categories(cluster, local, union(cluster, local), has_any, draining)


def topology(ready: Sequence[EndpointState], node_name: str, zone: str) -> Topology:
    """Return how hints narrow the cluster list; only ready endpoints count (behaviour 5)."""
    if _all_hint([state.node_hints for state in ready], node_name):
        return Topology.SAME_NODE
    if _all_hint([state.zone_hints for state in ready], zone):
        return Topology.SAME_ZONE
    return Topology.NONE


def _all_hint(hints: Sequence[tuple[str, ...]], name: str) -> bool:
    return bool(name) and all(hints) and any(name in names for names in hints)


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
    """Return the union of two lists, in printed order."""
    if not other or one == other:
        return one
    if not one:
        return other
    return tuple(sorted({*one, *other}, key=str))
