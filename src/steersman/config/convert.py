"""Fill in defaults, and convert between the document and the internal form (behaviour 1.2).

    document --apply_defaults--> document --to_internal--> ProxyConfig --apply_platform_defaults-->
    ProxyConfig --to_node_config--> NodeConfig (for plans), --to_mode_options--> ModeOptions

Zero is "not given" for durations, rates and texts; null for fields that upstream has as pointers.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

from msgspec.structs import replace

from steersman.config.features import enabled
from steersman.config.go import Duration, seconds, with_port
from steersman.config.rules import parse_port_range
from steersman.config.types import (
    IPVS,
    NOTHING,
    V1IPVS,
    ZERO,
    BothForms,
    DetectLocal,
    IPTables,
    KubeProxyConfiguration,
    Linux,
    LogOptions,
    NFTables,
    ProxyConfig,
    Section,
    Steersman,
    V1DetectLocal,
    V1IPTables,
    V1NFTables,
)
from steersman.model.addresses import canonical_cidr, canonical_ip
from steersman.model.failover import Settings
from steersman.model.inputs import DetectLocalMode, NodeConfig
from steersman.modes.specs import DEFAULT_MODE, IpvsOptions, ModeOptions, spec_of

HEALTHZ_PORT: Final = 10256
METRICS_PORT: Final = 10249
_MASQUERADE_BIT: Final = 14
_SYNC_PERIOD = seconds(30)
_MIN_SYNC_PERIOD = seconds(1)
_SectionT = TypeVar("_SectionT", bound=Section)

_SHARED = (
    *(name for name in BothForms.__struct_fields__ if name != "feature_gates"),
    "winkernel",
    "detect_local_mode",
    "config_sync_period",
    "port_range",
    "windows_run_as_service",
    "steersman",
)
"""Fields that are the same in both forms."""


# Defaults


def apply_defaults(config: KubeProxyConfiguration) -> KubeProxyConfiguration:
    """Return a document with upstream's defaults of v1alpha1, and those of our own block."""
    config = _fill(config, bind_address="0.0.0.0", feature_gates={}, oom_score_adj=-999)
    ip = canonical_ip(config.bind_address)
    ipv4 = ip is not None and ":" not in ip
    healthz = config.healthz_bind_address or ("0.0.0.0" if ipv4 else "::")
    metrics = config.metrics_bind_address or ("127.0.0.1" if ipv4 else "::1")
    periods: dict[str, Any] = {"sync_period": _SYNC_PERIOD, "min_sync_period": _MIN_SYNC_PERIOD}
    asked: V1IPTables | V1IPVS | V1NFTables = getattr(config, spec_of(config.mode).periods_section)
    return replace(
        _fill(config, config_sync_period=seconds(15 * 60)),
        client_connection=_fill(
            config.client_connection,
            content_type="application/vnd.kubernetes.protobuf",
            qps=5,
            burst=10,
        ),
        logging=replace(
            _fill(config.logging, format="text", flush_frequency=seconds(5)),
            options=replace(
                config.logging.options,
                text=_log_options(config.logging.options.text),
                json=_log_options(config.logging.options.json),
            ),
        ),
        healthz_bind_address=with_port(healthz, HEALTHZ_PORT),
        metrics_bind_address=with_port(metrics, METRICS_PORT),
        iptables=_fill(
            config.iptables,
            masquerade_bit=_MASQUERADE_BIT,
            localhost_node_ports=True,
            **periods,
        ),
        ipvs=_fill(config.ipvs, sync_period=_SYNC_PERIOD),
        nftables=_fill(config.nftables, masquerade_bit=_MASQUERADE_BIT, **periods),
        conntrack=_fill(
            config.conntrack,
            max_per_core=32768,
            min=131072,
            tcp_established_timeout=seconds(24 * 3600),
            tcp_close_wait_timeout=seconds(3600),
        ),
        steersman=with_min_sync_period(config.steersman, config.mode, asked.min_sync_period),
    )


def _fill(section: _SectionT, **defaults: Any) -> _SectionT:
    """Return a section with defaults for those fields that were not given."""
    zero = type(section)()
    missing = {
        name: value
        for name, value in defaults.items()
        if getattr(section, name) == getattr(zero, name)
    }
    return replace(section, **missing)


def _log_options(given: LogOptions) -> LogOptions:
    return replace(given, info_buffer_size=given.info_buffer_size or NOTHING)


def apply_platform_defaults(config: ProxyConfig) -> ProxyConfig:
    """Return a configuration with upstream's defaults on Linux; call it after flags are merged."""
    mode = config.mode or DEFAULT_MODE
    return replace(
        config,
        mode=mode,
        node_port_addresses=config.node_port_addresses or spec_of(mode).node_port_addresses,
        detect_local_mode=config.detect_local_mode or "ClusterCIDR",
    )


def with_min_sync_period(block: Steersman, mode: str, asked: Duration) -> Steersman:
    """Return our block with the mode's short minimum period, unless the operator gave one.

    Args:
        block: the block `steersman`.
        mode: the configured mode.
        asked: the minimum period of the mode's section or flag; 0 if not given.
    """
    short = spec_of(mode).min_sync_seconds
    if block.min_sync_period is not None or asked or short is None:
        return block
    return replace(block, min_sync_period=seconds(short))


# Conversion


def to_internal(document: KubeProxyConfiguration) -> ProxyConfig:
    """Return the internal form: the settings of the document's mode; no defaults, no validation."""
    spec = spec_of(document.mode)
    masquerade: V1IPTables | V1NFTables = getattr(document, spec.masquerade_section)
    periods: V1IPTables | V1IPVS | V1NFTables = getattr(document, spec.periods_section)
    ipvs = document.ipvs
    return replace(
        ProxyConfig(**{name: getattr(document, name) for name in _SHARED}),
        feature_gates=document.feature_gates or {},
        iptables=IPTables(
            masquerade_bit=document.iptables.masquerade_bit,
            localhost_node_ports=document.iptables.localhost_node_ports,
        ),
        ipvs=IPVS(
            scheduler=ipvs.scheduler,
            exclude_cidrs=ipvs.exclude_cidrs or (),
            strict_arp=ipvs.strict_arp,
            tcp_timeout=ipvs.tcp_timeout,
            tcp_fin_timeout=ipvs.tcp_fin_timeout,
            udp_timeout=ipvs.udp_timeout,
        ),
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
            masquerade_all=masquerade.masquerade_all,
            oom_score_adj=document.oom_score_adj,
        ),
    )


def split_cidrs(text: str) -> tuple[str, ...]:
    """Return `clusterCIDR` as a list; unlike in upstream's flag, an empty text has no CIDR."""
    return tuple(text.split(",")) if text else ()


def to_v1alpha1(config: ProxyConfig) -> KubeProxyConfiguration:
    """Return the document of a configuration; only the mode's own section has sync periods."""
    spec = spec_of(config.mode)
    ipvs = config.ipvs

    def periods(section: str) -> dict[str, Any]:
        mine = section == spec.periods_section
        return {
            "sync_period": config.sync_period if mine else ZERO,
            "min_sync_period": config.min_sync_period if mine else ZERO,
        }

    return replace(
        KubeProxyConfiguration(**{name: getattr(config, name) for name in _SHARED}),
        feature_gates=config.feature_gates,
        iptables=V1IPTables(
            masquerade_bit=config.iptables.masquerade_bit,
            masquerade_all=config.linux.masquerade_all and spec.masquerade_section == "iptables",
            localhost_node_ports=config.iptables.localhost_node_ports,
            **periods("iptables"),
        ),
        ipvs=V1IPVS(
            **periods("ipvs"),
            scheduler=ipvs.scheduler,
            exclude_cidrs=ipvs.exclude_cidrs or None,
            strict_arp=ipvs.strict_arp,
            tcp_timeout=ipvs.tcp_timeout,
            tcp_fin_timeout=ipvs.tcp_fin_timeout,
            udp_timeout=ipvs.udp_timeout,
        ),
        nftables=V1NFTables(
            masquerade_bit=config.nftables.masquerade_bit,
            masquerade_all=config.linux.masquerade_all and spec.masquerade_section == "nftables",
            **periods("nftables"),
        ),
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
    """Return the settings that shape plans, of a valid configuration.

    Args:
        config: it passed rules.py.
        node_name: name of the node if `hostnameOverride` gives none.
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
        masquerade_bit=_MASQUERADE_BIT if bits.masquerade_bit is None else bits.masquerade_bit,
        allow_service_external_ips=enabled(config.feature_gates, "AllowServiceExternalIPs"),
        split_threshold=config.steersman.split_threshold,
        large_cluster_endpoints=config.steersman.large_cluster_endpoints,
    )


def to_failover_settings(config: ProxyConfig) -> Settings:
    """Return the parameters of failover, of a valid configuration."""
    section = config.steersman.failover
    given: dict[str, Any] = {name: getattr(section, name) for name in section.__struct_fields__}
    times = {name: each.seconds for name, each in given.items() if isinstance(each, Duration)}
    return Settings(**given | times)


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
        xdp_devices=block.ebpf_xdp_devices,
        cgroup_root=block.ebpf_cgroup_root,
    )
