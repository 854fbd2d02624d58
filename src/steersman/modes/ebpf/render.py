"""From plans to what the BPF maps hold. Pure; keys and values are those of layout.py."""

from __future__ import annotations

import msgspec

from steersman.model.names import Family
from steersman.model.plan import (
    FamilySettings,
    Frontend,
    FrontendKind,
    NodeSettings,
    Pool,
    ServicePlan,
    SourceClass,
)
from steersman.modes.ebpf import layout, maglev
from steersman.modes.ebpf.layout import Kind, pack_action, pack_address, pack_cidr

_CLASSES = (SourceClass.POD, SourceClass.NODE, SourceClass.EXTERNAL)
"""In the order of `enum source_class`."""


class Programs(msgspec.Struct, frozen=True):
    """What rendering has to know beside the plan."""

    digest: bytes
    """Of the object that is to be attached, 16 bytes."""
    guard_node_ports: bool = True
    """Whether processes of the node may not bind to a node port in use."""


def render_node(settings: NodeSettings, programs: Programs) -> dict[bytes, bytes]:
    """Render what belongs to the node: programs, configuration, addresses of node ports."""
    out: dict[bytes, bytes] = {
        Kind.PROGRAMS.value: programs.digest,
        Kind.CONFIG.value: _config(settings, programs),
    }
    for family in settings.families:
        own = settings.family(family)
        for address in _node_port_addresses(own):
            out[Kind.NODE_IP + pack_address(address)] = b""
        for cidr in own.service_cidrs:
            out[_prefix(layout.PREFIXES_SERVICE_CIDRS, cidr)] = b""
        if own.detector.cidr:
            out[_prefix(layout.PREFIXES_PODS, own.detector.cidr)] = b""
    return out


def _prefix(number: int, cidr: str) -> bytes:
    return Kind.PREFIX + number.to_bytes(4, "big") + pack_cidr(cidr)


def _node_port_addresses(own: FamilySettings) -> tuple[str, ...]:
    """Addresses that serve node ports; loopback is the business of a flag."""
    if own.node_port_addresses is not None:
        return own.node_port_addresses
    return tuple(
        address
        for address in own.local_addresses
        if not address.startswith("127.") and address != "::1"
    )


def _config(settings: NodeSettings, programs: Programs) -> bytes:
    own = [settings.family(family) for family in settings.families]
    detectors = [each.detector for each in own]
    interface = next((d.interface for d in detectors if d.interface), "")
    prefix = next((d.interface_prefix for d in detectors if d.interface_prefix), "")
    flags = 0
    if any(detector.cidr for detector in detectors):
        flags |= layout.CONFIG_DETECTOR_CIDR
    if interface or prefix:
        flags |= layout.CONFIG_DETECTOR_DEVICE
    if settings.ipv4.localhost_node_ports and Family.IPV4 in settings.families:
        flags |= layout.CONFIG_LOCALHOST_NODE_PORTS
    if programs.guard_node_ports:
        flags |= layout.CONFIG_GUARD_NODE_PORTS
    return layout.NODE_VALUE.pack(
        _optional(settings.ipv4.node_ip),
        _optional(settings.ipv6.node_ip),
        flags,
        interface.encode(),
        prefix.encode(),
    )


def _optional(address: str) -> bytes:
    return pack_address(address) if address else bytes(16)


def render_service(plan: ServicePlan) -> dict[bytes, bytes]:
    """Render one ServicePort: its endpoints, its frontends, and who may use them."""
    name = layout.service_name(plan.key)
    out: dict[bytes, bytes] = {}
    for frontend in plan.frontends:
        key = frontend_key(plan, frontend)
        out[Kind.FRONTEND + key] = _frontend(frontend) + name
        for cidr in frontend.source_ranges:
            out[Kind.RANGE + pack_cidr(cidr) + name] = b""
    if out:
        out[Kind.SERVICE + name] = layout.join_service(
            layout.ServiceValue(
                plan.affinity_seconds,
                _endpoints(plan, Pool.CLUSTER) if plan.uses_cluster else b"",
                _endpoints(plan, Pool.LOCAL) if plan.uses_local else b"",
            )
        )
        if plan.maglev and plan.uses_cluster and plan.cluster:
            out[Kind.MAGLEV + name] = maglev.table([*map(layout.pack_endpoint, plan.cluster)])
    return out


def _endpoints(plan: ServicePlan, pool: Pool) -> bytes:
    return b"".join(map(layout.pack_endpoint, plan.pool(pool)))


def frontend_key(plan: ServicePlan, frontend: Frontend) -> bytes:
    """Key of a frontend in the maps."""
    family = plan.key.family
    address = pack_address(frontend.address) if frontend.address else layout.UNSPECIFIED[family]
    protocol = plan.key.name.protocol.number
    return layout.FRONTEND_KEY.pack(address, frontend.port, protocol)


def _frontend(frontend: Frontend) -> bytes:
    actions = 0
    for place, source in enumerate(_CLASSES):
        actions |= pack_action(frontend.action(source)) << 4 * place
    flags = layout.FRONTEND_RANGES if frontend.source_ranges else 0
    if frontend.kind is FrontendKind.CLUSTER_IP:
        flags |= layout.FRONTEND_CLUSTER_IP
    return layout.FRONTEND_VALUE.pack(actions, flags)
