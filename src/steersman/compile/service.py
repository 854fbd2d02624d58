"""From a Service to its ServicePorts, family by family (behaviour 3).

Reads every field leniently: what is malformed becomes a Finding and the rest of the object is
served. Knows nothing of endpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from steersman.compile.fields import Shared, read_shared, within_limits
from steersman.compile.notes import MAX_PORT, PROTOCOLS, Notes, port_number
from steersman.model.addresses import canonical_ip, family_of
from steersman.model.findings import Finding, Severity, quoted
from steersman.model.kube import Service, ServiceSpec
from steersman.model.kube import ServicePort as KubePort
from steersman.model.names import Family, Protocol, ServicePortName
from steersman.model.plan import Value

MAX_PORTS = 10_000
"""Ports of a Service that are served (docs/limits.md)."""
_NEITHER = ("", "None")
_FAMILIES = {family.kubernetes: family for family in Family}


class PortSpec(Value, frozen=True):
    """What one port of a Service asks for in one family (behaviour 3)."""

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
    to another proxy: behaviour 2, 3) has none, and no Findings. A family without a clusterIP is
    left out.
    """
    if not is_served(service):
        return {}, ()
    notes = Notes("Service", service.metadata)
    addresses = _cluster_ips(service.spec, families, notes)
    if not addresses:
        return {}, notes.findings
    shared = read_shared(service, allow_external_ips, notes)
    _check_vips(shared, addresses, notes)
    ports = _ports(service, notes)
    if shared.external_ips or shared.vips:
        shared = within_limits(shared, len(ports), notes)
    return {
        family: _specs(address, family, shared, ports) for family, address in addresses.items()
    }, notes.findings


def is_served(service: Service) -> bool:
    """Whether a Service is this proxy's to serve at all (behaviour 2, 3)."""
    spec, labels = service.spec, service.metadata.labels
    return (
        bool(spec.cluster_ip)
        and spec.cluster_ip != "None"
        and spec.type != "ExternalName"
        and (labels is None or labels.proxy_name is None)
    )


def _cluster_ips(spec: ServiceSpec, families: Iterable[Family], notes: Notes) -> dict[Family, str]:
    if not spec.ip_families:
        return _only_cluster_ip(spec.cluster_ip or "", families, notes)
    out: dict[Family, str] = {}
    for index, word in enumerate(spec.ip_families):
        family = _FAMILIES.get(word)
        if family is None:
            notes.add(f"spec.ipFamilies[{index}]", f"{quoted(word)} is not IPv4 or IPv6; ignored")
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
        reason = f"{quoted(text)} is not an IP address; the Service is not served there until it is"
        notes.add(field, reason, Severity.ERROR)
    return address


def _check_vips(shared: Shared, cluster_ips: Mapping[Family, str], notes: Notes) -> None:
    """Warn where a VIP is served as something else, for which no source ranges count."""
    if not (shared.vips and shared.ranges):
        return
    others = {*shared.external_ips, *cluster_ips.values()}
    for vip in shared.vips:
        if vip in others:
            reason = f"{vip} is also the clusterIP or an externalIP: source ranges do not guard it"
            notes.add("status.loadBalancer.ingress", f"{reason}; give it to one of them only")


def _ports(service: Service, notes: Notes) -> list[tuple[ServicePortName, int, int]]:
    """Name, port and node port of each port; the last of several of one name counts (upstream)."""
    out = {}
    listed = service.spec.ports or []
    if len(listed) > MAX_PORTS:
        listed = listed[:MAX_PORTS]
        reason = f"has {len(service.spec.ports or ())} entries, of which {MAX_PORTS} are served"
        notes.add("spec.ports", f"{reason}; divide the Service", Severity.ERROR)
    for i, port in enumerate(listed):
        protocol = PROTOCOLS.get(port.protocol)
        if protocol is None:
            _unknown_protocol(f"spec.ports[{i}].protocol", port.protocol, notes)
            continue
        key = ServicePortName(*service.metadata.object_name, port.name or "", protocol)
        if key in out:
            name = quoted(port.name or "")
            reason = f"another port is also called {name}; only this one is served"
            notes.add(f"spec.ports[{i}].name", reason)
        out[key] = (key, *_numbers(i, port, notes))
    return list(out.values())


def _unknown_protocol(field: str, word: str | None, notes: Notes) -> None:
    reason = f"{quoted(word)} is not TCP, UDP or SCTP; the port is not served"
    notes.add(field, reason, Severity.ERROR)


def _numbers(index: int, port: KubePort, notes: Notes) -> tuple[int, int]:
    if not 0 < port.port <= MAX_PORT:
        reason = f"{port.port} must be 1 to {MAX_PORT}; the port is not served"
        notes.add(f"spec.ports[{index}].port", reason, Severity.ERROR)
    if not port.node_port:
        return port.port, 0
    return port.port, port_number(f"spec.ports[{index}].nodePort", port.node_port, notes)


def _specs(
    address: str,
    family: Family,
    shared: Shared,
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
    shared: Shared, family: Family
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return external IPs, VIPs and source ranges; a range of everything is no restriction."""
    ranges = _of_family(shared.ranges, family)
    if any(cidr.endswith("/0") for cidr in ranges):
        ranges = ()
    return _of_family(shared.external_ips, family), _of_family(shared.vips, family), ranges


def _of_family(addresses: tuple[str, ...], family: Family) -> tuple[str, ...]:
    return tuple(a for a in addresses if family_of(a) is family)
