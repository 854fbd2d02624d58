"""Fill in the defaults of v1alpha1, and clear what the mode does not use (behaviour 1.2).

    document --apply_defaults--> with upstream's defaults --in_mode--> for one mode
             --apply_platform_defaults--> complete

Zero is "not given" for durations, rates and texts; null for fields that upstream has as pointers.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

from msgspec.structs import replace

from steersman.config.go import Duration, seconds, with_port
from steersman.config.types import NOTHING, ZERO, LogOptions, ProxyConfig, Section, Steersman
from steersman.model.addresses import canonical_ip
from steersman.modes.specs import DEFAULT_MODE, spec_of

HEALTHZ_PORT: Final = 10256
METRICS_PORT: Final = 10249
MASQUERADE_BIT: Final = 14
_SYNC_PERIOD = seconds(30)
_MIN_SYNC_PERIOD = seconds(1)
_SectionT = TypeVar("_SectionT", bound=Section)


def apply_defaults(config: ProxyConfig) -> ProxyConfig:
    """Return a document with upstream's defaults of v1alpha1, and those of our own block."""
    config = _fill(config, bind_address="0.0.0.0", oom_score_adj=-999)
    ip = canonical_ip(config.bind_address)
    ipv4 = ip is not None and ":" not in ip
    healthz = config.healthz_bind_address or ("0.0.0.0" if ipv4 else "::")
    metrics = config.metrics_bind_address or ("127.0.0.1" if ipv4 else "::1")
    periods: dict[str, Any] = {"sync_period": _SYNC_PERIOD, "min_sync_period": _MIN_SYNC_PERIOD}
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
            config.iptables, masquerade_bit=MASQUERADE_BIT, localhost_node_ports=True, **periods
        ),
        ipvs=_fill(config.ipvs, sync_period=_SYNC_PERIOD),
        nftables=_fill(config.nftables, masquerade_bit=MASQUERADE_BIT, **periods),
        conntrack=_fill(
            config.conntrack,
            max_per_core=32768,
            min=131072,
            tcp_established_timeout=seconds(24 * 3600),
            tcp_close_wait_timeout=seconds(3600),
        ),
        steersman=with_min_sync_period(config.steersman, config.mode, config.min_sync_period),
    )


def default_config() -> ProxyConfig:
    """Return the configuration without any flag or file, before platform defaults."""
    return in_mode(apply_defaults(ProxyConfig()), "")


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

    `asked` is the minimum period of the mode's section or flag, 0 if it was not given.
    """
    short = spec_of(mode).min_sync_seconds
    if block.min_sync_period is not None or asked or short is None:
        return block
    return replace(block, min_sync_period=seconds(short))


def in_mode(config: ProxyConfig, mode: str) -> ProxyConfig:
    """Return a configuration for a mode: sync periods and masqueradeAll move to its sections.

    In sections that belong to other modes they are cleared, as upstream's conversion does.
    """
    spec = spec_of(mode)
    sections = {}
    for name in ("iptables", "ipvs", "nftables"):
        is_used = name == spec.periods_section
        changes: dict[str, Any] = {
            "sync_period": config.sync_period if is_used else ZERO,
            "min_sync_period": config.min_sync_period if is_used else ZERO,
        }
        if name != "ipvs":
            changes["masquerade_all"] = config.masquerade_all and name == spec.masquerade_section
        sections[name] = replace(getattr(config, name), **changes)
    return replace(config, mode=mode, **sections)
