"""Every flag in one table: upstream's of Kubernetes v1.36, deprecated ones, and our own.

commandline.py parses a command line and applies the values.
"""

from __future__ import annotations

from typing import Final

from steersman.config.flags_upstream import UPSTREAM_FLAGS, Flag, Group
from steersman.config.go import seconds
from steersman.modes.specs import SPECS

_O, _OLD = Group.OWN, Group.OLD
_SHORT_PERIODS = ", ".join(
    f"{spec.name}: {seconds(spec.min_sync_seconds)}"
    for spec in SPECS.values()
    if spec.min_sync_seconds is not None
)

_DEPRECATED = (
    Flag(
        "healthz-port",
        "int32",
        "10256",
        Group.SERVERS,
        "Port of the health server, 0 for none.",
        deprecated="use --healthz-bind-address instead",
    ),
    Flag(
        "metrics-port",
        "int32",
        "10249",
        Group.SERVERS,
        "Port of the metrics server, 0 for none.",
        deprecated="use --metrics-bind-address instead",
    ),
)

_OWN = (
    Flag(
        "manifests",
        "strings",
        "",
        _O,
        "Files or directories of manifests to read instead of an API server.",
        "steersman.manifests",
    ),
    Flag(
        "kubeconfig-context",
        "string",
        "",
        _O,
        "Context of the kubeconfig (default: its current one).",
        "steersman.kubeconfig_context",
    ),
    Flag(
        "watch-list",
        "bool",
        "false",
        _O,
        "Read the first lists as a stream (WatchList), which is not compressed.",
        "steersman.watch_list",
    ),
    Flag(
        "min-sync-period",
        "duration",
        "",
        _O,
        f"Minimum time between two syncs in any mode ({_SHORT_PERIODS}).",
        "steersman.min_sync_period",
    ),
    Flag(
        "split-threshold",
        "int32",
        "500",
        _O,
        "Service ports above which long lists of rules are split; 0 for never.",
        "steersman.split_threshold",
    ),
    Flag(
        "large-cluster-endpoints",
        "int32",
        "1000",
        _O,
        "Endpoints above which rules have no comments.",
        "steersman.large_cluster_endpoints",
    ),
    Flag(
        "drain-period",
        "duration",
        "0s",
        _O,
        "How long connections of the previous mode may take to end.",
        "steersman.drain_period",
    ),
    Flag(
        "iptables-variant",
        "string",
        "",
        _O,
        "nft or legacy (default: autodetect).",
        "steersman.iptables_variant",
        choices=("nft", "legacy"),
    ),
    Flag(
        "strict",
        "bool",
        "false",
        _O,
        "Fail if the mode cannot run, instead of using its fallback.",
        "steersman.strict",
    ),
    Flag(
        "take-over",
        "bool",
        "false",
        _O,
        "Take over from a running instance on this node, instead of failing.",
        "steersman.take_over",
    ),
    Flag(
        "ipvs-scheduler-flags",
        "strings",
        "",
        _O,
        "sh-fallback, sh-port, mh-fallback, mh-port or none; mh-port for mh by default.",
        "steersman.ipvs_scheduler_flags",
    ),
    Flag(
        "ipvs-local-fallback",
        "bool",
        "false",
        _O,
        "Use remote endpoints if policy Local has no local one, as upstream's ipvs mode does.",
        "steersman.ipvs_local_fallback",
    ),
    Flag(
        "ebpf-guard-node-ports",
        "bool",
        "true",
        _O,
        "In ebpf mode, keep processes of the node from binding to a node port in use.",
        "steersman.ebpf_guard_node_ports",
    ),
    Flag(
        "ebpf-cgroup-root",
        "string",
        "",
        _O,
        "In ebpf mode, the cgroup2 directory whose sockets are balanced (default: the root).",
        "steersman.ebpf_cgroup_root",
    ),
    Flag(
        "ebpf-xdp-devices",
        "strings",
        "",
        _O,
        "In ebpf mode, devices on which XDP forwards packets of known connections.",
        "steersman.ebpf_xdp_devices",
    ),
    Flag(
        "state-bind-address",
        "string",
        "",
        _O,
        "Address and port where pages of a cluster ask about this node; needs a token file.",
        "steersman.state.bind_address",
    ),
    Flag(
        "state-token-file",
        "string",
        "",
        _O,
        "File with the token that every such request must carry.",
        "steersman.state.token_file",
    ),
    Flag(
        "state-cert-file",
        "string",
        "",
        _O,
        "Certificate in PEM, to serve that address with TLS.",
        "steersman.state.cert_file",
    ),
    Flag(
        "state-key-file",
        "string",
        "",
        _O,
        "Private key of that certificate.",
        "steersman.state.key_file",
    ),
    Flag(
        "tracing-endpoint",
        "string",
        "",
        _O,
        "URL of an OTLP receiver that gets a trace of each change, such as http://127.0.0.1:4318.",
        "steersman.tracing.endpoint",
    ),
    Flag(
        "tracing-sampling-rate-per-million",
        "int32",
        "1000000",
        _O,
        "Share of the syncs that are traced.",
        "steersman.tracing.sampling_rate_per_million",
    ),
    Flag(
        "metrics-per-service",
        "bool",
        "false",
        _O,
        "Show connections by Service and endpoint on /metrics; /metrics/services always does.",
        "steersman.metrics_per_service",
    ),
    Flag(
        "eject-failing-endpoints",
        "bool",
        "false",
        _O,
        "Send no new connections to endpoints that do not answer this node.",
        "steersman.eject_failing_endpoints",
    ),
    Flag(
        "proxy-port-range",
        "string",
        "",
        _O,
        "Ports that the userspace modes listen on, as FIRST-LAST.",
        "port_range",
    ),
    Flag(
        "udp-timeout",
        "duration",
        "250ms",
        _O,
        "Time after which the userspace modes drop an idle UDP client.",
        "steersman.udp_idle_timeout",
    ),
    Flag(
        "userspace-portals",
        "string",
        "",
        _O,
        "How clients reach the userspace mode (default: rules as root, else none).",
        "steersman.userspace_portals",
        choices=("iptables", "nftables", "direct", "none"),
    ),
    Flag(
        "dns-search",
        "strings",
        "",
        _O,
        "Search suffixes that winuserspace tries for DNS Services.",
        "steersman.dns_search",
    ),
    Flag("dry-run", "bool", "false", _O, "Print the changes that a sync would make, and exit."),
)

_NOTHING = "it has no effect; remove it"


def _old(kind: str, names: str) -> tuple[Flag, ...]:
    return tuple(
        Flag(name, kind, "", _OLD, "No effect.", deprecated=_NOTHING) for name in names.split()
    )


_RETIRED = (
    Flag("cleanup-iptables", "bool", "false", _OLD, "Same.", deprecated="use --cleanup instead"),
    *_old("bool", "cleanup-ipvs logtostderr alsologtostderr add-dir-header one-output"),
    *_old("bool", "skip-headers skip-log-headers windows-service enable-dsr"),
    *_old("bool", "forward-healthcheck-vip"),
    *_old("string", "log-dir log-file log-file-max-size stderrthreshold log-backtrace-at"),
    *_old("string", "resource-container network-name source-vip root-hnsendpoint-name"),
)
"""Flags of releases before v1.36 and of other platforms, with what guides print of them."""

FLAGS: Final = {flag.name: flag for flag in (*UPSTREAM_FLAGS, *_DEPRECATED, *_OWN, *_RETIRED)}
"""Every flag by name."""
UPSTREAM: Final = frozenset(flag.name for flag in (*UPSTREAM_FLAGS, *_DEPRECATED))
"""The flags of upstream's v1.36."""
OWN: Final = frozenset(flag.name for flag in _OWN)
"""Our own flags; they apply together with `--config`, too."""
LOGGING: Final = frozenset(flag.name for flag in UPSTREAM_FLAGS if flag.group is Group.LOGGING)
"""The flags that override the configuration file (behaviour 1.3)."""
