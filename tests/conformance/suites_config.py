"""Conformance suites of the configuration: defaults, loading, validation.

The data speaks of upstream's internal form by Go's field names; GO_FIELDS translates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from steersman.config import rules
from steersman.config.arguments import parse_arguments
from steersman.config.commandline import assign, from_file, from_flags
from steersman.config.defaults import apply_defaults
from steersman.config.errors import ConfigError, FieldError
from steersman.config.flags import FLAGS
from steersman.config.go import Duration, Quantity
from steersman.config.load import decode, load
from steersman.config.rules import validate
from steersman.config.types import (
    IPVS,
    ClientConnection,
    Conntrack,
    DetectLocal,
    IPTables,
    NFTables,
    ProxyConfig,
    Section,
    VModule,
)
from steersman.config.write import plain
from steersman.modes.specs import spec_of

Case = Mapping[str, Any]

GO_FIELDS = dict(
    row.split()
    for row in """
    BindAddress bind_address
    BindAddressHardFail bind_address_hard_fail
    ClientConnection.AcceptContentTypes client_connection.accept_content_types
    ClientConnection.Burst client_connection.burst
    ClientConnection.ContentType client_connection.content_type
    ClientConnection.Kubeconfig client_connection.kubeconfig
    ClientConnection.QPS client_connection.qps
    ConfigSyncPeriod config_sync_period
    DetectLocal.BridgeInterface detect_local.bridge_interface
    DetectLocal.ClusterCIDRs cluster_cidrs
    DetectLocal.InterfaceNamePrefix detect_local.interface_name_prefix
    DetectLocalMode detect_local_mode
    EnableProfiling enable_profiling
    FeatureGates feature_gates
    HealthzBindAddress healthz_bind_address
    HostnameOverride hostname_override
    IPTables.LocalhostNodePorts iptables.localhost_node_ports
    IPTables.MasqueradeBit iptables.masquerade_bit
    IPVS.ExcludeCIDRs ipvs.exclude_cidrs
    IPVS.Scheduler ipvs.scheduler
    IPVS.StrictARP ipvs.strict_arp
    IPVS.TCPFinTimeout ipvs.tcp_fin_timeout
    IPVS.TCPTimeout ipvs.tcp_timeout
    IPVS.UDPTimeout ipvs.udp_timeout
    Linux.Conntrack.MaxPerCore conntrack.max_per_core
    Linux.Conntrack.Min conntrack.min
    Linux.Conntrack.TCPBeLiberal conntrack.tcp_be_liberal
    Linux.Conntrack.TCPCloseWaitTimeout conntrack.tcp_close_wait_timeout
    Linux.Conntrack.TCPEstablishedTimeout conntrack.tcp_established_timeout
    Linux.Conntrack.UDPStreamTimeout conntrack.udp_stream_timeout
    Linux.Conntrack.UDPTimeout conntrack.udp_timeout
    Linux.MasqueradeAll masquerade_all
    Linux.OOMScoreAdj oom_score_adj
    Logging.FlushFrequency.Duration logging.flush_frequency
    Logging.Format logging.format
    Logging.Options.JSON.InfoBufferSize.s logging.options.json.info_buffer_size
    Logging.Options.JSON.SplitStream logging.options.json.split_stream
    Logging.Options.Text.InfoBufferSize.s logging.options.text.info_buffer_size
    Logging.Options.Text.SplitStream logging.options.text.split_stream
    Logging.VModule logging.vmodule
    Logging.Verbosity logging.verbosity
    MetricsBindAddress metrics_bind_address
    MinSyncPeriod min_sync_period
    Mode mode
    NFTables.MasqueradeBit nftables.masquerade_bit
    NodePortAddresses node_port_addresses
    ShowHiddenMetricsForVersion show_hidden_metrics_for_version
    SyncPeriod sync_period
    Windows.RunAsService windows_run_as_service
    Winkernel.EnableDSR winkernel.enable_dsr
    Winkernel.ForwardHealthCheckVip winkernel.forward_health_check_vip
    Winkernel.NetworkName winkernel.network_name
    Winkernel.RootHnsEndpointName winkernel.root_hns_endpoint_name
    Winkernel.SourceVip winkernel.source_vip
    """.strip().splitlines()
)
"""Path in the data's configurations -> path in ours."""
_GO_INSIDES = re.compile(r"InfoBufferSize\.(Format|d|i)\b|SerializeAsString|^TypeMeta")
"""How Go stores a quantity and a duration: no part of a configuration."""
_TIMES = re.compile(r"Timeout$|Period$|FlushFrequency\.Duration$")


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings by their paths."""
    if not isinstance(value, dict) or prefix == "FeatureGates.":
        return {prefix.rstrip("."): value}
    found: dict[str, Any] = {}
    for name, item in value.items():
        found |= flatten(item, f"{prefix}{name}.")
    return found


def go_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the data's configuration by our paths, in our types."""
    fields = {}
    for path, value in flatten(config).items():
        if not _GO_INSIDES.search(path):
            fields[GO_FIELDS[path]] = _ours(path, value)
    return fields


def _ours(path: str, value: Any) -> Any:
    if path.endswith("VModule"):
        return tuple(
            VModule(file_pattern=item["FilePattern"], verbosity=item["Verbosity"])
            for item in value or ()
        )
    if path.endswith(("CIDRs", "Addresses")):
        return tuple(value or ())
    if path == "FeatureGates":
        return value or {}
    if path.endswith("InfoBufferSize.s"):
        return Quantity(value or "0")
    return Duration.parse(value) if _TIMES.search(path) and value is not None else value


def from_go(config: Mapping[str, Any]) -> ProxyConfig:
    """The data's internal configuration as ours."""
    fields = go_fields(config)
    result = ProxyConfig(mode=fields["mode"])
    spec = spec_of(result.mode)
    for path, value in fields.items():
        if path == "cluster_cidrs":
            result = assign(result, "cluster_cidr", ",".join(value))
        elif path in ("sync_period", "min_sync_period"):
            result = assign(result, f"{spec.periods_section}.{path}", value)
        elif path == "masquerade_all":
            result = assign(result, f"{spec.masquerade_section}.{path}", value)
        else:
            result = assign(result, path, value)
    return result


def _get(section: Any, path: str) -> Any:
    for name in path.split("."):
        section = getattr(section, name)
    return section


def same_config(config: ProxyConfig, expected: Mapping[str, Any]) -> None:
    """Every field of the data's configuration has the same value in ours."""
    wanted = go_fields(expected)
    assert set(wanted) == set(GO_FIELDS.values()), "the data has other fields"
    got = {path: _get(config, path) for path in wanted}
    differences = [f"{path}: {got[path]!r} not {wanted[path]!r}" for path in wanted
                   if got[path] != wanted[path]]  # fmt: skip
    assert not differences, "; ".join(differences)


def config_defaults(case: Case) -> None:
    """A document as it is after defaulting."""
    row = case["case"]
    expected = apply_defaults(decode(row["expected"]))
    got = apply_defaults(decode(row["original"]))
    assert plain(got) == plain(expected)
    written = flatten({name: value for name, value in plain(got).items() if name != "steersman"})
    wanted = flatten(row["expected"])
    assert written == wanted


def config_load(case: Case) -> None:
    """A file, flags, or both, as they are once loaded; or why they cannot be."""
    error = case.get("expectError")
    loaded = _loaded(case)
    if isinstance(loaded, ProxyConfig):
        assert error is None, f"accepted, not {error}"
        same_config(loaded, case["expectConfig"])
    else:
        assert error is not None, f"refused: {loaded}"
        # the rest names the place in upstream's source where its types are registered
        assert error.partition(" in scheme ")[0] in str(loaded)


def _loaded(case: Case) -> ProxyConfig | ConfigError:
    try:
        return _load(case)
    except ConfigError as refused:
        return refused


def _load(case: Case) -> ProxyConfig:
    given = parse_arguments(case.get("flags") or [], FLAGS).values
    if not case.get("yaml"):
        return from_flags(given)
    if not given:
        return load(case["yaml"]).config
    return from_file("config.yaml", given, lambda _: case["yaml"].encode())[0]


def config_validation(case: Case) -> None:
    """The errors of a configuration, or of a part of it, to the letter."""
    if case["function"] == "Validate":
        errors = validate(from_go(case["config"]), strict_upstream=True)
    else:
        errors = list(PARTS[case["function"]](case["input"]))
    assert [str(error) for error in errors] == list(case["expectErrors"] or ())
    assert [error.path for error in errors] == list(case["expectFields"] or ())
    assert (not errors) == case["valid"]


def _part(kind: type[Section], go: Mapping[str, Any], prefix: str) -> Any:
    section: Any = kind()
    for path, value in flatten(go).items():
        *_, name = GO_FIELDS[f"{prefix}.{path}"].split(".")
        section = assign(section, name, _ours(path, value))
    return section


Rule = Callable[[Mapping[str, Any]], Iterable[FieldError]]
_ROOT = "KubeProxyConfiguration"


def _only(row: Mapping[str, Any]) -> Any:
    (value,) = row.values()
    return value


PARTS: Mapping[str, Rule] = {
    "validateKubeProxyIPTablesConfiguration": lambda row: rules.validate_masquerade_bit(
        _part(IPTables, _only(row), "IPTables"), f"{_ROOT}.KubeProxyIPTablesConfiguration"
    ),
    "validateKubeProxyNFTablesConfiguration": lambda row: rules.validate_masquerade_bit(
        _part(NFTables, _only(row), "NFTables"), f"{_ROOT}.KubeProxyNFTablesConfiguration"
    ),
    "validateKubeProxyIPVSConfiguration": lambda row: rules.validate_ipvs(
        _part(IPVS, _only(row), "IPVS"), f"{_ROOT}.KubeProxyIPVSConfiguration"
    ),
    "validateKubeProxyLinuxConfiguration": lambda row: rules.validate_linux(
        _part(Conntrack, _only(row)["Conntrack"], "Linux.Conntrack"),
        _only(row)["OOMScoreAdj"],
        f"{_ROOT}.KubeProxyLinuxConfiguration",
    ),
    "validateKubeProxyConntrackConfiguration": lambda row: rules.validate_conntrack(
        _part(Conntrack, _only(row), "Linux.Conntrack"), f"{_ROOT}.KubeProxyConntrackConfiguration"
    ),
    "validateProxyModeLinux": lambda row: rules.validate_mode(
        _only(row), _ROOT, strict_upstream=True
    ),
    "validateClientConnectionConfiguration": lambda row: rules.validate_client_connection(
        _part(ClientConnection, _only(row), "ClientConnection"), _ROOT
    ),
    "validateHostPort": lambda row: rules.validate_host_port(
        _only(row), f"{_ROOT}.HealthzBindAddress"
    ),
    "validateKubeProxyNodePortAddress": lambda row: rules.validate_node_port_addresses(
        _only(row), f"{_ROOT}.NodePortAddresses"
    ),
    "validateKubeProxyExcludeCIDRs": lambda row: rules.validate_exclude_cidrs(
        _only(row), f"{_ROOT}.ExcludeCIDRS"
    ),
    "validateShowHiddenMetricsVersion": lambda row: rules.validate_hidden_metrics_version(
        _only(row), f"{_ROOT}.ShowHiddenMetricsForVersion"
    ),
    "validateDetectLocalMode": lambda row: rules.validate_detect_local_mode(
        _only(row), f"{_ROOT}.DetectLocalMode"
    ),
    "validateDetectLocalConfiguration": lambda row: rules.validate_detect_local(
        row["mode"],
        _part(
            DetectLocal,
            {name: row["config"][name] for name in ("BridgeInterface", "InterfaceNamePrefix")},
            "DetectLocal",
        ),
        row["config"]["ClusterCIDRs"] or (),
        f"{_ROOT}.DetectLocal",
    ),
    "validateDualStackCIDRStrings": lambda row: rules.validate_dual_stack_cidrs(
        _only(row), f"{_ROOT}.DualStackCIDRList"
    ),
}
"""Upstream's rules for a part, by name, with the path that its tests hand them."""

SUITES: Mapping[str, Callable[[Case], None]] = {
    "config_defaults": config_defaults,
    "config_load": config_load,
    "config_validation": config_validation,
}
"""The suites by their name in the data."""
