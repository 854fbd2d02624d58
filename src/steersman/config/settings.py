"""From a valid configuration to what the other parts of the program take.

ProxyConfig --to_node_config--> NodeConfig     what shapes plans
            --to_mode_options--> ModeOptions   what modes read
            --to_failover_settings--> Settings
"""

from __future__ import annotations

from typing import Any

from steersman.config.defaults import MASQUERADE_BIT
from steersman.config.features import enabled
from steersman.config.go import Duration
from steersman.config.rules import parse_port_range
from steersman.config.types import ProxyConfig, Section
from steersman.model.addresses import canonical_cidr, canonical_ip
from steersman.model.failover import Settings
from steersman.model.inputs import DetectLocalMode, NodeConfig
from steersman.modes.specs import IpvsOptions, ModeOptions, spec_of


def to_node_config(config: ProxyConfig, *, node_name: str = "") -> NodeConfig:
    """Return the settings that shape plans, of a valid configuration.

    Args:
        node_name: name of the node if `hostnameOverride` gives none.
    """
    # As upstream: the name of the Node object, whose names are in lower case.
    name = (config.hostname_override or node_name).strip().lower()
    spec = spec_of(config.mode)
    bit = config.masquerading.masquerade_bit
    cidrs = (canonical_cidr(cidr) for cidr in config.cluster_cidrs)
    return NodeConfig(
        node_name=name,
        bind_address=canonical_ip(config.bind_address) or "0.0.0.0",
        detect_local_mode=DetectLocalMode(config.detect_local_mode or "ClusterCIDR"),
        cluster_cidrs=tuple(cidr for cidr in cidrs if cidr is not None),
        bridge_interface=config.detect_local.bridge_interface,
        interface_name_prefix=config.detect_local.interface_name_prefix,
        node_port_addresses=tuple(
            canonical_cidr(word) or word for word in config.node_port_addresses
        ),
        localhost_node_ports=config.iptables.localhost_node_ports is not False,
        masquerade_all=config.masquerade_all,
        local_falls_back=spec.local_fallback and config.steersman.ipvs_local_fallback,
        masquerade_bit=MASQUERADE_BIT if bit is None else bit,
        allow_service_external_ips=enabled(config.feature_gates, "AllowServiceExternalIPs"),
        split_threshold=config.steersman.split_threshold,
        large_cluster_endpoints=config.steersman.large_cluster_endpoints,
    )


def to_failover_settings(config: ProxyConfig) -> Settings:
    """Return the parameters of failover, of a valid configuration."""
    return Settings(**in_seconds(config.steersman.failover))


def in_seconds(section: Section) -> dict[str, Any]:
    """Return the fields of a section, durations as numbers of seconds."""
    given = {name: getattr(section, name) for name in section.__struct_fields__}
    times = {name: each.seconds for name, each in given.items() if isinstance(each, Duration)}
    return given | times


def to_mode_options(config: ProxyConfig) -> ModeOptions:
    """Return the settings of modes, of a valid configuration."""
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
        fast_path=block.ebpf_fast_path,
        xdp_devices=block.ebpf_xdp_devices,
        cgroup_root=block.ebpf_cgroup_root,
    )
