"""What holds where nothing was said (behaviour 1.2).

Zero counts as unset for durations, rates and texts; null for what upstream has as a pointer.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from steersman.config.go import Duration, seconds, with_port
from steersman.config.types import (
    NOTHING,
    ClientConnection,
    Conntrack,
    KubeProxyConfiguration,
    Logging,
    LoggingOptions,
    LogOptions,
    ProxyConfig,
    Steersman,
    V1IPTables,
    V1NFTables,
)
from steersman.model.addresses import canonical_ip
from steersman.modes.specs import DEFAULT_MODE, spec_of

HEALTHZ_PORT: Final = 10256
METRICS_PORT: Final = 10249
OOM_SCORE_ADJ: Final = -999
MASQUERADE_BIT: Final = 14

_SYNC_PERIOD = seconds(30)
_MIN_SYNC_PERIOD = seconds(1)
_CONFIG_SYNC_PERIOD = seconds(15 * 60)
_FLUSH_FREQUENCY = seconds(5)
_TCP_ESTABLISHED_TIMEOUT = seconds(24 * 3600)
_TCP_CLOSE_WAIT_TIMEOUT = seconds(3600)


def apply_defaults(config: KubeProxyConfiguration) -> KubeProxyConfiguration:
    """Fill in everything that upstream fills in of a v1alpha1 document, and our own block."""
    bind_address = config.bind_address or "0.0.0.0"
    any_address, loopback = _default_addresses(bind_address)
    return replace(
        config,
        feature_gates=config.feature_gates or {},
        client_connection=_client_connection(config.client_connection),
        logging=_logging(config.logging),
        bind_address=bind_address,
        healthz_bind_address=with_port(config.healthz_bind_address or any_address, HEALTHZ_PORT),
        metrics_bind_address=with_port(config.metrics_bind_address or loopback, METRICS_PORT),
        iptables=_iptables(config.iptables),
        ipvs=replace(config.ipvs, sync_period=config.ipvs.sync_period or _SYNC_PERIOD),
        nftables=_nftables(config.nftables),
        oom_score_adj=_given(config.oom_score_adj, OOM_SCORE_ADJ),
        conntrack=_conntrack(config.conntrack),
        config_sync_period=config.config_sync_period or _CONFIG_SYNC_PERIOD,
        steersman=_steersman(config),
    )


def apply_platform_defaults(config: ProxyConfig) -> ProxyConfig:
    """Fill in what upstream fills in on Linux once flags and file are merged (behaviour 1.2)."""
    mode = config.mode or DEFAULT_MODE
    addresses = config.node_port_addresses or spec_of(mode).node_port_addresses
    return replace(
        config,
        mode=mode,
        node_port_addresses=addresses,
        detect_local_mode=config.detect_local_mode or "ClusterCIDR",
    )


def fast_by_default(block: Steersman, mode: str, asked: Duration) -> Steersman:
    """Give a fast mode its short minimum period, unless one was asked for (`asked` not 0)."""
    own = spec_of(mode).min_sync_seconds
    if block.min_sync_period is not None or asked or own is None:
        return block
    return replace(block, min_sync_period=seconds(own))


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _default_addresses(bind_address: str) -> tuple[str, str]:
    ip = canonical_ip(bind_address)
    if ip is not None and ":" not in ip:
        return "0.0.0.0", "127.0.0.1"
    return "::", "::1"


def _client_connection(given: ClientConnection) -> ClientConnection:
    return replace(
        given,
        content_type=given.content_type or "application/vnd.kubernetes.protobuf",
        qps=given.qps or 5,
        burst=given.burst or 10,
    )


def _logging(given: Logging) -> Logging:
    return replace(
        given,
        format=given.format or "text",
        flush_frequency=given.flush_frequency or _FLUSH_FREQUENCY,
        options=LoggingOptions(
            text=_log_options(given.options.text), json=_log_options(given.options.json)
        ),
    )


def _log_options(given: LogOptions) -> LogOptions:
    return replace(given, info_buffer_size=given.info_buffer_size or NOTHING)


def _iptables(given: V1IPTables) -> V1IPTables:
    return replace(
        given,
        masquerade_bit=_given(given.masquerade_bit, MASQUERADE_BIT),
        localhost_node_ports=(
            True if given.localhost_node_ports is None else given.localhost_node_ports
        ),
        sync_period=given.sync_period or _SYNC_PERIOD,
        min_sync_period=given.min_sync_period or _MIN_SYNC_PERIOD,
    )


def _nftables(given: V1NFTables) -> V1NFTables:
    return replace(
        given,
        masquerade_bit=_given(given.masquerade_bit, MASQUERADE_BIT),
        sync_period=given.sync_period or _SYNC_PERIOD,
        min_sync_period=given.min_sync_period or _MIN_SYNC_PERIOD,
    )


def _conntrack(given: Conntrack) -> Conntrack:
    established, close_wait = given.tcp_established_timeout, given.tcp_close_wait_timeout
    return replace(
        given,
        max_per_core=_given(given.max_per_core, 32768),
        min=_given(given.min, 131072),
        tcp_established_timeout=_TCP_ESTABLISHED_TIMEOUT if established is None else established,
        tcp_close_wait_timeout=_TCP_CLOSE_WAIT_TIMEOUT if close_wait is None else close_wait,
    )


def _steersman(config: KubeProxyConfiguration) -> Steersman:
    section = getattr(config, spec_of(config.mode).periods_section)
    return fast_by_default(config.steersman, config.mode, section.min_sync_period)
