"""The flags of upstream's kube-proxy v1.36: its names, types and defaults, with our own help."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from steersman.modes.specs import DEFAULT_MODE, SPECS


class Group(enum.StrEnum):
    """A heading of `--help`, in this order."""

    GENERAL = "General"
    API = "API server"
    MODE = "Proxy mode and traffic"
    IPTABLES = "iptables mode"
    IPVS = "ipvs mode"
    CONNTRACK = "Connection tracking"
    SERVERS = "Health and metrics"
    LOGGING = "Logging"
    PROCESS = "Process"
    OWN = "Beyond upstream"
    OLD = "Accepted for older guides"


class Flag(msgspec.Struct, frozen=True):
    """A flag. Names, types and defaults of upstream's are upstream's."""

    name: str
    kind: str
    """Type as `--help` shows it, a key of arguments.READERS."""
    default: str
    """Value if it is not given, as it would be written."""
    group: Group
    help: str
    target: str = ""
    """Path of the field of ProxyConfig that it sets; "" if commandline.py does more."""
    short: str = ""
    deprecated: str = ""
    """What to do instead; such a flag is missing in `--help`, and its use is a warning."""
    choices: tuple[str, ...] = ()
    """Values for shell completion."""
    completes: str = ""
    """Kind of names that completion asks the running process for: service, endpoint, pod, node or
    namespace; `file` for paths, `mode` for modes."""
    repeatable: bool = False
    """Whether a string of upstream is a list here."""

    @property
    def optional_value(self) -> str:
        """The value of the bare flag; "" if a value has to follow."""
        return "true" if self.kind in ("bool", "version") else ""


_G, _A, _M, _I, _V = Group.GENERAL, Group.API, Group.MODE, Group.IPTABLES, Group.IPVS
_C, _S, _L, _P = Group.CONNTRACK, Group.SERVERS, Group.LOGGING, Group.PROCESS
_MODES = ", ".join(spec.name for spec in SPECS.values() if spec.platform == "linux")
_DETECT_MODES = ("ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix")

UPSTREAM_FLAGS: Final = (
    Flag("config", "string", "", _G, "Configuration file. With it, most flags are ignored."),
    Flag(
        "write-config-to", "string", "", _G, "Write the configuration in force to a file, and exit."
    ),
    Flag(
        "cleanup",
        "bool",
        "false",
        _G,
        "Remove everything that steersman wrote from the kernel, and exit.",
    ),
    Flag(
        "init-only",
        "bool",
        "false",
        _G,
        "Do only the steps that need full root privileges, and exit.",
    ),
    Flag("help", "bool", "false", _G, "Print this text.", short="h"),
    Flag("version", "version", "false", _G, "Print the version; --version=raw prints all of it."),
    Flag(
        "hostname-override",
        "string",
        "",
        _G,
        "Name of this node (default: the hostname). Overrides the configuration file.",
    ),
    Flag(
        "feature-gates",
        "mapStringBool",
        "",
        _G,
        "Feature gates, as NAME=true|false,...",
        "feature_gates",
    ),
    Flag(
        "kubeconfig",
        "string",
        "",
        _A,
        "Kubeconfig file (default: the pod's service account).",
        "client_connection.kubeconfig",
    ),
    Flag(
        "master",
        "string",
        "",
        _A,
        "URL of the API server; overrides the kubeconfig. A list is tried in turn.",
        repeatable=True,
    ),
    Flag(
        "kube-api-content-type",
        "string",
        "application/vnd.kubernetes.protobuf",
        _A,
        "Content type of requests and answers; JSON is accepted, too.",
        "client_connection.content_type",
    ),
    Flag(
        "kube-api-qps",
        "float32",
        "5",
        _A,
        "Requests per second to the API server.",
        "client_connection.qps",
    ),
    Flag(
        "kube-api-burst",
        "int32",
        "10",
        _A,
        "Burst of requests to the API server.",
        "client_connection.burst",
    ),
    Flag(
        "config-sync-period",
        "duration",
        "15m0s",
        _A,
        "Period of full lists from the API server.",
        "config_sync_period",
    ),
    Flag(
        "proxy-mode",
        "ProxyMode",
        "",
        _M,
        f"How the kernel is programmed: {_MODES}; {DEFAULT_MODE} by default.",
        "mode",
        choices=tuple(SPECS),
    ),
    Flag(
        "bind-address",
        "ip",
        "0.0.0.0",
        _M,
        "IP of this node, unless 0.0.0.0 or ::; nothing listens on it.",
        "bind_address",
    ),
    Flag(
        "nodeport-addresses",
        "strings",
        "",
        _M,
        "CIDRs of local addresses that serve node ports, or the word primary.",
        "node_port_addresses",
    ),
    Flag(
        "masquerade-all",
        "bool",
        "false",
        _M,
        "Masquerade all traffic to cluster IPs.",
    ),
    Flag(
        "detect-local-mode",
        "LocalMode",
        "",
        _M,
        "How to recognise local pods (default: ClusterCIDR).",
        "detect_local_mode",
        choices=_DETECT_MODES,
    ),
    Flag(
        "cluster-cidr",
        "string",
        "",
        _M,
        "Pod CIDR of the cluster, or one of each family.",
        "cluster_cidr",
    ),
    Flag(
        "pod-bridge-interface",
        "string",
        "",
        _M,
        "Bridge of the pods, for BridgeInterface.",
        "detect_local.bridge_interface",
    ),
    Flag(
        "pod-interface-name-prefix",
        "string",
        "",
        _M,
        "Prefix of the pods' interfaces, for InterfaceNamePrefix.",
        "detect_local.interface_name_prefix",
    ),
    Flag(
        "iptables-sync-period",
        "duration",
        "30s",
        _I,
        "Time between full checks of the kernel; in every mode but ipvs.",
    ),
    Flag(
        "iptables-min-sync-period",
        "duration",
        "1s",
        _I,
        "Minimum time between two syncs; in every mode but ipvs.",
    ),
    Flag(
        "iptables-masquerade-bit",
        "int32",
        "14",
        _I,
        "Bit of the packet mark for masquerading, 0 to 31.",
        "iptables.masquerade_bit",
    ),
    Flag(
        "iptables-localhost-nodeports",
        "bool",
        "true",
        _I,
        "Serve node ports on 127.0.0.0/8, too.",
        "iptables.localhost_node_ports",
    ),
    Flag("ipvs-sync-period", "duration", "30s", _V, "Time between full checks of the kernel."),
    Flag("ipvs-min-sync-period", "duration", "1s", _V, "Minimum time between two syncs."),
    Flag("ipvs-scheduler", "string", "", _V, "Scheduler (default: rr).", "ipvs.scheduler"),
    Flag(
        "ipvs-exclude-cidrs",
        "strings",
        "",
        _V,
        "CIDRs of virtual servers that belong to other programs.",
        "ipvs.exclude_cidrs",
    ),
    Flag(
        "ipvs-strict-arp",
        "bool",
        "false",
        _V,
        "Set arp_ignore to 1 and arp_announce to 2.",
        "ipvs.strict_arp",
    ),
    Flag(
        "ipvs-tcp-timeout",
        "duration",
        "0s",
        _V,
        "Timeout of idle TCP connections; 0 keeps the kernel's.",
        "ipvs.tcp_timeout",
    ),
    Flag(
        "ipvs-tcpfin-timeout",
        "duration",
        "0s",
        _V,
        "Timeout of TCP connections after a FIN; 0 keeps the kernel's.",
        "ipvs.tcp_fin_timeout",
    ),
    Flag(
        "ipvs-udp-timeout",
        "duration",
        "0s",
        _V,
        "Timeout after UDP packets; 0 keeps the kernel's.",
        "ipvs.udp_timeout",
    ),
    Flag(
        "conntrack-max-per-core",
        "int32",
        "32768",
        _C,
        "Entries of the table per CPU; 0 keeps the kernel's.",
        "conntrack.max_per_core",
    ),
    Flag(
        "conntrack-min",
        "int32",
        "131072",
        _C,
        "Minimum number of entries of the table.",
        "conntrack.min",
    ),
    Flag(
        "conntrack-tcp-timeout-established",
        "duration",
        "24h0m0s",
        _C,
        "Timeout of idle established TCP; 0 keeps the kernel's.",
        "conntrack.tcp_established_timeout",
    ),
    Flag(
        "conntrack-tcp-timeout-close-wait",
        "duration",
        "1h0m0s",
        _C,
        "Timeout of TCP in CLOSE_WAIT; 0 keeps the kernel's.",
        "conntrack.tcp_close_wait_timeout",
    ),
    Flag(
        "conntrack-tcp-be-liberal",
        "bool",
        "false",
        _C,
        "Do not drop packets that are out of the TCP window.",
        "conntrack.tcp_be_liberal",
    ),
    Flag(
        "conntrack-udp-timeout",
        "duration",
        "0s",
        _C,
        "Timeout of UDP without an answer; 0 keeps the kernel's.",
        "conntrack.udp_timeout",
    ),
    Flag(
        "conntrack-udp-timeout-stream",
        "duration",
        "0s",
        _C,
        "Timeout of UDP that was answered; 0 keeps the kernel's.",
        "conntrack.udp_stream_timeout",
    ),
    Flag(
        "healthz-bind-address",
        "ipport",
        "0.0.0.0:10256",
        _S,
        "Address of the health server; empty for none.",
        "healthz_bind_address",
    ),
    Flag(
        "metrics-bind-address",
        "ipport",
        "127.0.0.1:10249",
        _S,
        "Address of the metrics server; empty for none.",
        "metrics_bind_address",
    ),
    Flag(
        "bind-address-hard-fail",
        "bool",
        "false",
        _S,
        "Exit if one of the servers cannot listen.",
        "bind_address_hard_fail",
    ),
    Flag(
        "profiling",
        "bool",
        "false",
        _S,
        "Serve /debug/pprof on the metrics server.",
        "enable_profiling",
    ),
    Flag(
        "show-hidden-metrics-for-version",
        "string",
        "",
        _S,
        "Show metrics hidden since the previous minor release.",
        "show_hidden_metrics_for_version",
    ),
    Flag("v", "Level", "0", _L, "Verbosity, 0 to 10.", "logging.verbosity", short="v"),
    Flag(
        "vmodule",
        "pattern=N,...",
        "",
        _L,
        "Verbosity of modules whose name matches a pattern (text format only).",
        "logging.vmodule",
    ),
    Flag(
        "logging-format",
        "string",
        "text",
        _L,
        "text (as klog's) or json.",
        "logging.format",
        choices=("text", "json"),
    ),
    Flag(
        "log-flush-frequency",
        "duration",
        "5s",
        _L,
        "Maximum time that a line is buffered.",
        "logging.flush_frequency",
    ),
    Flag(
        "log-text-split-stream",
        "bool",
        "false",
        _L,
        "Errors to stderr, the rest to stdout (gate LoggingAlphaOptions).",
        "logging.options.text.split_stream",
    ),
    Flag(
        "log-text-info-buffer-size",
        "quantity",
        "0",
        _L,
        "Buffer of the split stream (gate LoggingAlphaOptions).",
        "logging.options.text.info_buffer_size",
    ),
    Flag(
        "log-json-split-stream",
        "bool",
        "false",
        _L,
        "As for text, in json format.",
        "logging.options.json.split_stream",
    ),
    Flag(
        "log-json-info-buffer-size",
        "quantity",
        "0",
        _L,
        "As for text, in json format.",
        "logging.options.json.info_buffer_size",
    ),
    Flag(
        "oom-score-adj",
        "int32",
        "-999",
        _P,
        "oom_score_adj of this process, -1000 to 1000.",
        "oom_score_adj",
    ),
    Flag(
        "boot-id-file",
        "string",
        "/proc/sys/kernel/random/boot_id",
        _P,
        "Accepted, and not used.",
    ),
    Flag(
        "machine-id-file",
        "string",
        "/etc/machine-id,/var/lib/dbus/machine-id",
        _P,
        "Accepted, and not used.",
    ),
)
