"""From a Service to its ServicePorts, family by family (SPEC 3).

Reads every field leniently: what is malformed becomes a Finding and the rest of the object is
served. Knows nothing of endpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from steersman.model.addresses import canonical_cidr, canonical_ip, family_of
from steersman.model.kube import ObjectMeta, Service, ServiceSpec
from steersman.model.kube import ServicePort as KubePort
from steersman.model.names import Family, Protocol, ServicePortName
from steersman.model.plan import Finding, Severity, Value

MAX_PORT = 65535
DEFAULT_AFFINITY_SECONDS = 10800
MAX_AFFINITY_SECONDS = 86400
PROTOCOLS: Mapping[str | None, Protocol] = {
    None: Protocol.TCP,
    "": Protocol.TCP,
    **{protocol.value: protocol for protocol in Protocol},
}
_NEITHER = ("", "None")
_FAMILIES = {family.kubernetes: family for family in Family}
_TYPES = (None, "", "ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
_AFFINITIES = (None, "", "None", "ClientIP")
_POLICIES = (None, "", "Cluster", "Local")


class PortSpec(Value, frozen=True):
    """What one port of a Service asks for in one family (SPEC 3)."""

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
    def reachable(self) -> bool:
        """Whether clients outside the cluster have a way in, in this family."""
        return bool(self.node_port or self.load_balancer_vips or self.external_ips)

    @property
    def uses_cluster(self) -> bool:
        """Whether some traffic goes to endpoints anywhere in the cluster."""
        return not self.internal_policy_local or self.reachable

    @property
    def uses_local(self) -> bool:
        """Whether some traffic goes to this node's endpoints only."""
        return self.internal_policy_local or (self.external_policy_local and self.reachable)


PortSpecs: TypeAlias = dict[ServicePortName, PortSpec]


class Notes:
    """Collects Findings about one object while it is read, in order and each once."""

    __slots__ = ("_findings", "_kind", "_meta")

    def __init__(self, kind: str, meta: ObjectMeta | None = None) -> None:
        self._kind = kind
        self._meta = meta
        self._findings: dict[Finding, None] = {}

    def add(self, field: str, reason: str, severity: Severity = Severity.WARNING) -> None:
        """Note what is wrong with a field, and what to do about it."""
        name = f"{self._kind} {self._meta.object_name}" if self._meta else self._kind
        self._findings[Finding(name, field, reason, severity)] = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was noted."""
        return tuple(self._findings)


class _Shared(Value, frozen=True):
    """What all ports of a Service share, both families together where addresses are meant."""

    external_ips: tuple[str, ...] = ()
    vips: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    health_check_node_port: int = 0
    session_affinity: str = ""
    affinity_seconds: int = 0
    external_policy_local: bool = False
    internal_policy_local: bool = False


_NO_AFFINITY = (None, "", "None")
_CLUSTER = (None, "", "Cluster")
_PLAIN = {word: _Shared(session_affinity=word or "") for word in _NO_AFFINITY}


def service_ports(
    service: Service, family: Family, *, allow_external_ips: bool = True
) -> PortSpecs:
    """Return the ServicePorts of a Service in one family; {} where it is not served there."""
    specs, _ = read_service(service, (family,), allow_external_ips=allow_external_ips)
    return specs.get(family, {})


def read_service(
    service: Service, families: Iterable[Family], *, allow_external_ips: bool = True
) -> tuple[dict[Family, PortSpecs], tuple[Finding, ...]]:
    """Return the ServicePorts of a Service by family, and what is wrong with it.

    A Service that is not this proxy's to serve (headless, without clusterIP, ExternalName, given
    to another proxy: SPEC 2, 3) has none, and no Findings either. A family without a clusterIP is
    left out.
    """
    if not is_served(service):
        return {}, ()
    notes = Notes("Service", service.metadata)
    addresses = _cluster_ips(service.spec, families, notes)
    if not addresses:
        return {}, notes.findings
    shared = _shared(service, allow_external_ips, notes)
    _check_vips(shared, addresses, notes)
    ports = _ports(service, notes)
    return {
        family: _specs(address, family, shared, ports) for family, address in addresses.items()
    }, notes.findings


def is_served(service: Service) -> bool:
    """Whether a Service is this proxy's to serve at all (SPEC 2, 3)."""
    spec, labels = service.spec, service.metadata.labels
    return (
        bool(spec.cluster_ip)
        and spec.cluster_ip != "None"
        and spec.type != "ExternalName"
        and (labels is None or labels.proxy_name is None)
    )


def affinity_timeout(seconds: int | None) -> int:
    """Seconds of ClientIP affinity; upstream's default where absent or out of range."""
    if seconds is None or not 0 < seconds <= MAX_AFFINITY_SECONDS:
        return DEFAULT_AFFINITY_SECONDS
    return seconds


def _cluster_ips(spec: ServiceSpec, families: Iterable[Family], notes: Notes) -> dict[Family, str]:
    if not spec.ip_families:
        return _only_cluster_ip(spec.cluster_ip or "", families, notes)
    out: dict[Family, str] = {}
    for index, word in enumerate(spec.ip_families):
        family = _FAMILIES.get(word)
        if family is None:
            notes.add(f"spec.ipFamilies[{index}]", f"{word!r} is not IPv4 or IPv6; ignored")
        elif family in families and family not in out:
            address = _nth_cluster_ip(spec, index, family, notes)
            if address is not None:
                out[family] = address
    return out


def _only_cluster_ip(text: str, families: Iterable[Family], notes: Notes) -> dict[Family, str]:
    address = _cluster_ip("spec.clusterIP", text, notes)
    if address is None:
        return {}
    family = family_of(address)
    return {family: address} if family in families else {}


def _nth_cluster_ip(spec: ServiceSpec, index: int, family: Family, notes: Notes) -> str | None:
    texts = spec.cluster_ips or ()
    if index >= len(texts) or texts[index] in _NEITHER:
        return None
    field = f"spec.clusterIPs[{index}]"
    address = _cluster_ip(field, texts[index], notes)
    if address is None or family_of(address) is family:
        return address
    reason = f"{address} is not {family.kubernetes}, as spec.ipFamilies[{index}] says"
    notes.add(field, f"{reason}; not served in this family", Severity.ERROR)
    return None


def _cluster_ip(field: str, text: str, notes: Notes) -> str | None:
    address = canonical_ip(text)
    if address is None:
        reason = f"{text!r} is not an IP address; the Service is not served there until it is"
        notes.add(field, reason, Severity.ERROR)
    return address


def _shared(service: Service, allow_external_ips: bool, notes: Notes) -> _Shared:
    spec = service.spec
    if spec.type != "ClusterIP" or spec.external_ips or spec.session_affinity not in _NO_AFFINITY:
        return _all_shared(service, allow_external_ips, notes)
    if spec.load_balancer_source_ranges or spec.external_traffic_policy or _has_ingress(service):
        return _all_shared(service, allow_external_ips, notes)
    if spec.internal_traffic_policy not in _CLUSTER:
        return _all_shared(service, allow_external_ips, notes)
    return _PLAIN[spec.session_affinity]  # most Services: worth a short cut


def _has_ingress(service: Service) -> bool:
    balancer = service.status.load_balancer if service.status else None
    return bool(balancer and balancer.ingress)


def _all_shared(service: Service, allow_external_ips: bool, notes: Notes) -> _Shared:
    spec = service.spec
    _check_word("spec.type", spec.type, _TYPES, notes)
    external_local = _external_policy_local(spec, notes)
    return _Shared(
        external_ips=_external_ips(spec, notes) if allow_external_ips else (),
        vips=_vips(service, notes),
        ranges=_ranges(spec.load_balancer_source_ranges, notes),
        health_check_node_port=_health_check_node_port(spec, external_local, notes),
        session_affinity=spec.session_affinity or "",
        affinity_seconds=_affinity_seconds(spec, notes),
        external_policy_local=external_local,
        internal_policy_local=_policy_local(
            "spec.internalTrafficPolicy", spec.internal_traffic_policy, notes
        ),
    )


def _check_word(field: str, word: str | None, known: Sequence[str | None], notes: Notes) -> None:
    if word not in known:
        words = ", ".join(w for w in known if w)
        notes.add(field, f"{word!r} is unknown and was ignored; write one of {words}")


def _policy_local(field: str, word: str | None, notes: Notes) -> bool:
    _check_word(field, word, _POLICIES, notes)
    return word == "Local"


def _external_policy_local(spec: ServiceSpec, notes: Notes) -> bool:
    """Whether the policy is Local and the Service is externally accessible by its spec (SPEC 3)."""
    accessible = spec.type in ("LoadBalancer", "NodePort") or (
        spec.type == "ClusterIP" and bool(spec.external_ips)
    )
    word = spec.external_traffic_policy
    return _policy_local("spec.externalTrafficPolicy", word, notes) and accessible


def _affinity_seconds(spec: ServiceSpec, notes: Notes) -> int:
    if spec.session_affinity != "ClientIP":
        _check_word("spec.sessionAffinity", spec.session_affinity, _AFFINITIES, notes)
        return 0
    config = spec.session_affinity_config
    given = config.client_ip.timeout_seconds if config and config.client_ip else None
    seconds = affinity_timeout(given)
    if given is not None and given != seconds:
        field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
        limits = f"must be 1 to {MAX_AFFINITY_SECONDS}"
        notes.add(field, f"{given} {limits}; {DEFAULT_AFFINITY_SECONDS} is used")
    return seconds


def _external_ips(spec: ServiceSpec, notes: Notes) -> tuple[str, ...]:
    out = []
    for i, text in enumerate(spec.external_ips or ()):
        address = canonical_ip(text.strip())
        if address is not None:
            out.append(address)
        elif text.strip():
            notes.add(f"spec.externalIPs[{i}]", f"{text!r} is not an IP address; ignored")
    return tuple(out)


def _vips(service: Service, notes: Notes) -> tuple[str, ...]:
    balancer = service.status.load_balancer if service.status else None
    out = []
    for i, ingress in enumerate((balancer.ingress if balancer else None) or ()):
        field = f"status.loadBalancer.ingress[{i}]"
        _check_word(f"{field}.ipMode", ingress.ip_mode, (None, "VIP", "Proxy"), notes)
        if not ingress.ip or ingress.ip_mode not in (None, "VIP"):
            continue
        address = canonical_ip(ingress.ip)
        if address is None:
            notes.add(f"{field}.ip", f"{ingress.ip!r} is not an IP address; ignored")
        else:
            out.append(address)
    return tuple(out)


def _check_vips(shared: _Shared, cluster_ips: Mapping[Family, str], notes: Notes) -> None:
    """Warn where a VIP is served as something else, for which no source ranges count."""
    for vip in shared.vips if shared.ranges else ():
        if vip in shared.external_ips or vip in cluster_ips.values():
            reason = f"{vip} is also the clusterIP or an externalIP: source ranges do not guard it"
            notes.add("status.loadBalancer.ingress", f"{reason}; give it to one of them only")


def _ranges(texts: Sequence[str] | None, notes: Notes) -> tuple[str, ...]:
    out = []
    for i, text in enumerate(texts or ()):
        cidr = canonical_cidr(text.strip())
        if cidr is not None:
            out.append(cidr)
        elif text.strip():
            reason = f"{text!r} is not a CIDR such as 192.0.2.0/24; nobody is let in by it"
            notes.add(f"spec.loadBalancerSourceRanges[{i}]", reason)
    if texts and not out:
        reason = "no valid CIDR is left: everyone may use the load balancer; correct the list"
        notes.add("spec.loadBalancerSourceRanges", reason)
    return tuple(out)


def _health_check_node_port(spec: ServiceSpec, external_local: bool, notes: Notes) -> int:
    if spec.type != "LoadBalancer" or not external_local or not spec.health_check_node_port:
        return 0
    return _port_number("spec.healthCheckNodePort", spec.health_check_node_port, notes)


def _port_number(field: str, number: int, notes: Notes) -> int:
    """Return a port number, 0 where it is none."""
    if 0 <= number <= MAX_PORT:
        return number
    notes.add(field, f"{number} must be 1 to {MAX_PORT}; ignored")
    return 0


def _ports(service: Service, notes: Notes) -> list[tuple[ServicePortName, int, int]]:
    """Name, port and node port of each port; the last of several of one name counts (upstream)."""
    out = {}
    for i, port in enumerate(service.spec.ports or ()):
        protocol = PROTOCOLS.get(port.protocol)
        if protocol is None:
            _unknown_protocol(f"spec.ports[{i}].protocol", port.protocol, notes)
            continue
        namespace, name = service.metadata.namespace, service.metadata.name
        key = ServicePortName(namespace, name, port.name or "", protocol)
        if key in out:
            reason = f"another port is also called {port.name or ''!r}; only this one is served"
            notes.add(f"spec.ports[{i}].name", reason)
        out[key] = (key, *_numbers(i, port, notes))
    return list(out.values())


def _unknown_protocol(field: str, word: str | None, notes: Notes) -> None:
    reason = f"{word!r} is not TCP, UDP or SCTP; the port is not served"
    notes.add(field, reason, Severity.ERROR)


def _numbers(index: int, port: KubePort, notes: Notes) -> tuple[int, int]:
    if not 0 < port.port <= MAX_PORT:
        reason = f"{port.port} must be 1 to {MAX_PORT}; the port is not served"
        notes.add(f"spec.ports[{index}].port", reason, Severity.ERROR)
    if not port.node_port:
        return port.port, 0
    return port.port, _port_number(f"spec.ports[{index}].nodePort", port.node_port, notes)


def _specs(
    address: str,
    family: Family,
    shared: _Shared,
    ports: Sequence[tuple[ServicePortName, int, int]],
) -> PortSpecs:
    external_ips: tuple[str, ...] = ()
    vips: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    if shared.external_ips or shared.vips or shared.ranges:
        external_ips, vips, ranges = _external_of_family(shared, family)
    return {
        name: PortSpec(
            address,
            port,
            name.protocol,
            node_port,
            external_ips,
            vips,
            ranges,
            shared.health_check_node_port,
            shared.session_affinity,
            shared.affinity_seconds,
            shared.external_policy_local,
            shared.internal_policy_local,
        )
        for name, port, node_port in ports
    }


def _external_of_family(
    shared: _Shared, family: Family
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return external IPs, VIPs and source ranges; a range of everything is no restriction."""
    ranges = _of_family(shared.ranges, family)
    if any(cidr.endswith("/0") for cidr in ranges):
        ranges = ()
    return _of_family(shared.external_ips, family), _of_family(shared.vips, family), ranges


def _of_family(addresses: tuple[str, ...], family: Family) -> tuple[str, ...]:
    return tuple(a for a in addresses if family_of(a) is family)
