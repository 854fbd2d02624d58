"""Every flag in one table: upstream's of Kubernetes v1.36, deprecated ones, and our own.

commandline.py parses a command line and applies the values.
"""

from __future__ import annotations

from typing import Final

from steersman.config.flags_upstream import UPSTREAM_FLAGS, Flag, Group, setting
from steersman.config.go import seconds
from steersman.modes.specs import SPECS

_O, _OLD = Group.OWN, Group.OLD
_SHORT_PERIODS = ", ".join(
    f"{spec.name}: {seconds(spec.min_sync_seconds)}"
    for spec in SPECS.values()
    if spec.min_sync_seconds is not None
)

_DEPRECATED = (
    Flag("healthz-port", "int32", "10256", Group.SERVERS,
         "Port of the health server, 0 for none.", deprecated="use --healthz-bind-address instead"),
    Flag("metrics-port", "int32", "10249", Group.SERVERS,
         "Port of the metrics server, 0 for none.",
         deprecated="use --metrics-bind-address instead"),
)  # fmt: skip

_OWN = (
    setting("manifests", _O, "steersman.manifests",
            "Files or directories of manifests to read instead of an API server."),
    setting("kubeconfig-context", _O, "steersman.kubeconfig_context",
            "Context of the kubeconfig (default: its current one)."),
    setting("watch-list", _O, "steersman.watch_list",
            "Read the first lists as a stream (WatchList), which is not compressed."),
    Flag("min-sync-period", "duration", "", _O,
         f"Minimum time between two syncs in any mode ({_SHORT_PERIODS}).",
         "steersman.min_sync_period"),
    setting("split-threshold", _O, "steersman.split_threshold",
            "Service ports above which long lists of rules are split; 0 for never."),
    setting("large-cluster-endpoints", _O, "steersman.large_cluster_endpoints",
            "Endpoints above which rules have no comments."),
    setting("drain-period", _O, "steersman.drain_period",
            "How long connections of the previous mode may take to end."),
    setting("iptables-variant", _O, "steersman.iptables_variant",
            "nft or legacy (default: autodetect).", choices=("nft", "legacy")),
    setting("strict", _O, "steersman.strict",
            "Fail if the mode cannot run, instead of using its fallback."),
    setting("take-over", _O, "steersman.take_over",
            "Take over from a running instance on this node, instead of failing."),
    setting("ipvs-scheduler-flags", _O, "steersman.ipvs_scheduler_flags",
            "sh-fallback, sh-port, mh-fallback, mh-port or none; mh-port for mh by default."),
    setting("ipvs-local-fallback", _O, "steersman.ipvs_local_fallback",
            "Use remote endpoints if policy Local has no local one, as upstream's ipvs mode does."),
    setting("ebpf-guard-node-ports", _O, "steersman.ebpf_guard_node_ports",
            "In ebpf mode, keep processes of the node from binding to a node port in use."),
    setting("ebpf-cgroup-root", _O, "steersman.ebpf_cgroup_root",
            "In ebpf mode, the cgroup2 directory whose sockets are balanced (default: the root)."),
    setting("ebpf-fast-path", _O, "steersman.ebpf_fast_path",
            "In ebpf mode, send packets of known connections on past netfilter and its policies."),
    setting("ebpf-xdp-devices", _O, "steersman.ebpf_xdp_devices",
            "In ebpf mode, devices on which XDP forwards packets of known connections."),
    setting("state-bind-address", _O, "steersman.state.bind_address",
            "Address and port where pages of a cluster ask about this node; needs a token file."),
    setting("state-token-file", _O, "steersman.state.token_file",
            "File with the token that every such request must carry."),
    setting("state-cert-file", _O, "steersman.state.cert_file",
            "Certificate in PEM, to serve that address with TLS."),
    setting("state-key-file", _O, "steersman.state.key_file", "Private key of that certificate."),
    setting("tracing-endpoint", _O, "steersman.tracing.endpoint",
            "URL of an OTLP receiver that gets a trace of each change, "
            "such as http://127.0.0.1:4318."),
    setting("tracing-sampling-rate-per-million", _O, "steersman.tracing.sampling_rate_per_million",
            "Share of the syncs that are traced."),
    setting("metrics-per-service", _O, "steersman.metrics_per_service",
            "Show connections by Service and endpoint on /metrics; /metrics/services always does."),
    setting("eject-failing-endpoints", _O, "steersman.eject_failing_endpoints",
            "Send no new connections to endpoints that do not answer this node."),
    setting("proxy-port-range", _O, "port_range",
            "Ports that the userspace modes listen on, as FIRST-LAST."),
    setting("udp-timeout", _O, "steersman.udp_idle_timeout",
            "Time after which the userspace modes drop an idle UDP client."),
    setting("userspace-portals", _O, "steersman.userspace_portals",
            "How clients reach the userspace mode (default: rules as root, else none).",
            choices=("iptables", "nftables", "direct", "none")),
    setting("dns-search", _O, "steersman.dns_search",
            "Search suffixes that winuserspace tries for DNS Services."),
    Flag("dry-run", "bool", "false", _O, "Print the changes that a sync would make, and exit."),
)  # fmt: skip

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
