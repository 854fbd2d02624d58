"""Validate a configuration, in upstream's order and words (behaviour 1.4).

Errors are returned, not raised. Rules of our own block come last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec import structs

from steersman.config.errors import ROOT, FieldError, forbidden, invalid, required, unsupported
from steersman.config.features import enabled
from steersman.config.go import Duration, parse_int, split_address
from steersman.config.types import (
    IPVS,
    ClientConnection,
    Conntrack,
    DetectLocal,
    FailoverSection,
    IPTables,
    Logging,
    LogOptions,
    NFTables,
    ProxyConfig,
    StateServer,
    Steersman,
)
from steersman.model.addresses import canonical_cidr, canonical_ip, family_of
from steersman.model.inputs import DetectLocalMode
from steersman.model.names import SCHEDULER_FLAGS
from steersman.modes.specs import DEFAULT_MODE, SPECS, spec_of

HIDDEN_METRICS_VERSION: Final = "1.35"
"""The release before the one whose behaviour this is."""

_POSITIVE = "must be greater than 0"
_NOT_NEGATIVE = "must be greater than or equal to 0"
_CIDR = "must be a valid CIDR"
_CIDR_BLOCK = "must be a valid CIDR block (e.g. 10.100.0.0/16 or fde4:8dba:82e1::/48)"
_CIDR_PAIR = (
    "must be a either a single CIDR or dual-stack pair of CIDRs "
    "(e.g. [10.100.0.0/16, fde4:8dba:82e1::/48]"
)
_VARIANTS = ("nft", "legacy", "")
_PORTALS = ("iptables", "nftables", "direct", "none", "")
_MAX_VERBOSITY = 2**31 - 1


def validate(config: ProxyConfig, *, strict_upstream: bool = False) -> list[FieldError]:
    """Return all errors of a configuration, in upstream's order.

    Args:
        strict_upstream: refuse what only steersman accepts, too: its own modes, and an empty
            metrics address (in upstream it disables the server by its help text, but validation
            refuses it).
    """
    return list(_errors(config, strict_upstream))


def _errors(config: ProxyConfig, strict_upstream: bool) -> Iterator[FieldError]:
    # Sections: that of iptables always, others if the mode uses them.
    yield from validate_masquerade_bit(config.iptables, f"{ROOT}.KubeProxyIPTablesConfiguration")
    spec = spec_of(config.mode)
    if spec.periods_section == "ipvs":
        yield from validate_ipvs(config.ipvs, f"{ROOT}.KubeProxyIPVSConfiguration")
    if spec.periods_section == "nftables":
        path = f"{ROOT}.KubeProxyNFTablesConfiguration"
        yield from validate_masquerade_bit(config.nftables, path)
    yield from validate_linux(
        config.conntrack, config.oom_score_adj, f"{ROOT}.KubeProxyLinuxConfiguration"
    )
    yield from validate_mode(config.mode, f"{ROOT}.Mode", strict_upstream=strict_upstream)
    yield from validate_client_connection(config.client_connection, f"{ROOT}.ClientConnection")

    # Periods
    if config.config_sync_period <= 0:
        yield invalid(f"{ROOT}.ConfigSyncPeriod", config.config_sync_period, _POSITIVE)
    if config.sync_period <= 0:
        yield invalid(f"{ROOT}.SyncPeriod", config.sync_period, _POSITIVE)
    yield from _not_negative((f"{ROOT}.MinSyncPeriod", config.min_sync_period))
    if config.min_sync_period > config.sync_period:
        # upstream prints the minimum as the value of the period (behaviour 1.4)
        detail = f"must be greater than or equal to {ROOT}.MinSyncPeriod"
        yield invalid(f"{ROOT}.SyncPeriod", config.min_sync_period, detail)

    # Addresses
    if canonical_ip(config.bind_address) is None:
        detail = "not a valid textual representation of an IP address"
        yield invalid(f"{ROOT}.BindAddress", config.bind_address, detail)
    for name, address, may_be_empty in (
        ("HealthzBindAddress", config.healthz_bind_address, True),
        ("MetricsBindAddress", config.metrics_bind_address, not strict_upstream),
    ):
        if address or not may_be_empty:
            yield from validate_host_port(address, f"{ROOT}.{name}")
    addresses = config.node_port_addresses
    yield from validate_node_port_addresses(addresses, f"{ROOT}.NodePortAddresses")

    # The rest
    path = f"{ROOT}.ShowHiddenMetricsForVersion"
    yield from validate_hidden_metrics_version(config.show_hidden_metrics_for_version, path)
    mode, path = config.detect_local_mode, f"{ROOT}.DetectLocalConfiguration"
    yield from validate_detect_local_mode(mode, f"{ROOT}.DetectLocalMode")
    yield from validate_detect_local(mode, config.detect_local, config.cluster_cidrs, path)
    yield from validate_logging(config.logging, config.feature_gates, f"{ROOT}.logging")
    if spec.uses_port_range and parse_port_range(config.port_range) is None:
        detail = "must be a valid port range (e.g. 300-2000)"
        yield invalid(f"{ROOT}.PortRange", config.port_range, detail)
    yield from validate_steersman(config.steersman, f"{ROOT}.steersman")


def validate_masquerade_bit(section: IPTables | NFTables, path: str) -> Iterator[FieldError]:
    """Check that the bit is one of the 32 bits of a mark."""
    bit = section.masquerade_bit
    if bit is not None and not 0 <= bit <= 31:
        yield invalid(f"{path}.MasqueradeBit", bit, "must be within the range [0, 31]")


def validate_ipvs(section: IPVS, path: str) -> Iterator[FieldError]:
    """Check that timeouts are not negative, and that excluded CIDRs are CIDRs."""
    yield from _not_negative(
        (f"{path}.TCPTimeout", section.tcp_timeout),
        (f"{path}.TCPFinTimeout", section.tcp_fin_timeout),
        (f"{path}.UDPTimeout", section.udp_timeout),
    )
    yield from validate_exclude_cidrs(section.exclude_cidrs, f"{path}.ExcludeCidrs")


def validate_exclude_cidrs(cidrs: Iterable[str], path: str) -> Iterator[FieldError]:
    """Check that each is a CIDR."""
    for index, cidr in enumerate(cidrs):
        if canonical_cidr(cidr) is None:
            yield invalid(f"{path}[{index}]", cidr, _CIDR)


def validate_linux(conntrack: Conntrack, score: int | None, path: str) -> Iterator[FieldError]:
    """Check the conntrack sysctls, and that the OOM score is within the kernel's range."""
    yield from validate_conntrack(conntrack, f"{path}.KubeProxyConntrackConfiguration")
    if score is not None and not -1000 <= score <= 1000:
        yield invalid(f"{path}.OOMScoreAdj", score, "must be within the range [-1000, 1000]")


def validate_conntrack(section: Conntrack, path: str) -> Iterator[FieldError]:
    """Check that no value is negative."""
    yield from _not_negative(
        (f"{path}.MaxPerCore", section.max_per_core),
        (f"{path}.Min", section.min),
        (f"{path}.TCPEstablishedTimeout", section.tcp_established_timeout),
        (f"{path}.TCPCloseWaitTimeout", section.tcp_close_wait_timeout),
        (f"{path}.UDPTimeout", section.udp_timeout),
        (f"{path}.UDPStreamTimeout", section.udp_stream_timeout),
    )


def validate_mode(mode: str, path: str, *, strict_upstream: bool = False) -> Iterator[FieldError]:
    """Check that the mode exists; "" is the default."""
    modes = [spec.name for spec in SPECS.values() if spec.upstream or not strict_upstream]
    if mode and mode not in modes:
        listed = ", ".join(sorted(modes))
        yield invalid(
            f"{path}.ProxyMode",
            mode,
            f"must be {listed} or blank "
            f"(blank means the best-available proxy [currently {DEFAULT_MODE}])",
        )


def validate_client_connection(section: ClientConnection, path: str) -> Iterator[FieldError]:
    """Check that the burst is not negative."""
    yield from _not_negative((f"{path}.Burst", section.burst))


def validate_host_port(address: str, path: str) -> Iterator[FieldError]:
    """Check that the address is IP:port; a bad IP and a bad port are two errors."""
    halves = split_address(address)
    if halves is None:
        yield invalid(path, address, "must be IP:port")
        return
    host, port = halves
    if canonical_ip(host) is None:
        yield invalid(path, host, "must be a valid IP")
    digits = port.removeprefix("+")  # upstream's parser accepts a sign
    if not (digits.isascii() and digits.isdigit() and 0 < int(digits[:20]) < 65536):
        yield invalid(path, port, "must be a valid port")


def validate_node_port_addresses(addresses: Sequence[str], path: str) -> Iterator[FieldError]:
    """Check for CIDRs, or the word `primary` alone; stop at that word, as upstream does."""
    for index, address in enumerate(addresses):
        if address == "primary":
            if len(addresses) != 1:
                detail = "can't use both 'primary' and CIDRs"
                yield invalid(f"{path}[{index}]", address, detail)
            return
        if canonical_cidr(address) is None:
            yield invalid(f"{path}[{index}]", address, _CIDR)


def validate_hidden_metrics_version(version: str, path: str) -> Iterator[FieldError]:
    """Check that it is the previous minor release, or empty."""
    if version not in ("", HIDDEN_METRICS_VERSION):
        yield invalid(
            path,
            version,
            "--show-hidden-metrics-for-version must be omitted or have the value "
            f"'{HIDDEN_METRICS_VERSION}'. Only the previous minor version is allowed",
        )


def validate_detect_local_mode(mode: str, path: str) -> Iterator[FieldError]:
    """Check that it is one of the four, or "" for the default."""
    choices = [*DetectLocalMode, ""]
    if mode not in choices:
        yield unsupported(path, mode, map(str, choices))


def validate_detect_local(
    mode: str, section: DetectLocal, cidrs: Sequence[str], path: str
) -> Iterator[FieldError]:
    """Check that the settings that the mode needs are given."""
    empty = "must not be empty"
    if mode == DetectLocalMode.BRIDGE_INTERFACE and not section.bridge_interface:
        yield invalid(f"{path}.InterfaceName", "", empty)
    elif mode == DetectLocalMode.INTERFACE_NAME_PREFIX and not section.interface_name_prefix:
        yield invalid(f"{path}.InterfacePrefix", "", empty)
    elif mode == DetectLocalMode.CLUSTER_CIDR and cidrs:
        yield from validate_dual_stack_cidrs(cidrs, f"{path}.ClusterCIDRs")


def validate_dual_stack_cidrs(cidrs: Sequence[str], path: str) -> Iterator[FieldError]:
    """Check for one CIDR, or one of each family."""
    if not cidrs:
        yield invalid(path, list(cidrs), "must contain at least one CIDR")
        return
    if len(cidrs) > 2:
        yield invalid(path, list(cidrs), _CIDR_PAIR)
        return
    parsed = [canonical_cidr(cidr) for cidr in cidrs]
    for index, cidr in enumerate(parsed):
        if cidr is None:
            yield invalid(f"{path}[{index}]", cidrs[index], _CIDR_BLOCK)
    families = [family_of(cidr) for cidr in parsed if cidr is not None]
    if len(families) == 2 and families[0] is families[1]:
        yield invalid(path, list(cidrs), _CIDR_PAIR)


def validate_logging(section: Logging, gates: dict[str, bool], path: str) -> Iterator[FieldError]:
    """Check format, verbosity, patterns, and options that need an alpha gate."""
    if section.format not in ("text", "json"):
        yield invalid(f"{path}.format", section.format, "Unsupported log format")
    if section.verbosity > _MAX_VERBOSITY:
        yield _too_verbose(f"{path}.verbosity", section.verbosity)
    if section.vmodule and section.format not in ("", "text"):
        yield forbidden(f"{path}.vmodule", "Only supported for text log format")
    for index, item in enumerate(section.vmodule):
        where = f"{path}.vmodule[{index}]"
        if not item.file_pattern:
            yield required(where, "File pattern must not be empty")
        if set("=,") & set(item.file_pattern):
            detail = "File pattern must not contain equal sign or comma"
            yield invalid(where, item.file_pattern, detail)
        if item.verbosity > _MAX_VERBOSITY:
            yield _too_verbose(where, item.verbosity)
    if not enabled(gates, "LoggingAlphaOptions"):
        yield from _validate_log_options(section.options.text, f"{path}.options.text")
        yield from _validate_log_options(section.options.json, f"{path}.options.json")


def _too_verbose(path: str, verbosity: int) -> FieldError:
    return invalid(path, verbosity, f"Must be <= {_MAX_VERBOSITY}")


def _validate_log_options(options: LogOptions, path: str) -> Iterator[FieldError]:
    detail = "Feature LoggingAlphaOptions is disabled"
    if options.split_stream:
        yield forbidden(f"{path}.splitStream", detail)
    if options.info_buffer_size:
        yield forbidden(f"{path}.infoBufferSize", detail)


def parse_port_range(text: str) -> tuple[int, int] | None:
    """Return a range of `first-last`, `first+count` or one port.

    (0, 0) means any port; None, that the text is not a range.
    """
    try:
        if text in ("", "0", "0-0"):
            return 0, 0
        if "+" in text:
            first, _, count = text.partition("+")
            low = _port(first)
            high = low + _port(count)
        else:
            first, dash, last = text.partition("-")
            low = _port(first)
            high = _port(last) if dash else low
    except ValueError:
        return None
    return (low, high) if 0 < low <= high < 65536 else None


def _port(text: str) -> int:
    return parse_int(text.strip(), low=0, high=65535)


def validate_steersman(block: Steersman, path: str) -> Iterator[FieldError]:
    """Check the values of our own block."""
    yield from _not_negative(
        (f"{path}.splitThreshold", block.split_threshold),
        (f"{path}.largeClusterEndpoints", block.large_cluster_endpoints),
        (f"{path}.minSyncPeriod", block.min_sync_period),
        (f"{path}.drainPeriod", block.drain_period),
    )
    if block.udp_idle_timeout <= 0:
        yield invalid(f"{path}.udpIdleTimeout", block.udp_idle_timeout, _POSITIVE)
    if block.userspace_portals not in _PORTALS:
        yield unsupported(f"{path}.userspacePortals", block.userspace_portals, _PORTALS)
    if block.iptables_variant not in _VARIANTS:
        yield unsupported(f"{path}.iptablesVariant", block.iptables_variant, _VARIANTS)
    for index, word in enumerate(block.ipvs_scheduler_flags):
        if word not in SCHEDULER_FLAGS:
            yield unsupported(f"{path}.ipvsSchedulerFlags[{index}]", word, SCHEDULER_FLAGS)
    for index, url in enumerate(block.api_servers):
        if not url:
            yield invalid(f"{path}.apiServers[{index}]", url, "must not be empty")
    yield from validate_failover(block.failover, f"{path}.failover")
    yield from validate_state_server(block.state, f"{path}.state")
    tracing = block.tracing
    if tracing.endpoint and not tracing.endpoint.startswith(("http://", "https://")):
        detail = "must be a URL such as http://127.0.0.1:4318"
        yield invalid(f"{path}.tracing.endpoint", tracing.endpoint, detail)
    if not 0 <= (rate := tracing.sampling_rate_per_million) <= 1_000_000:
        detail = "must be within the range [0, 1000000]"
        yield invalid(f"{path}.tracing.samplingRatePerMillion", rate, detail)


_S = 1_000_000_000
_FAILOVER_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "probes": (2, 20),
    "confirmed_share": (0, 1),
    "hold": (_S, 3600 * _S),
    "longest_hold": (_S, 24 * 3600 * _S),
    "check_interval": (_S, 3600 * _S),
    "check_timeout": (_S // 100, 60 * _S),
}
"""The least and the largest value of each field; durations in nanoseconds."""


def validate_failover(section: FailoverSection, path: str) -> Iterator[FieldError]:
    """Check that every setting is within its range, and that the hold can be doubled."""
    names = {field.name: field.encode_name for field in structs.fields(section)}
    for name, (low, high) in _FAILOVER_RANGES.items():
        value = getattr(section, name)
        if not low <= value <= high:
            first, last = (
                Duration(each) if isinstance(value, Duration) else each for each in (low, high)
            )
            detail = f"must be within the range [{first}, {last}]"
            yield invalid(f"{path}.{names[name]}", value, detail)
    if section.hold > section.longest_hold:
        detail = "must not be less than hold"
        yield invalid(f"{path}.longestHold", section.longest_hold, detail)


def validate_state_server(state: StateServer, path: str) -> Iterator[FieldError]:
    """Check that the server has an address, a token, and a certificate with its key or neither."""
    if not state.bind_address:
        return
    yield from validate_host_port(state.bind_address, f"{path}.bindAddress")
    if not state.token_file:
        detail = "name a file with a token: the server is never open to everyone"
        yield required(f"{path}.tokenFile", detail)
    if bool(state.cert_file) != bool(state.key_file):
        missing = "keyFile" if state.cert_file else "certFile"
        yield required(
            f"{path}.{missing}", "a certificate needs its key, and a key its certificate"
        )


def _not_negative(*values: tuple[str, int | Duration | None]) -> Iterator[FieldError]:
    for path, value in values:
        if value is not None and value < 0:
            yield invalid(path, value, _NOT_NEGATIVE)
