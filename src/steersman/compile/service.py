"""Parse a Service into its ServicePorts, family by family (behaviour 3).

All fields are read leniently: a malformed one becomes a Finding, and the rest of the object is
served. Endpoints play no part here.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

import msgspec

from steersman.compile.findings import FindingCollector
from steersman.model import codes
from steersman.model.addresses import canonical_cidr, canonical_ip, family_of, special_range
from steersman.model.findings import Finding, Severity, quoted
from steersman.model.kube import LoadBalancerIngress, Service, ServiceSpec
from steersman.model.names import Family, PlanKey, Protocol, ServicePortName
from steersman.model.plan import Value

MAX_PORT = 65535
MAX_PORTS = 10_000
"""Ports of a Service that are served (docs/limits.md)."""
MAX_DESTINATIONS = 50_000
"""External IPs of a Service, times its ports; the same for load balancer IPs, and for those times
the source ranges (docs/limits.md)."""
STEP = 2_000
"""Entries of a list that are read between two yields of `parse_steps`: about 5 ms."""
DEFAULT_AFFINITY_SECONDS = 10800
MAX_AFFINITY_SECONDS = 86400
PROTOCOLS: Mapping[str | None, Protocol] = {
    None: Protocol.TCP,
    "": Protocol.TCP,
    **{protocol.value: protocol for protocol in Protocol},
}
"""Protocols by their spelling in objects; an absent one is TCP."""
_FAMILIES = {family.kubernetes: family for family in Family}
_NO_ADDRESS = ("", "None")
_TYPES = (None, "", "ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
_NO_AFFINITY = (None, "", "None")
_AFFINITIES = (*_NO_AFFINITY, "ClientIP")
_CLUSTER = (None, "", "Cluster")
_POLICIES = (*_CLUSTER, "Local")
_IP_MODES = (None, "VIP", "Proxy")


class PortSpec(Value, frozen=True):
    """The specification of one ServicePort in one family (behaviour 3)."""

    cluster_ip: str
    port: int
    protocol: Protocol = Protocol.TCP
    node_port: int = 0
    """0 for none."""
    external_ips: tuple[str, ...] = ()
    load_balancer_vips: tuple[str, ...] = ()
    load_balancer_source_ranges: tuple[str, ...] = ()
    """Canonical CIDRs that may use the load balancer VIPs; () means everyone."""
    health_check_node_port: int = 0
    """0 for none."""
    session_affinity: str = ""
    """As written: "", `None` or `ClientIP`."""
    affinity_seconds: int = 0
    """Time-out of ClientIP affinity; 0 for no affinity."""
    external_policy_local: bool = False
    internal_policy_local: bool = False

    @property
    def externally_accessible(self) -> bool:
        """Whether clients outside the cluster can reach it, in this family."""
        return bool(self.node_port or self.load_balancer_vips or self.external_ips)

    @property
    def uses_cluster(self) -> bool:
        """Whether some traffic goes to endpoints anywhere in the cluster."""
        return not self.internal_policy_local or self.externally_accessible

    @property
    def uses_local(self) -> bool:
        """Whether some traffic goes to this node's endpoints only."""
        return self.internal_policy_local or (
            self.external_policy_local and self.externally_accessible
        )


_T = TypeVar("_T")
PortSpecs: TypeAlias = dict[ServicePortName, PortSpec]
PortKey: TypeAlias = tuple[str, Protocol]
"""Port name and protocol: they join a Service's port with a slice's."""
_NumberedPort: TypeAlias = tuple[ServicePortName, int, int]
"""Name, port and node port (0 for none)."""
# The common fields of a Service of type ClusterIP without anything special, shared by all of them.
_PLAIN = {word: PortSpec("", 0, session_affinity=word or "") for word in _NO_AFFINITY}


class ParsedService(Value, frozen=True):
    """A Service and its ServicePorts: the part of compiling it that needs no endpoints."""

    service: Service
    ports: tuple[tuple[PlanKey, PortSpec], ...] = ()
    """Grouped by family."""
    findings: tuple[Finding, ...] = ()
    wanted: frozenset[PortKey] = frozenset()
    """The ports to read from its slices."""


def closes_connections(service: Service) -> bool:
    """Whether a Service requests that connections to removed endpoints are closed."""
    annotations = service.metadata.annotations
    return annotations is not None and annotations.close_connections == "true"


def parse_service(
    service: Service,
    families: Collection[Family],
    *,
    allow_external_ips: bool = True,
) -> ParsedService:
    """Return the ServicePorts of a Service in one go; see `parse_steps`."""
    return _to_end(parse_steps(service, families, allow_external_ips=allow_external_ips))


def _to_end(steps: Generator[None, None, _T]) -> _T:
    """Return the result of a generator, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _T = end.value
            return result


def parse_steps(
    service: Service,
    families: Collection[Family],
    *,
    allow_external_ips: bool = True,
    forwards_sctp: bool = True,
) -> Generator[None, None, ParsedService]:
    """Return the ServicePorts of a Service, and the problems of its fields.

    A Service that is not served has neither. A family without a clusterIP is left out. It yields
    every few milliseconds: a Service may have tens of thousands of addresses or ranges.

    Args:
        allow_external_ips: feature gate AllowServiceExternalIPs.
        forwards_sctp: whether the mode forwards SCTP; otherwise such ports are left out.
    """
    if not service.is_served:
        return ParsedService(service)
    # A family is served if the Service has a clusterIP of it.
    problems = FindingCollector("Service", codes.SERVICE_FIELD, service.metadata)
    cluster_ips = _cluster_ips(service.spec, families, problems)
    if not cluster_ips:
        return ParsedService(service, (), problems.findings)
    # Fields that all ports share, addresses of both families together.
    common = yield from _common_fields(service, allow_external_ips, problems)
    if common.load_balancer_vips and common.load_balancer_source_ranges:
        others = {*common.external_ips, *cluster_ips.values()}
        for vip in common.load_balancer_vips:
            if vip in others:  # the first kind of an address counts, and its rules
                reason = f"{vip} is also the clusterIP or an externalIP: source ranges do not"
                reason += " guard it; give it to one of them only"
                problems.add("status.loadBalancer.ingress", reason, code=codes.SOURCE_RANGES)
    # Ports, without those that the mode cannot forward.
    ports = yield from _numbered_ports(service, problems)
    if common.external_ips or common.load_balancer_vips:
        common = _within_limits(common, len(ports), problems)
    findings = problems.findings
    if not forwards_sctp:
        count = len(ports)
        ports = [port for port in ports if port[0].protocol is not Protocol.SCTP]
        if len(ports) < count:
            reason = "SCTP cannot be forwarded in this mode; the port is not served, use another"
            name = f"Service {service.metadata.object_name}"
            reason += " mode"
            findings += (Finding(name, "spec.ports", reason, Severity.ERROR, codes.SCTP),)
    # One ServicePort for each port and family.
    specs: list[tuple[PlanKey, PortSpec]] = []
    for family, address in cluster_ips.items():
        of_family = _of_family(common, family, address)
        for i, (port_name, port, node_port) in enumerate(ports, 1):
            spec = msgspec.structs.replace(
                of_family, port=port, protocol=port_name.protocol, node_port=node_port
            )
            specs.append((PlanKey(port_name, family), spec))
            if i % STEP == 0:
                yield
    wanted = _port_keys(tuple([(name.port, name.protocol) for name, _, _ in ports]))
    return ParsedService(service, tuple(specs), findings, wanted)


@lru_cache(maxsize=1024)
def _port_keys(keys: tuple[PortKey, ...]) -> frozenset[PortKey]:
    """Return the ports as a set; most Services have one in common."""
    return frozenset(keys)


def port_names(
    service: Service, families: Collection[Family]
) -> dict[Family, tuple[ServicePortName, ...]]:
    """Return the names of a Service's ports in each family in which it is served."""
    if not service.is_served:
        return {}
    problems = FindingCollector("Service", codes.SERVICE_FIELD, service.metadata)
    names = tuple([name for name, _, _ in _to_end(_numbered_ports(service, problems))])
    return dict.fromkeys(_cluster_ips(service.spec, families, problems), names)


def service_ports(service: Service, family: Family) -> PortSpecs:
    """Return the ServicePorts of a Service in one family; {} if it is not served there."""
    return {key.name: spec for key, spec in parse_service(service, (family,)).ports}


def port_number(field: str, number: int, problems: FindingCollector) -> int:
    """Return a port number, or 0 if it is out of range."""
    if 0 <= number <= MAX_PORT:
        return number
    problems.add(field, f"{number} must be 1 to {MAX_PORT}; ignored")
    return 0


def _cluster_ips(
    spec: ServiceSpec, families: Collection[Family], problems: FindingCollector
) -> dict[Family, str]:
    if not spec.ip_families:  # written before dual stack: the only address tells its family
        address = _cluster_ip("spec.clusterIP", spec.cluster_ip or "", problems)
        if address is None or family_of(address) not in families:
            return {}  # malformed, or of a family that this node does not serve
        return {family_of(address): address}
    out: dict[Family, str] = {}
    texts = spec.cluster_ips or ()
    for index, word in enumerate(spec.ip_families):
        family = _FAMILIES.get(word)
        if family is None:
            reason = f"{quoted(word)} is not IPv4 or IPv6; ignored"
            problems.add(f"spec.ipFamilies[{index}]", reason, code=codes.CLUSTER_IP)
            continue
        if family not in families or family in out:
            continue
        if index >= len(texts) or texts[index] in _NO_ADDRESS:
            continue
        field = f"spec.clusterIPs[{index}]"
        address = _cluster_ip(field, texts[index], problems)
        if address is not None and family_of(address) is family:
            out[family] = address
        elif address is not None:
            reason = f"{address} is not {family.kubernetes}, as spec.ipFamilies[{index}] says"
            reason += "; not served in this family"
            problems.add(field, reason, Severity.ERROR, codes.CLUSTER_IP)
    return out


def _cluster_ip(field: str, text: str, problems: FindingCollector) -> str | None:
    address = canonical_ip(text)
    if address is None:
        reason = f"{quoted(text)} is not an IP address; the Service is not served there until it is"
        problems.add(field, reason, Severity.ERROR, codes.CLUSTER_IP)
    elif word := _never_a_service(address):
        reason = f"{address} is {word}, which no clusterIP may be; the Service is not served there"
        problems.add(field, reason, Severity.ERROR, codes.CLUSTER_IP)
        return None
    return address


def _never_a_service(address: str) -> str:
    """Return the range of an address that the node's own programs need; "" for all others.

    Rules for 127.0.0.1 would cut them off from each other: some modes reject all ports of a
    cluster IP that no Service has.
    """
    word = special_range(address)
    return word if word in ("loopback", "unspecified") else ""


def _numbered_ports(
    service: Service, problems: FindingCollector
) -> Generator[None, None, list[_NumberedPort]]:
    """Return the valid ports; the last of several ports of one name counts, as upstream."""
    out: dict[ServicePortName, _NumberedPort] = {}
    # The limit is on the list as written, so it does not matter which entries are valid.
    listed = service.spec.ports or []
    if len(listed) > MAX_PORTS:
        reason = f"has {len(listed)} entries, of which {MAX_PORTS} are served; divide the Service"
        problems.add("spec.ports", reason, Severity.ERROR, codes.LIMIT)
        listed = listed[:MAX_PORTS]
    for i, port in enumerate(listed):
        if i % STEP == STEP - 1:
            yield
        protocol = PROTOCOLS.get(port.protocol)
        if protocol is None:
            reason = f"{quoted(port.protocol)} is not TCP, UDP or SCTP; the port is not served"
            problems.add(f"spec.ports[{i}].protocol", reason, Severity.ERROR)
            continue
        name = ServicePortName(*service.metadata.object_name, port.name or "", protocol)
        if name in out:
            reason = f"another port is also called {quoted(port.name or '')}"
            problems.add(f"spec.ports[{i}].name", f"{reason}; only this one is served")
        # A ServicePort without a valid port has a plan without Frontends.
        if not 0 < port.port <= MAX_PORT:
            reason = f"{port.port} must be 1 to {MAX_PORT}; the port is not served"
            problems.add(f"spec.ports[{i}].port", reason, Severity.ERROR)
        node_port = 0
        if port.node_port:
            node_port = port_number(f"spec.ports[{i}].nodePort", port.node_port, problems)
        out[name] = name, port.port, node_port
    return list(out.values())


def _within_limits(common: PortSpec, ports: int, problems: FindingCollector) -> PortSpec:
    """Cut the lists of a Service with many ports to MAX_DESTINATIONS (docs/limits.md)."""

    def cut(addresses: tuple[str, ...], most: int, field: str) -> tuple[str, ...]:
        if len(addresses) > most:
            reason = f"has {len(addresses)} entries, of which {most} are served with so many ports"
            problems.add(field, f"{reason}; divide the Service", Severity.ERROR, codes.LIMIT)
        return addresses[:most]

    # Each address is a Frontend of each port; each source range is a rule of each of those.
    each = max(1, MAX_DESTINATIONS // max(1, ports))
    external_ips = cut(common.external_ips, each, "spec.externalIPs")
    vips = cut(common.load_balancer_vips, each, "status.loadBalancer.ingress")
    most = max(1, each // max(1, len(vips)))
    return msgspec.structs.replace(
        common,
        external_ips=external_ips,
        load_balancer_vips=vips,
        load_balancer_source_ranges=cut(
            common.load_balancer_source_ranges, most, "spec.loadBalancerSourceRanges"
        ),
    )


def _of_family(common: PortSpec, family: Family, cluster_ip: str) -> PortSpec:
    """Return the fields that all ports share, with the addresses of one family."""
    if not (common.external_ips or common.load_balancer_vips or common.load_balancer_source_ranges):
        return msgspec.structs.replace(common, cluster_ip=cluster_ip)
    is_ipv6 = family is Family.IPV6
    external_ips, vips, ranges = (
        tuple([address for address in addresses if (":" in address) is is_ipv6])
        for addresses in (
            common.external_ips,
            common.load_balancer_vips,
            common.load_balancer_source_ranges,
        )
    )
    if any(cidr.endswith("/0") for cidr in ranges):
        ranges = ()  # a range of everything is no restriction
    return msgspec.structs.replace(
        common,
        cluster_ip=cluster_ip,
        external_ips=external_ips,
        load_balancer_vips=vips,
        load_balancer_source_ranges=ranges,
    )


def _common_fields(
    service: Service, allow_external_ips: bool, problems: FindingCollector
) -> Generator[None, None, PortSpec]:
    """Return a PortSpec of the fields that all ports share, with addresses of both families."""
    spec = service.spec
    ingress = service.ingress
    if (
        spec.type == "ClusterIP"
        and spec.session_affinity in _NO_AFFINITY
        and spec.internal_traffic_policy in _CLUSTER
        and not (spec.external_ips or spec.load_balancer_source_ranges or ingress)
        and not spec.external_traffic_policy
    ):
        return _PLAIN[spec.session_affinity]  # most Services: worth a short cut
    _check_word("spec.type", spec.type, _TYPES, problems)
    _check_word("spec.externalTrafficPolicy", spec.external_traffic_policy, _POLICIES, problems)
    # External traffic: policy, addresses, health check. Upstream ignores the policy of a Service
    # that is not accessible by its spec (behaviour 3).
    accessible = spec.type in ("LoadBalancer", "NodePort") or (
        spec.type == "ClusterIP" and bool(spec.external_ips)
    )
    external_local = spec.external_traffic_policy == "Local" and accessible
    external_ips: tuple[str, ...] = ()
    if allow_external_ips and spec.external_ips:
        external_ips = yield from _external_ips(spec.external_ips, problems)
    vips = yield from _load_balancer_vips(ingress, problems)
    ranges = yield from _source_ranges(spec.load_balancer_source_ranges or (), problems)
    health_port = 0
    if spec.type == "LoadBalancer" and external_local and spec.health_check_node_port:
        field = "spec.healthCheckNodePort"
        health_port = port_number(field, spec.health_check_node_port, problems)
    seconds = _affinity_seconds(spec, problems)
    _check_word("spec.internalTrafficPolicy", spec.internal_traffic_policy, _POLICIES, problems)
    return PortSpec(
        "",
        0,
        external_ips=external_ips,
        load_balancer_vips=vips,
        load_balancer_source_ranges=ranges,
        health_check_node_port=health_port,
        session_affinity=spec.session_affinity or "",
        affinity_seconds=seconds,
        external_policy_local=external_local,
        internal_policy_local=spec.internal_traffic_policy == "Local",
    )


def _affinity_seconds(spec: ServiceSpec, problems: FindingCollector) -> int:
    """Return the time-out of session affinity; 0 for no affinity.

    The API server sets it; manifests may lack it. Upstream's default is used if it is absent or out
    of range.
    """
    if spec.session_affinity != "ClientIP":
        _check_word("spec.sessionAffinity", spec.session_affinity, _AFFINITIES, problems)
        return 0
    config = spec.session_affinity_config
    given = config.client_ip.timeout_seconds if config and config.client_ip else None
    if given is not None and not 0 < given <= MAX_AFFINITY_SECONDS:
        field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
        limits = f"must be 1 to {MAX_AFFINITY_SECONDS}"
        problems.add(field, f"{given} {limits}; {DEFAULT_AFFINITY_SECONDS} is used")
        given = None
    return DEFAULT_AFFINITY_SECONDS if given is None else given


def _external_ips(
    texts: Sequence[str], problems: FindingCollector
) -> Generator[None, None, tuple[str, ...]]:
    """Return the external IPs, of both families; an address counts once."""
    addresses: dict[str, None] = {}
    for i, text in enumerate(texts):
        if i % STEP == STEP - 1:
            yield
        address = canonical_ip(text.strip())
        word = special_range(address) if address else ""
        field = f"spec.externalIPs[{i}]"
        if word:
            problems.add(field, f"{address} is {word}, which no external IP may be; ignored")
        elif address is not None:
            addresses[address] = None
        elif text.strip():
            problems.add(field, f"{quoted(text)} is not an IP address; ignored")
    return tuple(addresses)


def _load_balancer_vips(
    entries: Sequence[LoadBalancerIngress], problems: FindingCollector
) -> Generator[None, None, tuple[str, ...]]:
    """Return the load balancer IPs, of both families; an address counts once."""
    # Clients of a VIP of mode Proxy reach the load balancer itself: not served here (KEP-1860).
    addresses: dict[str, None] = {}
    for i, ingress in enumerate(entries):
        if i % STEP == STEP - 1:
            yield
        field = f"status.loadBalancer.ingress[{i}]"
        _check_word(f"{field}.ipMode", ingress.ip_mode, _IP_MODES, problems)
        if not ingress.ip or ingress.ip_mode not in (None, "VIP"):
            continue
        address = canonical_ip(ingress.ip)
        word = "not an IP address" if address is None else _never_a_service(address)
        if address is None or word:
            problems.add(f"{field}.ip", f"{quoted(ingress.ip)} is {word}; ignored")
        else:
            addresses[address] = None
    return tuple(addresses)


def _source_ranges(
    texts: Sequence[str], problems: FindingCollector
) -> Generator[None, None, tuple[str, ...]]:
    """Return the source ranges, of both families; () means everyone.

    A malformed range admits no client; but if all are malformed there is no restriction, as
    upstream.
    """
    ranges: dict[str, None] = {}
    for i, text in enumerate(texts):
        if i % STEP == STEP - 1:
            yield
        cidr = canonical_cidr(text.strip())
        if cidr is not None:
            ranges[cidr] = None
        elif text.strip():
            reason = f"{quoted(text)} is not a CIDR such as 192.0.2.0/24; it admits no client"
            field = f"spec.loadBalancerSourceRanges[{i}]"
            problems.add(field, reason, code=codes.SOURCE_RANGES)
    if texts and not ranges:
        reason = "no valid CIDR is left: everyone may use the load balancer; correct the list"
        problems.add("spec.loadBalancerSourceRanges", reason, code=codes.SOURCE_RANGES)
    return tuple(ranges)


def _check_word(
    field: str, word: str | None, known: Sequence[str | None], problems: FindingCollector
) -> None:
    if word not in known:
        words = ", ".join(w for w in known if w)
        problems.add(field, f"{quoted(word)} is unknown and was ignored; write one of {words}")
