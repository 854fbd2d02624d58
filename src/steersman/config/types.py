"""The proxy's configuration: the document people write (v1alpha1) and the form the program uses.

Field names and their order are upstream's (`kubeproxy.config.k8s.io/v1alpha1`, Kubernetes v1.36);
`steersman` is our own block. Zero values mean "not given" until defaults.py has run.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import field

from steersman.config.go import Duration, Quantity

GROUP_VERSION: Final = "kubeproxy.config.k8s.io/v1alpha1"
KIND: Final = "KubeProxyConfiguration"

Int32: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
UInt32: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]

ZERO: Final = Duration(0)
NOTHING: Final = Quantity("0")


class Section(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Base of all parts: immutable, compared by value, camel-case in documents."""


class ClientConnection(Section, frozen=True):
    """`clientConnection`: how the API server is reached."""

    kubeconfig: str = ""
    accept_content_types: str = ""
    content_type: str = ""
    qps: float = 0
    """Requests a second."""
    burst: Int32 = 0


class VModule(Section, frozen=True):
    """An entry of `logging.vmodule`: the verbosity of the modules that match a pattern."""

    file_pattern: str = ""
    verbosity: UInt32 = 0


class LogOptions(Section, frozen=True):
    """`logging.options.text` and `logging.options.json`."""

    split_stream: bool = False
    """Errors to stderr, the rest to stdout."""
    info_buffer_size: Quantity = NOTHING


class LoggingOptions(Section, frozen=True):
    """`logging.options`."""

    text: LogOptions = LogOptions()
    json: LogOptions = LogOptions()


class Logging(Section, frozen=True):
    """`logging`."""

    format: str = ""
    flush_frequency: Duration = ZERO
    verbosity: UInt32 = 0
    vmodule: tuple[VModule, ...] = ()
    options: LoggingOptions = LoggingOptions()


class V1IPTables(Section, frozen=True):
    """`iptables` of the document."""

    masquerade_bit: Int32 | None = None
    masquerade_all: bool = False
    localhost_node_ports: bool | None = None
    sync_period: Duration = ZERO
    min_sync_period: Duration = ZERO


class V1IPVS(Section, frozen=True):
    """`ipvs` of the document."""

    sync_period: Duration = ZERO
    min_sync_period: Duration = ZERO
    scheduler: str = ""
    exclude_cidrs: tuple[str, ...] | None = field(name="excludeCIDRs", default=None)
    strict_arp: bool = field(name="strictARP", default=False)
    tcp_timeout: Duration = ZERO
    tcp_fin_timeout: Duration = ZERO
    udp_timeout: Duration = ZERO


class V1NFTables(Section, frozen=True):
    """`nftables` of the document."""

    masquerade_bit: Int32 | None = None
    masquerade_all: bool = False
    sync_period: Duration = ZERO
    min_sync_period: Duration = ZERO


class Winkernel(Section, frozen=True):
    """`winkernel`: carried along, no mode here uses it."""

    network_name: str = ""
    source_vip: str = ""
    enable_dsr: bool = field(name="enableDSR", default=False)
    root_hns_endpoint_name: str = ""
    forward_health_check_vip: bool = False


class V1DetectLocal(Section, frozen=True):
    """`detectLocal` of the document."""

    bridge_interface: str = ""
    interface_name_prefix: str = ""


class Conntrack(Section, frozen=True):
    """`conntrack`: sysctls set at the start (behaviour 1.6); 0 leaves them alone."""

    max_per_core: Int32 | None = None
    min: Int32 | None = None
    tcp_established_timeout: Duration | None = None
    tcp_close_wait_timeout: Duration | None = None
    tcp_be_liberal: bool = False
    udp_timeout: Duration = ZERO
    udp_stream_timeout: Duration = ZERO


class Steersman(Section, frozen=True):
    """`steersman`: what upstream does not have.

    Upstream's strict decoder refuses the key, its lenient one then skips it with a log line: the
    same file serves both programs.
    """

    split_threshold: Int32 = 500
    """ServicePorts above which modes with linear lists split them; 0 never does."""
    large_cluster_endpoints: Int32 = 1000
    """Endpoints above which a cluster is large (behaviour 8.3)."""
    min_sync_period: Duration | None = None
    """Beats the mode's own; not given, nftables and ebpf take 10ms unless theirs is given."""
    drain_period: Duration = ZERO
    """How long a mode with own connection tables keeps serving them after it was left."""
    udp_idle_timeout: Duration = Duration(250_000_000)
    """When the userspace modes forget an idle UDP client."""
    userspace_portals: str = ""
    """What leads clients to the userspace mode; "" for rules as root, and otherwise nothing."""
    dns_search: tuple[str, ...] = ()
    """Suffixes that the winuserspace mode tries for questions to DNS Services; () for none."""
    iptables_variant: str = ""
    """`nft` or `legacy`; "" finds out which one this machine uses."""
    strict: bool = False
    """Fail where the mode cannot run here; otherwise iptables stands in for ipvs."""
    take_over: bool = False
    """Take over from an instance that runs on this node; otherwise the start is refused."""
    ipvs_scheduler_flags: tuple[str, ...] = ()
    """Of the ipvs mode's schedulers, in ipvsadm's words; () for the usual ones, `none` for none."""
    ipvs_local_fallback: bool = False
    """In the ipvs mode, policy Local without an endpoint here goes to endpoints elsewhere."""
    ebpf_guard_node_ports: bool = True
    """In the ebpf mode, bind() to a node port in use is refused to processes of the node."""
    ebpf_xdp_devices: tuple[str, ...] = ()
    """In the ebpf mode, devices on which XDP sends packets of known connections on."""
    ebpf_cgroup_root: str = ""
    """In the ebpf mode, the cgroup2 directory whose sockets are balanced; "" finds the root."""
    metrics_per_service: bool = False
    """Show connections by Service, frontend and endpoint on `/metrics`, up to a limit of series."""
    manifests: tuple[str, ...] = ()
    """Files or directories of manifests to read instead of an API server."""
    kubeconfig_context: str = ""
    """Context of the kubeconfig to use; "" is its current one."""
    api_servers: tuple[str, ...] = ()
    """URLs that override the kubeconfig's, tried in turn."""


class BothForms(Section, frozen=True):
    """What comes first in both forms, in upstream's order."""

    feature_gates: dict[str, bool] | None = None
    client_connection: ClientConnection = ClientConnection()
    logging: Logging = Logging()
    hostname_override: str = ""
    bind_address: str = ""
    healthz_bind_address: str = ""
    """"" switches the health server off."""
    metrics_bind_address: str = ""
    """"" switches the metrics server off."""
    bind_address_hard_fail: bool = False
    enable_profiling: bool = False
    show_hidden_metrics_for_version: str = ""
    mode: str = ""


class KubeProxyConfiguration(BothForms, frozen=True):
    """The v1alpha1 document, in upstream's order of fields."""

    iptables: V1IPTables = V1IPTables()
    ipvs: V1IPVS = V1IPVS()
    nftables: V1NFTables = V1NFTables()
    winkernel: Winkernel = Winkernel()
    detect_local_mode: str = ""
    detect_local: V1DetectLocal = V1DetectLocal()
    cluster_cidr: str = field(name="clusterCIDR", default="")
    node_port_addresses: tuple[str, ...] | None = None
    oom_score_adj: Int32 | None = None
    conntrack: Conntrack = Conntrack()
    config_sync_period: Duration = ZERO
    port_range: str = ""
    windows_run_as_service: bool = False
    steersman: Steersman = Steersman()


class IPTables(Section, frozen=True):
    """What of `iptables` is not shared between modes."""

    masquerade_bit: int | None = None
    localhost_node_ports: bool | None = None


class IPVS(Section, frozen=True):
    """What of `ipvs` is not shared between modes."""

    scheduler: str = ""
    exclude_cidrs: tuple[str, ...] = ()
    strict_arp: bool = False
    tcp_timeout: Duration = ZERO
    tcp_fin_timeout: Duration = ZERO
    udp_timeout: Duration = ZERO


class NFTables(Section, frozen=True):
    """What of `nftables` is not shared between modes."""

    masquerade_bit: int | None = None


class DetectLocal(Section, frozen=True):
    """How local pods' traffic is recognised."""

    bridge_interface: str = ""
    interface_name_prefix: str = ""
    cluster_cidrs: tuple[str, ...] = ()


class Linux(Section, frozen=True):
    """What only Linux has."""

    conntrack: Conntrack = Conntrack()
    masquerade_all: bool = False
    oom_score_adj: int | None = None


class ProxyConfig(BothForms, frozen=True):
    """The internal form: one sync period whatever the mode, the settings of the mode picked out."""

    feature_gates: dict[str, bool] = {}
    iptables: IPTables = IPTables()
    ipvs: IPVS = IPVS()
    nftables: NFTables = NFTables()
    winkernel: Winkernel = Winkernel()
    detect_local_mode: str = ""
    detect_local: DetectLocal = DetectLocal()
    node_port_addresses: tuple[str, ...] = ()
    sync_period: Duration = ZERO
    min_sync_period: Duration = ZERO
    """As upstream has it; the loop goes by `min_sync_interval`."""
    config_sync_period: Duration = ZERO
    linux: Linux = Linux()
    port_range: str = ""
    """Listening ports of the userspace modes, `first-last`; upstream ignores it."""
    windows_run_as_service: bool = False
    steersman: Steersman = Steersman()

    @property
    def min_sync_interval(self) -> Duration:
        """The least time between two syncs: `steersman.minSyncPeriod`, or else the mode's."""
        own = self.steersman.min_sync_period
        return self.min_sync_period if own is None else own
