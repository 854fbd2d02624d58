import pytest
from msgspec.structs import replace

from steersman.config import ProxyConfig, load, to_failover_settings, validate
from steersman.config.commandline import assign
from steersman.config.defaults import apply_platform_defaults, in_mode
from steersman.config.errors import FieldError, Invalid, findings, printed
from steersman.config.features import enabled, gate_warnings
from steersman.config.go import Duration, Quantity
from steersman.config.rules import _FAILOVER_RANGES, parse_port_range, validate_dual_stack_cidrs
from steersman.config.types import FailoverSection, IPTables, LogOptions, StateServer, VModule
from steersman.model.failover import Settings
from steersman.model.findings import Severity

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
GOOD = apply_platform_defaults(load(HEAD).config)
IPVS = in_mode(GOOD, "ipvs")
NFTABLES = in_mode(GOOD, "nftables")
NEGATIVE = Duration(-1_000_000_000)
NOT_NEGATIVE = "must be greater than or equal to 0"
LINUX = "KubeProxyLinuxConfiguration"
CONNTRACK = f"{LINUX}.KubeProxyConntrackConfiguration"


def texts(config: ProxyConfig, **options: bool) -> list[str]:
    prefix = "KubeProxyConfiguration."
    errors = [str(error) for error in validate(config, **options)]
    assert all(text.startswith(prefix) for text in errors)
    return [text.removeprefix(prefix) for text in errors]


def test_the_defaults_are_valid() -> None:
    assert texts(GOOD, strict_upstream=True) == []
    second = Duration.parse("1s")
    bare = ProxyConfig(
        bind_address="::",
        iptables=IPTables(sync_period=second),
        config_sync_period=second,
        logging=GOOD.logging,
    )
    assert texts(bare) == []


@pytest.mark.parametrize(
    ("base", "path", "value", "expected"),
    [
        (GOOD, "iptables.masquerade_bit", 32, "KubeProxyIPTablesConfiguration.MasqueradeBit: "
         "Invalid value: 32: must be within the range [0, 31]"),
        (IPVS, "iptables.masquerade_bit", -1, "KubeProxyIPTablesConfiguration.MasqueradeBit: "
         "Invalid value: -1: must be within the range [0, 31]"),
        (NFTABLES, "nftables.masquerade_bit", 40, "KubeProxyNFTablesConfiguration.MasqueradeBit: "
         "Invalid value: 40: must be within the range [0, 31]"),
        (GOOD, "nftables.masquerade_bit", 40, ""),
        (IPVS, "ipvs.tcp_timeout", NEGATIVE,
         f'KubeProxyIPVSConfiguration.TCPTimeout: Invalid value: "-1s": {NOT_NEGATIVE}'),
        (IPVS, "ipvs.tcp_fin_timeout", NEGATIVE,
         f'KubeProxyIPVSConfiguration.TCPFinTimeout: Invalid value: "-1s": {NOT_NEGATIVE}'),
        (IPVS, "ipvs.udp_timeout", NEGATIVE,
         f'KubeProxyIPVSConfiguration.UDPTimeout: Invalid value: "-1s": {NOT_NEGATIVE}'),
        (IPVS, "ipvs.exclude_cidrs", ("10.0.0.0/8", "x"),
         'KubeProxyIPVSConfiguration.ExcludeCidrs[1]: Invalid value: "x": must be a valid CIDR'),
        (GOOD, "ipvs.udp_timeout", NEGATIVE, ""),
        (GOOD, "conntrack.max_per_core", -1,
         f"{CONNTRACK}.MaxPerCore: Invalid value: -1: {NOT_NEGATIVE}"),
        (GOOD, "conntrack.min", -1, f"{CONNTRACK}.Min: Invalid value: -1: {NOT_NEGATIVE}"),
        (GOOD, "conntrack.tcp_established_timeout", NEGATIVE,
         f'{CONNTRACK}.TCPEstablishedTimeout: Invalid value: "-1s": {NOT_NEGATIVE}'),
        (GOOD, "conntrack.tcp_close_wait_timeout", NEGATIVE,
         f'{CONNTRACK}.TCPCloseWaitTimeout: Invalid value: "-1s": {NOT_NEGATIVE}'),
        (GOOD, "conntrack.udp_timeout", NEGATIVE,
         f'{CONNTRACK}.UDPTimeout: Invalid value: "-1s": {NOT_NEGATIVE}'),
        (GOOD, "conntrack.udp_stream_timeout", NEGATIVE,
         f'{CONNTRACK}.UDPStreamTimeout: Invalid value: "-1s": {NOT_NEGATIVE}'),
        (GOOD, "oom_score_adj", -1001,
         f"{LINUX}.OOMScoreAdj: Invalid value: -1001: must be within the range [-1000, 1000]"),
        (GOOD, "mode", "foo", 'Mode.ProxyMode: Invalid value: "foo": must be ebpf, iptables, '
         "ipvs, nftables, userspace, winuserspace or blank (blank means the best-available proxy "
         "[currently iptables])"),
        (GOOD, "mode", "ebpf", ""),
        (GOOD, "mode", "", ""),
        (GOOD, "client_connection.burst", -5,
         f"ClientConnection.Burst: Invalid value: -5: {NOT_NEGATIVE}"),
        (GOOD, "config_sync_period", Duration(0),
         'ConfigSyncPeriod: Invalid value: "0s": must be greater than 0'),
        (GOOD, "iptables.min_sync_period", Duration.parse("1m"),
         'SyncPeriod: Invalid value: "1m0s": '
         "must be greater than or equal to KubeProxyConfiguration.MinSyncPeriod"),
        (GOOD, "iptables.min_sync_period", NEGATIVE,
         f'MinSyncPeriod: Invalid value: "-1s": {NOT_NEGATIVE}'),
        (GOOD, "bind_address", "[::]", 'BindAddress: Invalid value: "[::]": '
         "not a valid textual representation of an IP address"),
        (GOOD, "bind_address", "010.1.1.1", ""),
        (GOOD, "healthz_bind_address", "", ""),
        (GOOD, "healthz_bind_address", "a:0", 'HealthzBindAddress: Invalid value: "a": '
         'must be a valid IP\nHealthzBindAddress: Invalid value: "0": must be a valid port'),
        (GOOD, "healthz_bind_address", "1.2.3.4:+80", ""),
        (GOOD, "metrics_bind_address", "x", 'MetricsBindAddress: Invalid value: "x": '
         "must be IP:port"),
        (GOOD, "metrics_bind_address", "", ""),
        (GOOD, "node_port_addresses", ("primary",), ""),
        (GOOD, "node_port_addresses", ("x", "primary", "y"),
         'NodePortAddresses[0]: Invalid value: "x": must be a valid CIDR\n'
         "NodePortAddresses[1]: Invalid value: \"primary\": can't use both 'primary' and CIDRs"),
        (GOOD, "show_hidden_metrics_for_version", "1.35", ""),
        (GOOD, "show_hidden_metrics_for_version", "1.34",
         'ShowHiddenMetricsForVersion: Invalid value: "1.34": --show-hidden-metrics-for-version '
         "must be omitted or have the value '1.35'. Only the previous minor version is allowed"),
        (GOOD, "detect_local_mode", "BridgeInterface",
         'DetectLocalConfiguration.InterfaceName: Invalid value: "": must not be empty'),
        (GOOD, "detect_local_mode", "InterfaceNamePrefix",
         'DetectLocalConfiguration.InterfacePrefix: Invalid value: "": must not be empty'),
        (GOOD, "detect_local_mode", "NodeCIDR", ""),
        (GOOD, "detect_local_mode", "", ""),
        (GOOD, "cluster_cidr", "10.0.0.0/8,fd00::/8", ""),
        (GOOD, "cluster_cidr", "10.0.0.0/8,11.0.0.0/8",
         'DetectLocalConfiguration.ClusterCIDRs: Invalid value: ["10.0.0.0/8","11.0.0.0/8"]: '
         "must be a either a single CIDR or dual-stack pair of CIDRs "
         "(e.g. [10.100.0.0/16, fde4:8dba:82e1::/48]"),
        (GOOD, "cluster_cidr", "a,b,c",
         'DetectLocalConfiguration.ClusterCIDRs: Invalid value: ["a","b","c"]: '
         "must be a either a single CIDR or dual-stack pair of CIDRs "
         "(e.g. [10.100.0.0/16, fde4:8dba:82e1::/48]"),
        (GOOD, "logging.verbosity", 2**31,
         "logging.verbosity: Invalid value: 2147483648: Must be <= 2147483647"),
        (GOOD, "logging.vmodule", (VModule(file_pattern="a=b", verbosity=2**31), VModule()),
         'logging.vmodule[0]: Invalid value: "a=b": '
         "File pattern must not contain equal sign or comma\n"
         "logging.vmodule[0]: Invalid value: 2147483648: Must be <= 2147483647\n"
         "logging.vmodule[1]: Required value: File pattern must not be empty"),
        (assign(GOOD, "logging.format", "json"), "logging.vmodule", (VModule(file_pattern="a"),),
         "logging.vmodule: Forbidden: Only supported for text log format"),
        (GOOD, "logging.options.text",
         LogOptions(split_stream=True, info_buffer_size=Quantity("4k")),
         "logging.options.text.splitStream: Forbidden: Feature LoggingAlphaOptions is disabled\n"
         "logging.options.text.infoBufferSize: Forbidden: Feature LoggingAlphaOptions is disabled"),
        (assign(GOOD, "feature_gates", {"AllAlpha": True}), "logging.options.json",
         LogOptions(split_stream=True), ""),
        (GOOD, "port_range", "junk", ""),
        (assign(GOOD, "mode", "userspace"), "port_range", "junk",
         'PortRange: Invalid value: "junk": must be a valid port range (e.g. 300-2000)'),
        (assign(GOOD, "mode", "userspace"), "port_range", "300-2000", ""),
        (GOOD, "steersman.split_threshold", -1,
         f"steersman.splitThreshold: Invalid value: -1: {NOT_NEGATIVE}"),
        (GOOD, "steersman.min_sync_period", NEGATIVE,
         f'steersman.minSyncPeriod: Invalid value: "-1s": {NOT_NEGATIVE}'),
        (GOOD, "steersman.udp_idle_timeout", Duration(0),
         'steersman.udpIdleTimeout: Invalid value: "0s": must be greater than 0'),
        (GOOD, "steersman.userspace_portals", "x",
         'steersman.userspacePortals: Unsupported value: "x": supported values: "iptables", '
         '"nftables", "direct", "none", ""'),
        (GOOD, "steersman.iptables_variant", "x", 'steersman.iptablesVariant: Unsupported value: '
         '"x": supported values: "nft", "legacy", ""'),
        (GOOD, "steersman.ipvs_scheduler_flags", ("mh-port", "x"),
         'steersman.ipvsSchedulerFlags[1]: Unsupported value: "x": supported values: "none", '
         '"sh-fallback", "sh-port", "mh-fallback", "mh-port"'),
        (GOOD, "steersman.state", StateServer(bind_address="127.0.0.1:1"),
         "steersman.state.tokenFile: Required value: name a file with a token: the server is never "
         "open to everyone"),
        (GOOD, "steersman.state", StateServer(bind_address="x:1", token_file="t"),
         'steersman.state.bindAddress: Invalid value: "x": must be a valid IP'),
        (GOOD, "steersman.state",
         StateServer(bind_address="[::1]:1", token_file="t", key_file="k"),
         "steersman.state.certFile: Required value: a certificate needs its key, and a key its "
         "certificate"),
        (GOOD, "steersman.tracing.endpoint", "127.0.0.1:4318",
         'steersman.tracing.endpoint: Invalid value: "127.0.0.1:4318": must be a URL such as '
         "http://127.0.0.1:4318"),
        (GOOD, "steersman.tracing.sampling_rate_per_million", -1,
         "steersman.tracing.samplingRatePerMillion: Invalid value: -1: must be within the range "
         "[0, 1000000]"),
        (GOOD, "steersman.failover.confirmed_share", 1.5,
         "steersman.failover.confirmedShare: Invalid value: 1.5: must be within the range [0, 1]"),
        (GOOD, "steersman.failover.confirmed_share", float("nan"),
         "steersman.failover.confirmedShare: Invalid value: NaN: must be within the range [0, 1]"),
        (GOOD, "steersman.failover.probes", 21,
         "steersman.failover.probes: Invalid value: 21: must be within the range [2, 20]"),
        (GOOD, "steersman.failover.check_timeout", Duration(1_000_000),
         'steersman.failover.checkTimeout: Invalid value: "1ms": must be within the range '
         "[10ms, 1m0s]"),
        (GOOD, "steersman.failover.hold", Duration(600_000_000_000),
         'steersman.failover.longestHold: Invalid value: "5m0s": must not be less than hold'),
        (GOOD, "steersman.api_servers", ("https://a", ""),
         'steersman.apiServers[1]: Invalid value: "": must not be empty'),
    ],
)  # fmt: skip
def test_each_rule(base: ProxyConfig, path: str, value: object, expected: str) -> None:
    assert texts(assign(base, path, value)) == expected.splitlines()


def test_every_parameter_of_failover_has_a_range_and_becomes_a_setting() -> None:
    names = FailoverSection.__struct_fields__
    assert set(_FAILOVER_RANGES) == set(names) == set(Settings.__struct_fields__)
    assert to_failover_settings(GOOD) == Settings()
    config = assign(GOOD, "steersman.failover.hold", Duration(2_500_000_000))
    config = assign(config, "steersman.failover.probes", 5)
    assert to_failover_settings(config) == Settings(hold=2.5, probes=5)


def test_upstream_refuses_what_only_we_have() -> None:
    config = replace(GOOD, mode="ebpf", metrics_bind_address="")
    assert texts(config, strict_upstream=True) == [
        'Mode.ProxyMode: Invalid value: "ebpf": must be iptables, ipvs, nftables or blank '
        "(blank means the best-available proxy [currently iptables])",
        'MetricsBindAddress: Invalid value: "": must be IP:port',
    ]
    assert texts(config) == []


def test_all_errors_come_in_upstreams_order() -> None:
    config = GOOD
    for path, value in {
        "logging.format": "xml",
        "detect_local_mode": "Guess",
        "bind_address": "x",
        "iptables.sync_period": NEGATIVE,
        "mode": "foo",
        "oom_score_adj": 5000,
        "iptables.masquerade_bit": 99,
    }.items():
        config = assign(config, path, value)
    paths = [text.partition(":")[0] for text in texts(config)]
    assert paths == [
        "KubeProxyIPTablesConfiguration.MasqueradeBit",
        "KubeProxyLinuxConfiguration.OOMScoreAdj",
        "Mode.ProxyMode",
        "SyncPeriod",
        "SyncPeriod",
        "BindAddress",
        "DetectLocalMode",
        "logging.format",
    ]


def test_no_cidr_is_an_error_only_for_a_pair() -> None:
    (error,) = validate_dual_stack_cidrs((), "P")
    assert str(error) == "P: Invalid value: []: must contain at least one CIDR"


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("", (0, 0)),
        ("0", (0, 0)),
        ("0-0", (0, 0)),
        ("80", (80, 80)),
        ("300-2000", (300, 2000)),
        ("300+5", (300, 305)),
        ("2000-300", None),
        ("1-70000", None),
        ("65535+5", None),
        ("a-b", None),
    ],
)
def test_port_ranges(text: str, ports: tuple[int, int] | None) -> None:
    assert parse_port_range(text) == ports


def test_an_error_is_a_finding() -> None:
    (error,) = validate(replace(GOOD, mode="foo"))
    missing = FieldError("KubeProxyConfiguration.a", "Required value", "", "give it")
    finding, other = findings(Invalid([error, missing]), "file.yaml")
    assert (finding.object, finding.field) == ("KubeProxyConfiguration", "Mode.ProxyMode")
    assert finding.reason.startswith('Invalid value "foo": must be')
    assert finding.severity is Severity.ERROR
    assert (other.field, other.reason) == ("a", "give it")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(Duration.parse("1m"), '"1m0s"'), (["a"], '["a"]'), (None, "null"), (True, "true")],
)
def test_values_are_printed_as_upstream_does(value: object, shown: str) -> None:
    assert printed(value) == shown


def test_gates_say_so_themselves_or_by_stage_or_by_default() -> None:
    assert enabled({}, "ComponentFlagz")
    assert not enabled({"AllBeta": False}, "ComponentFlagz")
    assert enabled({"AllBeta": False, "ComponentFlagz": True}, "ComponentFlagz")
    assert not enabled({}, "LoggingAlphaOptions")
    assert enabled({"AllAlpha": True}, "LoggingAlphaOptions")
    assert enabled({"AllBeta": False, "AllAlpha": False}, "AllowServiceExternalIPs")
    assert not enabled({"AllowServiceExternalIPs": False}, "AllowServiceExternalIPs")


def test_gates_without_effect_are_warned_of() -> None:
    gates = {"SCTPSupport": True, "ComponentFlags": False, "AllBeta": False, "AllAlpha": True}
    assert list(gate_warnings({**gates, "LoggingAlphaOptions": True})) == [
        "feature gate ComponentFlags has no effect here (did you mean ComponentFlagz?)",
        "feature gate SCTPSupport has no effect here",
    ]
    assert texts(replace(GOOD, feature_gates=gates)) == []
