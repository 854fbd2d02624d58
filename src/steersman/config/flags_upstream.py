"""The flags of upstream's kube-proxy v1.36: its names, types and defaults, with our own help.

A flag that sets one field of the configuration has the type and the default of that field.
"""

from __future__ import annotations

import enum
from operator import attrgetter
from typing import Any, Final

import msgspec

from steersman.config.defaults import default_config
from steersman.config.go import Duration, Quantity
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
    """All values that it can have."""
    completes: str = ""
    """Kind of names that completion asks the running process for: service, endpoint, pod, node or
    namespace; `file` for paths, `mode` for modes."""
    repeatable: bool = False
    """Whether a string of upstream is a list here."""

    @property
    def optional_value(self) -> str:
        """The value of the bare flag; "" if a value has to follow."""
        return "true" if self.kind in ("bool", "version") else ""


_KINDS = {
    bool: "bool",
    int: "int32",
    Duration: "duration",
    Quantity: "quantity",
    str: "string",
    tuple: "strings",
    dict: "mapStringBool",
}
_DEFAULTS = default_config()


def setting(name: str, group: Group, target: str, text: str, **more: Any) -> Flag:
    """Return the flag that sets a field of ProxyConfig, with its type and default.

    `more` are other fields of the Flag: the kind, if the type of the field does not tell it.
    """
    value = attrgetter(target)(_DEFAULTS)
    if isinstance(value, bool):
        default = str(value).lower()
    else:
        default = "" if value in ((), {}) else str(value)
    fields = {"kind": _KINDS[type(value)]} | more
    return Flag(name, default=default, group=group, help=text, target=target, **fields)


_G, _A, _M, _I, _V = Group.GENERAL, Group.API, Group.MODE, Group.IPTABLES, Group.IPVS
_C, _S, _L, _P = Group.CONNTRACK, Group.SERVERS, Group.LOGGING, Group.PROCESS
_MODES = ", ".join(spec.name for spec in SPECS.values() if spec.platform == "linux")
_DETECT_MODES = ("ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix")

UPSTREAM_FLAGS: Final = (
    Flag("config", "string", "", _G, "Configuration file. With it, most flags are ignored."),
    Flag("write-config-to", "string", "", _G,
         "Write the configuration in force to a file, and exit."),
    Flag("cleanup", "bool", "false", _G,
         "Remove everything that steersman wrote from the kernel, and exit."),
    Flag("init-only", "bool", "false", _G,
         "Do only the steps that need full root privileges, and exit."),
    Flag("help", "bool", "false", _G, "Print this text.", short="h"),
    Flag("version", "version", "false", _G, "Print the version; --version=raw prints all of it."),
    Flag("hostname-override", "string", "", _G,
         "Name of this node (default: the hostname). Overrides the configuration file."),
    setting("feature-gates", _G, "feature_gates", "Feature gates, as NAME=true|false,..."),
    setting("kubeconfig", _A, "client_connection.kubeconfig",
            "Kubeconfig file (default: the pod's service account)."),
    Flag("master", "string", "", _A,
         "URL of the API server; overrides the kubeconfig. A list is tried in turn.",
         repeatable=True),
    setting("kube-api-content-type", _A, "client_connection.content_type",
            "Content type of requests and answers; JSON is accepted, too."),
    setting("kube-api-qps", _A, "client_connection.qps",
            "Requests per second to the API server.", kind="float32"),
    setting("kube-api-burst", _A, "client_connection.burst",
            "Burst of requests to the API server."),
    setting("config-sync-period", _A, "config_sync_period",
            "Period of full lists from the API server."),
    setting("proxy-mode", _M, "mode",
            f"How the kernel is programmed: {_MODES}; {DEFAULT_MODE} by default.",
            kind="ProxyMode", choices=tuple(SPECS)),
    setting("bind-address", _M, "bind_address",
            "IP of this node, unless 0.0.0.0 or ::; nothing listens on it.", kind="ip"),
    setting("nodeport-addresses", _M, "node_port_addresses",
            "CIDRs of local addresses that serve node ports, or the word primary."),
    Flag("masquerade-all", "bool", "false", _M, "Masquerade all traffic to cluster IPs."),
    setting("detect-local-mode", _M, "detect_local_mode",
            "How to recognise local pods (default: ClusterCIDR).",
            kind="LocalMode", choices=_DETECT_MODES),
    setting("cluster-cidr", _M, "cluster_cidr", "Pod CIDR of the cluster, or one of each family."),
    setting("pod-bridge-interface", _M, "detect_local.bridge_interface",
            "Bridge of the pods, for BridgeInterface."),
    setting("pod-interface-name-prefix", _M, "detect_local.interface_name_prefix",
            "Prefix of the pods' interfaces, for InterfaceNamePrefix."),
    Flag("iptables-sync-period", "duration", "30s", _I,
         "Time between full checks of the kernel; in every mode but ipvs."),
    Flag("iptables-min-sync-period", "duration", "1s", _I,
         "Minimum time between two syncs; in every mode but ipvs."),
    setting("iptables-masquerade-bit", _I, "iptables.masquerade_bit",
            "Bit of the packet mark for masquerading, 0 to 31."),
    setting("iptables-localhost-nodeports", _I, "iptables.localhost_node_ports",
            "Serve node ports on 127.0.0.0/8, too."),
    Flag("ipvs-sync-period", "duration", "30s", _V, "Time between full checks of the kernel."),
    Flag("ipvs-min-sync-period", "duration", "1s", _V, "Minimum time between two syncs."),
    setting("ipvs-scheduler", _V, "ipvs.scheduler", "Scheduler (default: rr)."),
    setting("ipvs-exclude-cidrs", _V, "ipvs.exclude_cidrs",
            "CIDRs of virtual servers that belong to other programs."),
    setting("ipvs-strict-arp", _V, "ipvs.strict_arp", "Set arp_ignore to 1 and arp_announce to 2."),
    setting("ipvs-tcp-timeout", _V, "ipvs.tcp_timeout",
            "Timeout of idle TCP connections; 0 keeps the kernel's."),
    setting("ipvs-tcpfin-timeout", _V, "ipvs.tcp_fin_timeout",
            "Timeout of TCP connections after a FIN; 0 keeps the kernel's."),
    setting("ipvs-udp-timeout", _V, "ipvs.udp_timeout",
            "Timeout after UDP packets; 0 keeps the kernel's."),
    setting("conntrack-max-per-core", _C, "conntrack.max_per_core",
            "Entries of the table per CPU; 0 keeps the kernel's."),
    setting("conntrack-min", _C, "conntrack.min", "Minimum number of entries of the table."),
    setting("conntrack-tcp-timeout-established", _C, "conntrack.tcp_established_timeout",
            "Timeout of idle established TCP; 0 keeps the kernel's."),
    setting("conntrack-tcp-timeout-close-wait", _C, "conntrack.tcp_close_wait_timeout",
            "Timeout of TCP in CLOSE_WAIT; 0 keeps the kernel's."),
    setting("conntrack-tcp-be-liberal", _C, "conntrack.tcp_be_liberal",
            "Do not drop packets that are out of the TCP window."),
    setting("conntrack-udp-timeout", _C, "conntrack.udp_timeout",
            "Timeout of UDP without an answer; 0 keeps the kernel's."),
    setting("conntrack-udp-timeout-stream", _C, "conntrack.udp_stream_timeout",
            "Timeout of UDP that was answered; 0 keeps the kernel's."),
    setting("healthz-bind-address", _S, "healthz_bind_address",
            "Address of the health server; empty for none.", kind="ipport"),
    setting("metrics-bind-address", _S, "metrics_bind_address",
            "Address of the metrics server; empty for none.", kind="ipport"),
    setting("bind-address-hard-fail", _S, "bind_address_hard_fail",
            "Exit if one of the servers cannot listen."),
    setting("profiling", _S, "enable_profiling", "Serve /debug/pprof on the metrics server."),
    setting("show-hidden-metrics-for-version", _S, "show_hidden_metrics_for_version",
            "Show metrics hidden since the previous minor release."),
    setting("v", _L, "logging.verbosity", "Verbosity, 0 to 10.", kind="Level", short="v"),
    setting("vmodule", _L, "logging.vmodule",
            "Verbosity of modules whose name matches a pattern (text format only).",
            kind="pattern=N,..."),
    setting("logging-format", _L, "logging.format",
            "text (as klog's) or json.", choices=("text", "json")),
    setting("log-flush-frequency", _L, "logging.flush_frequency",
            "Maximum time that a line is buffered."),
    setting("log-text-split-stream", _L, "logging.options.text.split_stream",
            "Errors to stderr, the rest to stdout (gate LoggingAlphaOptions)."),
    setting("log-text-info-buffer-size", _L, "logging.options.text.info_buffer_size",
            "Buffer of the split stream (gate LoggingAlphaOptions)."),
    setting("log-json-split-stream", _L, "logging.options.json.split_stream",
            "As for text, in json format."),
    setting("log-json-info-buffer-size", _L, "logging.options.json.info_buffer_size",
            "As for text, in json format."),
    setting("oom-score-adj", _P, "oom_score_adj", "oom_score_adj of this process, -1000 to 1000."),
    Flag("boot-id-file", "string", "/proc/sys/kernel/random/boot_id", _P,
         "Accepted, and not used."),
    Flag("machine-id-file", "string", "/etc/machine-id,/var/lib/dbus/machine-id", _P,
         "Accepted, and not used."),
)  # fmt: skip
