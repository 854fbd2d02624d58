"""Node-wide settings from configuration, Node object and machine (behaviour 1.5, 6, 13)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from steersman.compile.notes import Notes
from steersman.model.addresses import (
    canonical_cidr,
    canonical_ip,
    family_of,
    in_cidr,
    is_loopback,
)
from steersman.model.findings import Finding, Severity
from steersman.model.inputs import DetectLocalMode, HostFacts, NodeConfig, Snapshot
from steersman.model.kube import Node
from steersman.model.names import Family
from steersman.model.plan import FamilySettings, LocalDetector, NodeSettings, Traits, Value

UNDETERMINED = {Family.IPV4: "127.0.0.1", Family.IPV6: "::1"}
"""What stands for a node IP that is not known (behaviour 1.5)."""
PRIMARY = "primary"


class NodeIPs(Value, frozen=True):
    """This node's own addresses (behaviour 1.5)."""

    ipv4: str = UNDETERMINED[Family.IPV4]
    ipv6: str = UNDETERMINED[Family.IPV6]
    primary: Family | None = None
    """The family that the Node object or the bind address puts first; None where neither does."""

    def of(self, family: Family) -> str:
        """The address in one family; a loopback one where it is not known."""
        return self.ipv4 if family is Family.IPV4 else self.ipv6


class Totals(Value, frozen=True):
    """How much there is, and what was said of it last time."""

    services: int = 0
    """ServicePlans."""
    endpoints: int = 0
    """Reachable endpoints over all ServicePlans."""
    split_dispatch: bool = False
    large_cluster: bool = False


def zone_of(node: Node | None) -> str:
    """Return the zone of this node, "" where it has none."""
    labels = node.metadata.labels if node else None
    return (labels.zone if labels else None) or ""


def node_name_of(config: NodeConfig, facts: HostFacts) -> str:
    """Return this node's name: as configured, else the host's (behaviour 1.1 step 3)."""
    return (config.node_name or facts.hostname).strip().lower()


def node_ips(node: Node | None, config: NodeConfig) -> NodeIPs:
    """Return this node's addresses from its Node object and the bind address (behaviour 1.5)."""
    found: dict[Family, str] = {}
    for address in _host_addresses(node):
        found.setdefault(family_of(address), address)
    primary = next(iter(found), None)
    bind = canonical_ip(config.bind_address)
    if bind is not None and bind not in ("0.0.0.0", "::"):
        primary = family_of(bind)
        found[primary] = bind
    addresses = UNDETERMINED | found
    return NodeIPs(addresses[Family.IPV4], addresses[Family.IPV6], primary)


def _host_addresses(node: Node | None) -> list[str]:
    addresses = (node.status.addresses if node and node.status else None) or []
    ordered = [a.address for a in addresses if a.type == "InternalIP"]
    ordered += [a.address for a in addresses if a.type == "ExternalIP"]
    return [ip for text in ordered if (ip := canonical_ip(text)) is not None]


def detectors(
    config: NodeConfig, node: Node | None
) -> tuple[dict[Family, LocalDetector], tuple[Finding, ...]]:
    """Return how pods are recognised in each family; falsy if they are not."""
    notes = Notes("configuration")
    return _detectors(config, node, notes), notes.findings


def _detectors(config: NodeConfig, node: Node | None, notes: Notes) -> dict[Family, LocalDetector]:
    match config.detect_local_mode:
        case DetectLocalMode.BRIDGE_INTERFACE:
            return dict.fromkeys(Family, LocalDetector(interface=config.bridge_interface))
        case DetectLocalMode.INTERFACE_NAME_PREFIX:
            return dict.fromkeys(
                Family, LocalDetector(interface_prefix=config.interface_name_prefix)
            )
        case DetectLocalMode.NODE_CIDR:
            return _by_cidr("podCIDRs", _pod_cidrs(node), notes)
        case _:
            return _by_cidr("clusterCIDRs", config.cluster_cidrs, notes)


def _pod_cidrs(node: Node | None) -> Sequence[str]:
    if node is None:
        return ()
    return node.spec.pod_cidrs or [node.spec.pod_cidr or ""]


def _by_cidr(field: str, texts: Iterable[str], notes: Notes) -> dict[Family, LocalDetector]:
    out = dict.fromkeys(Family, LocalDetector())
    for index, text in enumerate(texts):
        cidr = canonical_cidr(text.strip())
        if cidr is None:
            if text.strip():
                notes.add(
                    f"{field}[{index}]", f"{text!r} is not a CIDR such as 10.0.0.0/8; ignored"
                )
        elif not out[family_of(cidr)]:
            out[family_of(cidr)] = LocalDetector(cidr=cidr)
    return out


def node_settings(
    snapshot: Snapshot,
    config: NodeConfig,
    facts: HostFacts,
    traits: Traits,
    totals: Totals = Totals(),  # noqa: B008 - immutable
) -> tuple[NodeSettings, tuple[Finding, ...]]:
    """Work out the node-wide part of the plan, and what is wrong with it."""
    ips = node_ips(snapshot.node, config)
    families = _families(config, facts, ips)
    found, findings = detectors(config, snapshot.node)
    notes = Notes("configuration")
    _check_families(config, families, found, notes)
    by_family = {
        family: FamilySettings(
            detector=found[family],
            node_ip=ips.of(family),
            service_cidrs=tuple(c for c in snapshot.service_cidrs if family_of(c) is family),
            **_addresses(family, ips, config, facts, traits),
        )
        for family in families
    }
    settings = NodeSettings(
        node_name=node_name_of(config, facts),
        families=families,
        ipv4=by_family.get(Family.IPV4, FamilySettings()),
        ipv6=by_family.get(Family.IPV6, FamilySettings()),
        masquerade_all=config.masquerade_all,
        falls_back=config.local_falls_back,
        masquerade_bit=config.masquerade_bit,
        traits=traits,
    )
    return with_totals(settings, config, totals), findings + notes.findings


def with_totals(settings: NodeSettings, config: NodeConfig, totals: Totals) -> NodeSettings:
    """Return the settings with the flags that follow from how much there is.

    A flag goes on above its threshold and off at half of it, so that a cluster near the threshold
    does not switch back and forth; a threshold of 0 keeps it off.
    """
    services = _many(totals.services, config.split_threshold, totals.split_dispatch)
    endpoints = _many(totals.endpoints, config.large_cluster_endpoints, totals.large_cluster)
    if (services, endpoints) == (settings.split_dispatch, settings.large_cluster):
        return settings
    return msgspec.structs.replace(settings, split_dispatch=services, large_cluster=endpoints)


def _many(total: int, threshold: int, before: bool) -> bool:
    return threshold > 0 and total > (threshold // 2 if before else threshold)


def _families(config: NodeConfig, facts: HostFacts, ips: NodeIPs) -> tuple[Family, ...]:
    served = [f for f in config.families if facts.ipv6 or f is not Family.IPV6]
    return tuple(sorted(served, key=lambda family: family is not (ips.primary or served[0])))


def _addresses(
    family: Family, ips: NodeIPs, config: NodeConfig, facts: HostFacts, traits: Traits
) -> dict[str, Any]:
    """Return the fields of FamilySettings about local addresses and node ports."""
    local = local_addresses(facts, family)
    cidrs = _node_port_cidrs(config, ips, family)
    return {
        "local_addresses": local,
        "node_port_addresses": _node_port_addresses(local, cidrs),
        "localhost_node_ports": config.localhost_node_ports
        and _serves_loopback(family, config, cidrs, traits),
    }


def _serves_loopback(
    family: Family, config: NodeConfig, cidrs: tuple[str, ...], traits: Traits
) -> bool:
    """Whether the mode can serve node ports on loopback, and the CIDRs do not exclude it."""
    if traits.relays_localhost:
        return PRIMARY in config.node_port_addresses or _includes_loopback(cidrs, family)
    can = traits.localhost_node_ports and family is Family.IPV4
    return can and _includes_loopback(cidrs, family)


def local_addresses(facts: HostFacts, family: Family) -> tuple[str, ...]:
    """Return this machine's addresses in one family, loopback included, sorted."""
    found = {
        address.partition("/")[0]
        for addresses in facts.interfaces.values()
        for address in addresses
        if family_of(address) is family
    }
    return tuple(sorted(found))


def _node_port_cidrs(config: NodeConfig, ips: NodeIPs, family: Family) -> tuple[str, ...]:
    """Return the node-port CIDRs of one family; () means all (behaviour 1.1, 6)."""
    if PRIMARY in config.node_port_addresses:
        ip = ips.of(family)
        return () if is_loopback(ip) else (f"{ip}/{family.bits}",)
    cidrs = [canonical_cidr(text.strip()) for text in config.node_port_addresses]
    mine = tuple(c for c in cidrs if c is not None and family_of(c) is family)
    return () if any(cidr.endswith("/0") for cidr in mine) else mine


def _node_port_addresses(local: tuple[str, ...], cidrs: tuple[str, ...]) -> tuple[str, ...] | None:
    if not cidrs:
        return None
    return tuple(a for a in local if not is_loopback(a) and any(in_cidr(a, cidr) for cidr in cidrs))


def _includes_loopback(cidrs: tuple[str, ...], family: Family) -> bool:
    address = "127.0.0.1" if family is Family.IPV4 else "::1"
    return not cidrs or any(c.startswith("127.") or in_cidr(address, c) for c in cidrs)


def _check_families(
    config: NodeConfig,
    families: tuple[Family, ...],
    found: Mapping[Family, LocalDetector],
    notes: Notes,
) -> None:
    if not families:
        reason = "this machine has none of the families to serve: nothing is programmed"
        notes.add("families", f"{reason}; enable IPv6 in the kernel", Severity.ERROR)
    if any(found.values()) and not any(found[family] for family in families):
        reason = "no CIDR is of a family that is served: pods cannot be told from other clients"
        notes.add("detectLocal", f"{reason}; give one for each family", Severity.ERROR)
    _check_node_port_addresses(config, families, notes)


def _check_node_port_addresses(
    config: NodeConfig, families: tuple[Family, ...], notes: Notes
) -> None:
    texts = [text for text in config.node_port_addresses if text != PRIMARY]
    cidrs = [canonical_cidr(text.strip()) for text in texts]
    for index, cidr in enumerate(cidrs):
        if cidr is None:
            reason = f"{texts[index]!r} is not a CIDR such as 192.0.2.0/24; ignored"
            notes.add(f"nodePortAddresses[{index}]", reason)
    given = {family_of(cidr) for cidr in cidrs if cidr is not None}
    for family in families:
        if texts and family not in given and PRIMARY not in config.node_port_addresses:
            reason = f"has no {family.kubernetes} CIDR: every {family.kubernetes} address serves"
            notes.add("nodePortAddresses", f"{reason} node ports; add one to restrict them")
