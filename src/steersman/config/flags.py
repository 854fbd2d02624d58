"""Every flag, as one table: upstream's of Kubernetes v1.36, its old ones, and ours.

Not here: how a command line is taken apart (arguments.py), what the values do (commandline.py).
"""

from __future__ import annotations

from typing import Final

from steersman.config.flags_upstream import UPSTREAM_FLAGS, Flag, Group

_O, _OLD = Group.OWN, Group.OLD

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
        "Files or directories of manifests, read instead of an API server.",
        "steersman.manifests",
    ),
    Flag(
        "kubeconfig-context",
        "string",
        "",
        _O,
        "Context of the kubeconfig; its current one otherwise.",
        "steersman.kubeconfig_context",
    ),
    Flag(
        "min-sync-period",
        "duration",
        "",
        _O,
        "Least time between two syncs in any mode (nftables, ebpf: 10ms).",
        "steersman.min_sync_period",
    ),
    Flag(
        "split-threshold",
        "int32",
        "500",
        _O,
        "Service ports above which long lists of rules are split; 0 never.",
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
        "How long a mode that was left keeps its connections.",
        "steersman.drain_period",
    ),
    Flag(
        "iptables-variant",
        "string",
        "",
        _O,
        "nft or legacy; found out otherwise.",
        "steersman.iptables_variant",
        choices=("nft", "legacy"),
    ),
    Flag(
        "strict",
        "bool",
        "false",
        _O,
        "Fail where the mode cannot run, instead of iptables for ipvs.",
        "steersman.strict",
    ),
    Flag(
        "take-over",
        "bool",
        "false",
        _O,
        "Take over from an instance that runs on this node, instead of refusing to start.",
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
        "Policy Local without an endpoint here goes to others, as in upstream's ipvs mode.",
        "steersman.ipvs_local_fallback",
    ),
    Flag(
        "ebpf-guard-node-ports",
        "bool",
        "true",
        _O,
        "In the ebpf mode, no process of the node may bind to a node port in use.",
        "steersman.ebpf_guard_node_ports",
    ),
    Flag(
        "ebpf-cgroup-root",
        "string",
        "",
        _O,
        "In the ebpf mode, the cgroup2 directory whose sockets are balanced; the root if empty.",
        "steersman.ebpf_cgroup_root",
    ),
    Flag(
        "ebpf-xdp-devices",
        "strings",
        "",
        _O,
        "In the ebpf mode, devices whose packets are sent on by XDP where they are known.",
        "steersman.ebpf_xdp_devices",
    ),
    Flag(
        "metrics-per-service",
        "bool",
        "false",
        _O,
        "Show connections by Service and endpoint on /metrics; /metrics/services does always.",
        "steersman.metrics_per_service",
    ),
    Flag(
        "proxy-port-range",
        "string",
        "",
        _O,
        "Ports to listen on in the userspace modes, as FIRST-LAST.",
        "port_range",
    ),
    Flag(
        "udp-timeout",
        "duration",
        "250ms",
        _O,
        "When the userspace modes forget an idle UDP client.",
        "steersman.udp_idle_timeout",
    ),
    Flag(
        "userspace-portals",
        "string",
        "",
        _O,
        "What leads clients to the userspace mode; rules as root, else none.",
        "steersman.userspace_portals",
        choices=("iptables", "nftables", "direct", "none"),
    ),
    Flag(
        "dns-search",
        "strings",
        "",
        _O,
        "Suffixes that winuserspace tries for questions to DNS Services.",
        "steersman.dns_search",
    ),
    Flag("dry-run", "bool", "false", _O, "Show what would change in the kernel, and exit."),
)

_NOTHING = "it has no effect any more; remove it"


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
"""Every flag by its name."""
UPSTREAM: Final = frozenset(flag.name for flag in (*UPSTREAM_FLAGS, *_DEPRECATED))
"""The flags that upstream's v1.36 has."""
OWN: Final = frozenset(flag.name for flag in _OWN)
"""Ours: they hold beside `--config`, too."""
LOGGING: Final = frozenset(flag.name for flag in UPSTREAM_FLAGS if flag.group is Group.LOGGING)
"""Those that win over the configuration file (behaviour 1.3)."""
