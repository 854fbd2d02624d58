"""Node-wide settings from configuration, Node object and machine (behaviour 1.5, 6, 13)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from steersman.compile.findings import FindingCollector
from steersman.model import codes
from steersman.model.addresses import canonical_cidr, canonical_ip, family_of, in_cidr, is_loopback
from steersman.model.findings import Finding, Severity
from steersman.model.inputs import DetectLocalMode, HostFacts, NodeConfig, Snapshot
from steersman.model.kube import Node
from steersman.model.names import Family
from steersman.model.plan import FamilySettings, LocalDetector, NodeSettings, Traits

_LOOPBACK = {Family.IPV4: "127.0.0.1", Family.IPV6: "::1"}
_NODE_ADDRESSES = ("InternalIP", "ExternalIP")
PRIMARY = "primary"
"""The word in `nodePortAddresses` that stands for the node IPs."""


def zone_of(node: Node | None) -> str:
    """Return the zone of this node, "" if it has none."""
    return node.zone if node else ""


def node_name_of(config: NodeConfig, facts: HostFacts) -> str:
    """Return this node's name: as configured, otherwise the host's (behaviour 1.1 step 3)."""
    return (config.node_name or facts.hostname).strip().lower()


def config_of_node(config: NodeConfig, name: str) -> NodeConfig:
    """Return the configuration as it would be on another node of the same cluster."""
    # A bind address is one of the machine that the configuration was written for.
    return msgspec.structs.replace(config, node_name=name, bind_address="0.0.0.0")


def is_this_machine(name: str, node: Node | None, facts: HostFacts) -> bool:
    """Return whether a node is the machine of these facts.

    The addresses of its Node object decide; without any, the hostname.
    """
    of_node = facts_of_node(name, node).interfaces["node"]
    if not of_node:
        return name == facts.hostname
    own = {text.partition("/")[0] for texts in facts.interfaces.values() for text in texts}
    return any(text.partition("/")[0] in own for text in of_node)


def facts_of_node(name: str, node: Node | None) -> HostFacts:
    """Return the facts of another machine, as far as its Node object has them.

    Its addresses are those of the Node object and loopback; without an object, loopback alone.
    """
    listed = node.addresses if node else ()
    found = (canonical_ip(each.address) for each in listed if each.type in _NODE_ADDRESSES)
    addresses = tuple(dict.fromkeys(f"{ip}/{family_of(ip).bits}" for ip in found if ip))
    return HostFacts(name, {"lo": ("127.0.0.1/8", "::1/128"), "node": addresses})


def node_ips(node: Node | None, config: NodeConfig) -> dict[Family, str]:
    """Return this node's address in each family in which it is known, the primary one first.

    They come from the Node object and the bind address (behaviour 1.5).
    """
    # The first InternalIP of a family, or else its first ExternalIP.
    addresses = node.addresses if node else ()
    found: dict[Family, str] = {}
    for kind in _NODE_ADDRESSES:
        for address in addresses:
            ip = canonical_ip(address.address) if address.type == kind else None
            if ip is not None:
                found.setdefault(family_of(ip), ip)
    # A bind address takes precedence in its family, which becomes the primary one.
    bind = canonical_ip(config.bind_address)
    if bind is not None and bind not in ("0.0.0.0", "::"):
        found.pop(family_of(bind), None)
        found = {family_of(bind): bind} | found
    return found


def missing_cluster_cidr(config: NodeConfig) -> str:
    """Return the consequence of an empty clusterCIDR if pods would be recognised by it, else ""."""
    if config.detect_local_mode is not DetectLocalMode.CLUSTER_CIDR or config.cluster_cidrs:
        return ""
    return (
        "is empty: pods cannot be recognised, so their traffic is treated like that of clients"
        " outside; set --cluster-cidr, or another way by --detect-local-mode"
    )


def detectors(
    config: NodeConfig, node: Node | None
) -> tuple[dict[Family, LocalDetector], tuple[Finding, ...]]:
    """Return the detector of local pods by family, falsy if there is none, and Findings."""
    texts: Iterable[str]
    match config.detect_local_mode:
        case DetectLocalMode.BRIDGE_INTERFACE:
            return dict.fromkeys(Family, LocalDetector(interface=config.bridge_interface)), ()
        case DetectLocalMode.INTERFACE_NAME_PREFIX:
            prefix = config.interface_name_prefix
            return dict.fromkeys(Family, LocalDetector(interface_prefix=prefix)), ()
        case DetectLocalMode.NODE_CIDR:
            field, texts = "podCIDRs", node.pod_cidrs if node else ()
        case _:
            field, texts = "clusterCIDRs", config.cluster_cidrs
    problems = FindingCollector("configuration", codes.CONFIGURATION)
    out = dict.fromkeys(Family, LocalDetector())
    for index, text in enumerate(texts):
        cidr = canonical_cidr(text.strip())
        if cidr is not None and not out[family_of(cidr)]:  # the first one of a family counts
            out[family_of(cidr)] = LocalDetector(cidr=cidr)
        elif cidr is None and text.strip():
            reason = f"{text!r} is not a CIDR such as 10.0.0.0/8; ignored"
            problems.add(f"{field}[{index}]", reason)
    return out, problems.findings


def node_settings(
    snapshot: Snapshot, config: NodeConfig, facts: HostFacts, traits: Traits
) -> tuple[NodeSettings, tuple[Finding, ...]]:
    """Return the node-wide part of an empty plan, and the problems of the configuration."""
    # The primary family comes first: that of the node IP, or else the first one configured.
    ips = node_ips(snapshot.node, config)
    served = [f for f in config.families if facts.ipv6 or f is not Family.IPV6]
    primary = next(iter(ips), None) or next(iter(served), None)
    families = tuple(sorted(served, key=lambda family: family is not primary))
    found, findings = detectors(config, snapshot.node)
    by_family = {
        family: msgspec.structs.replace(
            _address_settings(family, ips, config, facts, traits),
            detector=found[family],
            service_cidrs=tuple(c for c in snapshot.service_cidrs if family_of(c) is family),
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
    # The rest only reports problems of the configuration.
    problems = FindingCollector("configuration", codes.CONFIGURATION)
    if not families:
        reason = "this machine has none of the families to serve: nothing is programmed"
        problems.add("families", f"{reason}; enable IPv6 in the kernel", Severity.ERROR)
    if any(found.values()) and not any(found[family] for family in families):
        reason = "no CIDR is of a family that is served: pods cannot be recognised"
        problems.add("detectLocal", f"{reason}; give one for each family", Severity.ERROR)
    texts = [text for text in config.node_port_addresses if text != PRIMARY]
    cidrs = [canonical_cidr(text.strip()) for text in texts]
    for index, cidr in enumerate(cidrs):
        if cidr is None:
            reason = f"{texts[index]!r} is not a CIDR such as 192.0.2.0/24; ignored"
            problems.add(f"nodePortAddresses[{index}]", reason)
    given = {family_of(cidr) for cidr in cidrs if cidr is not None}
    for family in families:
        if texts and family not in given and PRIMARY not in config.node_port_addresses:
            reason = f"has no {family.kubernetes} CIDR: every {family.kubernetes} address serves"
            problems.add("nodePortAddresses", f"{reason} node ports; add one to restrict them")
    return settings, findings + problems.findings


def local_addresses(facts: HostFacts, family: Family) -> tuple[str, ...]:
    """Return this machine's addresses in one family, loopback included, sorted."""
    found = {
        address.partition("/")[0]
        for addresses in facts.interfaces.values()
        for address in addresses
        if family_of(address) is family
    }
    return tuple(sorted(found))


def _address_settings(
    family: Family, ips: Mapping[Family, str], config: NodeConfig, facts: HostFacts, traits: Traits
) -> FamilySettings:
    """Return the settings about this node's addresses in one family (behaviour 1.1, 1.5, 6)."""
    # As long as the node's address is unknown, a loopback address stands for it.
    ip, local = ips.get(family, _LOOPBACK[family]), local_addresses(facts, family)
    primary = PRIMARY in config.node_port_addresses
    # The CIDRs that serve node ports; () means that all addresses do.
    cidrs: tuple[str, ...] = ()
    if primary and not is_loopback(ip):
        cidrs = (f"{ip}/{family.bits}",)
    elif not primary:
        given = [canonical_cidr(text.strip()) for text in config.node_port_addresses]
        cidrs = tuple(cidr for cidr in given if cidr is not None and family_of(cidr) is family)
        if any(cidr.endswith("/0") for cidr in cidrs):
            cidrs = ()
    serving = [a for a in local if not is_loopback(a) and any(in_cidr(a, c) for c in cidrs)]
    # Loopback is served if the mode can do it and the CIDRs include it. A mode that relays
    # loopback by sockets of its own serves it beside the primary addresses, too.
    by_rules = traits.localhost_node_ports and family is Family.IPV4
    included = not cidrs or any(
        cidr.startswith("127.") or in_cidr(_LOOPBACK[family], cidr) for cidr in cidrs
    )
    serves_loopback = (traits.relays_localhost and (primary or included)) or (by_rules and included)
    return FamilySettings(
        node_ip=ip,
        local_addresses=local,
        node_port_addresses=tuple(serving) if cidrs else None,
        localhost_node_ports=config.localhost_node_ports and serves_loopback,
    )
