"""The facts about each mode that the rest of the program needs, without importing the mode.

Nothing outside modes/ names a mode: it looks at the row. A new mode is a folder with a `mode.py`
that has `create(execute, options)`, and a row here.

Pure, so that the configuration can use it; registry.py builds the modes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec


class IpvsOptions(msgspec.Struct, frozen=True):
    """Operator settings of the ipvs mode."""

    scheduler: str = "rr"
    scheduler_flags: tuple[str, ...] = ()
    """In ipvsadm's words, each for its scheduler; () for the usual ones, `none` for none."""
    exclude_cidrs: tuple[str, ...] = ()
    """Canonical CIDRs; virtual servers in them belong to other programs."""
    strict_arp: bool = False
    """Do not answer ARP for Service addresses on other interfaces."""
    tcp_timeout: int = 0
    """Seconds that idle connections live; 0 keeps the kernel's value, here and below."""
    tcp_fin_timeout: int = 0
    udp_timeout: int = 0


class ModeOptions(msgspec.Struct, frozen=True):
    """Operator settings of all modes; each mode reads its own."""

    asked_for: str = ""
    """The configured mode; "" if modes are built only to remove what they left."""
    leftovers: bool = False
    """The mode is only to remove its objects: building and probing it must create nothing."""
    looks: bool = False
    """The mode only reads, beside the process that programs the kernel."""
    iptables_variant: str = ""
    """`nft`, `legacy`, or "" for this machine's default."""
    ipvs: IpvsOptions = IpvsOptions()
    proxy_ports: tuple[int, int] | None = None
    """First and last port that the userspace mode listens on; None for any."""
    udp_idle: float = 0.25
    """Seconds after which the userspace modes drop an idle UDP client."""
    dns_search: tuple[str, ...] = ()
    """Suffixes that the winuserspace mode tries for questions to DNS Services."""
    portals: str = ""
    """How clients reach the userspace mode: by `iptables` or `nftables` rules, `direct` (Service
    addresses are added to this machine), `none` (only addresses that it has), or "": rules as
    root, otherwise none."""
    guard_node_ports: bool = True
    """Whether the ebpf mode refuses bind() to a node port in use to processes of the node."""
    fast_path: bool = False
    """Whether the ebpf mode sends packets of known connections on past the network stack."""
    xdp_devices: tuple[str, ...] = ()
    """Devices on which the ebpf mode forwards packets of known connections in XDP."""
    cgroup_root: str = ""
    """The cgroup2 directory whose sockets the ebpf mode balances; "" finds the root."""

    def for_looking(self) -> ModeOptions:
        """Return options with which probing loads and sets nothing."""
        ipvs = msgspec.structs.replace(self.ipvs, tcp_timeout=0, tcp_fin_timeout=0, udp_timeout=0)
        return msgspec.structs.replace(self, asked_for="", looks=True, ipvs=ipvs)

    def for_leftovers(self) -> ModeOptions:
        """Return options for removing leftovers; objects of other programs stay protected."""
        return ModeOptions(leftovers=True, ipvs=IpvsOptions(exclude_cidrs=self.ipvs.exclude_cidrs))


class Variant(msgspec.Struct, frozen=True):
    """A flavour of a mode that may have left objects, and the options that select it."""

    name: str = ""
    options: Mapping[str, str] = {}
    """Fields of ModeOptions and their values."""

    def of(self, options: ModeOptions) -> ModeOptions:
        """Return options that select this variant, to remove what it left."""
        return msgspec.structs.replace(options, leftovers=True, **self.options)


class Cost(msgspec.Struct, frozen=True):
    """Costs of kernel objects as they were measured, for estimates."""

    write_us: float = 50.0
    """Microseconds until an object is written, all together."""
    remove_us: float = 50.0
    object_bytes: int = 500
    """Memory of the kernel."""


class ModeSpec(msgspec.Struct, frozen=True):
    """One mode. The defaults are right for a mode that is fast and leaves nothing behind."""

    name: str
    upstream: bool = False
    """Whether Kubernetes v1.36 has this mode on Linux."""
    platform: Literal["linux", "win32"] = "linux"
    """Value of sys.platform that the mode runs on."""
    module: str = ""
    """Module below modes/ that has `create`; "" for the mode's own `mode.py`."""
    fallback: str = ""
    """The mode that serves if this one cannot run here; "" for none."""

    # Configuration

    periods_section: Literal["iptables", "ipvs", "nftables"] = "iptables"
    """Section of the v1alpha1 document with the sync periods of this mode."""
    masquerade_section: Literal["iptables", "nftables"] = "iptables"
    """Section of the v1alpha1 document with `masqueradeAll` and `masqueradeBit` of this mode."""
    min_sync_seconds: float | None = None
    """Minimum sync period, if changes are too cheap to wait upstream's second for more of them."""
    node_port_addresses: tuple[str, ...] = ()
    """Default of `nodePortAddresses`."""
    uses_port_range: bool = False
    """Whether `portRange` means something; upstream ignores it."""
    local_fallback: bool = False
    """Whether `--ipvs-local-fallback` means something."""

    # Metrics

    metrics: tuple[str, ...] = ()
    """The metrics that only some modes have and this is one of them."""
    failure_metric: str = ""
    """The one of them that counts batches refused by the kernel."""
    partial_failure_metric: str = ""
    """The one of them that counts refused batches of only what had changed."""

    counts_rules: bool = False
    """Whether kernel objects are iptables rules, which are counted by table."""

    costs: Mapping[str, Cost] = {}
    """Costs of its kernel objects by variant; "" for all others."""

    # Leftovers

    cleanup_rank: int = 0
    """Place in the order in which modes remove each other's leftovers; 0: takes no part."""
    variants: tuple[Variant, ...] = (Variant(),)
    """Leftovers that another mode removes when it starts to serve."""
    cleanup_variants: tuple[Variant, ...] = ()
    """Leftovers that `cleanup` looks for; () for the same as `variants`."""
    probe_before_cleanup: bool = True
    """Whether leftovers can be read only if `probe` succeeds."""
    dumps: tuple[str, ...] = ()
    """Tables that `steersman NAME dump TABLE` prints."""

    def cost_of(self, variant: str) -> Cost:
        """Return the costs of objects of a variant."""
        return self.costs.get(variant) or self.costs.get("", Cost())


DEFAULT_MODE = "iptables"
_NFT = Variant("nft", {"iptables_variant": "nft", "portals": "iptables"})
_LEGACY = Variant("legacy", {"iptables_variant": "legacy", "portals": "iptables"})
_NFTABLES_PORTALS = Variant("nftables", {"portals": "nftables"})
_DIRECT_PORTALS = Variant("direct", {"portals": "direct"})
_BOTH_EXTENTS = (
    "kubeproxy_sync_full_proxy_rules_duration_seconds",
    "kubeproxy_sync_partial_proxy_rules_duration_seconds",
)
_SYNC = "kubeproxy_sync_proxy_rules_"
_RESTORE_FAILURES = f"{_SYNC}iptables_restore_failures_total"
_PARTIAL_FAILURES = f"{_SYNC}iptables_partial_restore_failures_total"
_NFTABLES_FAILURES = f"{_SYNC}nftables_sync_failures_total"
_RULES = (f"{_SYNC}iptables_total", f"{_SYNC}iptables_last", _RESTORE_FAILURES)
_BY_ENDPOINT = ("steersman_connections_total",)
_BY_FRONTEND = ("steersman_frontend_connections_total",)
_ENDPOINT_TRAFFIC = ("steersman_proxied_packets_total", "steersman_proxied_bytes_total")
_FRONTEND_TRAFFIC = ("steersman_frontend_packets_total", "steersman_frontend_bytes_total")
_FORWARDED = ("steersman_forwarded_connections_total", "steersman_forwarded_bytes_total")
_PROXY = (
    *_FORWARDED,
    *_BY_ENDPOINT,
    "steersman_proxied_bytes_total",
    "steersman_failed_dials_total",
    "steersman_dial_seconds",
    "steersman_proxied_connections",
    "steersman_refused_connections_total",
    "steersman_dial_failures_total",
    "steersman_endpoint_dial_seconds_total",
)

_ROWS = (
    ModeSpec(
        "iptables",
        upstream=True,
        costs={"nft": Cost(92, 63, 2200), "": Cost(38, 15, 1600)},
        metrics=(
            *_BOTH_EXTENTS,
            *_RULES,
            _PARTIAL_FAILURES,
            "kubeproxy_iptables_ct_state_invalid_dropped_packets_total",
            "kubeproxy_iptables_localhost_nodeports_accepted_packets_total",
        ),
        failure_metric=_RESTORE_FAILURES,
        partial_failure_metric=_PARTIAL_FAILURES,
        counts_rules=True,
        cleanup_rank=2,
        variants=(_NFT, _LEGACY),
    ),
    ModeSpec(
        "nftables",
        upstream=True,
        costs={"": Cost(18, 2, 200)},
        periods_section="nftables",
        masquerade_section="nftables",
        min_sync_seconds=0.01,
        node_port_addresses=("primary",),
        metrics=(
            *_BOTH_EXTENTS,
            _NFTABLES_FAILURES,
            f"{_SYNC}nftables_cleanup_failures_total",
            *_BY_ENDPOINT,
            *_BY_FRONTEND,
        ),
        failure_metric=_NFTABLES_FAILURES,
        cleanup_rank=1,
        probe_before_cleanup=False,
    ),
    ModeSpec(
        "ipvs",
        upstream=True,
        fallback="iptables",  # kernels without ip_vs are common
        periods_section="ipvs",
        local_fallback=True,
        metrics=(
            *_RULES,
            *_FORWARDED,
            "steersman_forwarded_packets_total",
            *_BY_ENDPOINT,
            *_ENDPOINT_TRAFFIC,
            *_BY_FRONTEND,
            *_FRONTEND_TRAFFIC,
        ),
        failure_metric=_RESTORE_FAILURES,
        cleanup_rank=3,
        cleanup_variants=(_NFT, _LEGACY),
    ),
    ModeSpec(
        "ebpf",
        costs={"": Cost(15, 15, 650)},
        min_sync_seconds=0.01,
        metrics=(
            "steersman_mode_events_total",
            "steersman_mode_table_entries",
            "steersman_mode_table_capacity",
            *_BY_ENDPOINT,
            *_BY_FRONTEND,
            *_ENDPOINT_TRAFFIC,
        ),
        cleanup_rank=4,
        dumps=("services", "endpoints", "conntrack", "affinity", "counters"),
    ),
    ModeSpec(
        "userspace",
        costs={"": Cost(86, 27, 2200)},
        uses_port_range=True,
        metrics=_PROXY,
        cleanup_rank=5,
        variants=(_NFT, _LEGACY, _NFTABLES_PORTALS),
        cleanup_variants=(_NFT, _LEGACY, _NFTABLES_PORTALS, _DIRECT_PORTALS),
    ),
    ModeSpec(
        "winuserspace",
        platform="win32",
        module="userspace.windows",
        uses_port_range=True,
        metrics=_PROXY,
    ),
)

SPECS: dict[str, ModeSpec] = {row.name: row for row in _ROWS}
"""Every mode by its `--proxy-mode` name."""


def spec_of(mode: str) -> ModeSpec:
    """Return the row of a mode; the defaults of the default mode if the name is not known."""
    return SPECS.get(mode) or ModeSpec(mode)
