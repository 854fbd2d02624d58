"""Convert the v1alpha1 document to the internal form, back, and to the plan's (behaviour 1.3)."""

from __future__ import annotations

from msgspec.structs import replace

from steersman.config.defaults import MASQUERADE_BIT
from steersman.config.features import enabled
from steersman.config.rules import parse_port_range
from steersman.config.types import (
    IPVS,
    V1IPVS,
    ZERO,
    BothForms,
    DetectLocal,
    IPTables,
    KubeProxyConfiguration,
    Linux,
    NFTables,
    ProxyConfig,
    V1DetectLocal,
    V1IPTables,
    V1NFTables,
)
from steersman.model.addresses import canonical_cidr, canonical_ip
from steersman.model.inputs import DetectLocalMode, NodeConfig
from steersman.modes.specs import IpvsOptions, ModeOptions, spec_of

_SHARED = (
    *(name for name in BothForms.__struct_fields__ if name != "feature_gates"),
    "winkernel",
    "detect_local_mode",
    "config_sync_period",
    "port_range",
    "windows_run_as_service",
    "steersman",
)
"""Fields that both forms have alike."""


def to_internal(document: KubeProxyConfiguration) -> ProxyConfig:
    """Pick the settings of the document's mode; nothing is defaulted or checked here."""
    spec = spec_of(document.mode)
    section: V1IPTables | V1NFTables = getattr(document, spec.masquerade_section)
    periods: V1IPTables | V1IPVS | V1NFTables = getattr(document, spec.periods_section)
    return replace(
        ProxyConfig(**{name: getattr(document, name) for name in _SHARED}),
        feature_gates=document.feature_gates or {},
        iptables=IPTables(
            masquerade_bit=document.iptables.masquerade_bit,
            localhost_node_ports=document.iptables.localhost_node_ports,
        ),
        ipvs=_ipvs(document.ipvs),
        nftables=NFTables(masquerade_bit=document.nftables.masquerade_bit),
        detect_local=DetectLocal(
            bridge_interface=document.detect_local.bridge_interface,
            interface_name_prefix=document.detect_local.interface_name_prefix,
            cluster_cidrs=split_cidrs(document.cluster_cidr),
        ),
        node_port_addresses=document.node_port_addresses or (),
        sync_period=periods.sync_period,
        min_sync_period=periods.min_sync_period,
        linux=Linux(
            conntrack=document.conntrack,
            masquerade_all=section.masquerade_all,
            oom_score_adj=document.oom_score_adj,
        ),
    )


def split_cidrs(text: str) -> tuple[str, ...]:
    """`clusterCIDR` as a list; unlike upstream's flag, an empty text is no CIDR at all."""
    return tuple(text.split(",")) if text else ()


def to_v1alpha1(config: ProxyConfig) -> KubeProxyConfiguration:
    """The document that says the same: periods stand in the section of the mode only."""
    return replace(
        KubeProxyConfiguration(**{name: getattr(config, name) for name in _SHARED}),
        feature_gates=config.feature_gates,
        iptables=_v1_iptables(config),
        ipvs=_v1_ipvs(config),
        nftables=_v1_nftables(config),
        detect_local=V1DetectLocal(
            bridge_interface=config.detect_local.bridge_interface,
            interface_name_prefix=config.detect_local.interface_name_prefix,
        ),
        cluster_cidr=",".join(config.detect_local.cluster_cidrs),
        node_port_addresses=config.node_port_addresses or None,
        oom_score_adj=config.linux.oom_score_adj,
        conntrack=config.linux.conntrack,
    )


def to_node_config(config: ProxyConfig, *, node_name: str = "") -> NodeConfig:
    """The part that shapes the plan, of a configuration that passed validation.

    `node_name` is the name to use where `hostnameOverride` gives none.
    """
    spec = spec_of(config.mode)
    bits: IPTables | NFTables = getattr(config, spec.masquerade_section)
    cidrs = (canonical_cidr(cidr) for cidr in config.detect_local.cluster_cidrs)
    return NodeConfig(
        node_name=config.hostname_override or node_name,
        bind_address=canonical_ip(config.bind_address) or "0.0.0.0",
        detect_local_mode=DetectLocalMode(config.detect_local_mode or "ClusterCIDR"),
        cluster_cidrs=tuple(cidr for cidr in cidrs if cidr is not None),
        bridge_interface=config.detect_local.bridge_interface,
        interface_name_prefix=config.detect_local.interface_name_prefix,
        node_port_addresses=tuple(
            canonical_cidr(word) or word for word in config.node_port_addresses
        ),
        localhost_node_ports=config.iptables.localhost_node_ports is not False,
        masquerade_all=config.linux.masquerade_all,
        local_falls_back=spec.local_fallback and config.steersman.ipvs_local_fallback,
        masquerade_bit=MASQUERADE_BIT if bits.masquerade_bit is None else bits.masquerade_bit,
        allow_service_external_ips=enabled(config.feature_gates, "AllowServiceExternalIPs"),
        split_threshold=config.steersman.split_threshold,
        large_cluster_endpoints=config.steersman.large_cluster_endpoints,
    )


def to_mode_options(config: ProxyConfig) -> ModeOptions:
    """Return the operator's settings of modes, of a configuration that passed validation."""
    ports = parse_port_range(config.port_range)
    block, ipvs = config.steersman, config.ipvs
    excluded = (canonical_cidr(cidr) for cidr in ipvs.exclude_cidrs)
    return ModeOptions(
        asked_for=config.mode,
        iptables_variant=block.iptables_variant,
        ipvs=IpvsOptions(
            scheduler=ipvs.scheduler or "rr",
            scheduler_flags=block.ipvs_scheduler_flags,
            exclude_cidrs=tuple(cidr for cidr in excluded if cidr is not None),
            strict_arp=ipvs.strict_arp,
            tcp_timeout=int(ipvs.tcp_timeout.seconds),
            tcp_fin_timeout=int(ipvs.tcp_fin_timeout.seconds),
            udp_timeout=int(ipvs.udp_timeout.seconds),
        ),
        proxy_ports=ports if ports and ports[1] else None,
        udp_idle=block.udp_idle_timeout.seconds,
        portals=block.userspace_portals,
        dns_search=block.dns_search,
        guard_node_ports=block.ebpf_guard_node_ports,
        xdp_devices=block.ebpf_xdp_devices,
        cgroup_root=block.ebpf_cgroup_root,
    )


def _ipvs(given: V1IPVS) -> IPVS:
    return IPVS(
        scheduler=given.scheduler,
        exclude_cidrs=given.exclude_cidrs or (),
        strict_arp=given.strict_arp,
        tcp_timeout=given.tcp_timeout,
        tcp_fin_timeout=given.tcp_fin_timeout,
        udp_timeout=given.udp_timeout,
    )


def _v1_iptables(config: ProxyConfig) -> V1IPTables:
    spec = spec_of(config.mode)
    mine = spec.periods_section == "iptables"
    return V1IPTables(
        masquerade_bit=config.iptables.masquerade_bit,
        masquerade_all=config.linux.masquerade_all and spec.masquerade_section == "iptables",
        localhost_node_ports=config.iptables.localhost_node_ports,
        sync_period=config.sync_period if mine else ZERO,
        min_sync_period=config.min_sync_period if mine else ZERO,
    )


def _v1_ipvs(config: ProxyConfig) -> V1IPVS:
    given, mine = config.ipvs, spec_of(config.mode).periods_section == "ipvs"
    return V1IPVS(
        sync_period=config.sync_period if mine else ZERO,
        min_sync_period=config.min_sync_period if mine else ZERO,
        scheduler=given.scheduler,
        exclude_cidrs=given.exclude_cidrs or None,
        strict_arp=given.strict_arp,
        tcp_timeout=given.tcp_timeout,
        tcp_fin_timeout=given.tcp_fin_timeout,
        udp_timeout=given.udp_timeout,
    )


def _v1_nftables(config: ProxyConfig) -> V1NFTables:
    mine = spec_of(config.mode).periods_section == "nftables"
    return V1NFTables(
        masquerade_bit=config.nftables.masquerade_bit,
        masquerade_all=config.linux.masquerade_all and mine,
        sync_period=config.sync_period if mine else ZERO,
        min_sync_period=config.min_sync_period if mine else ZERO,
    )
