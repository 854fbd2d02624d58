"""The configuration: the document `KubeProxyConfiguration` that people write.

Names and order of fields are upstream's (`kubeproxy.config.k8s.io/v1alpha1`, Kubernetes v1.36);
`steersman` is our own block. Zero values mean "not given" until defaults.py fills in defaults.

Sync periods and `masqueradeAll` are settings of every mode that are written in a section of one
mode. ProxyConfig has properties for those of the configured mode; defaults.py clears the others.

A field annotated with RESTART, or a whole section, is read once, at the start. load.py derives
from it which changes of the file take effect at runtime.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import field

from steersman.config.go import Duration, Quantity, seconds
from steersman.model.failover import Settings
from steersman.modes.specs import spec_of

GROUP_VERSION: Final = "kubeproxy.config.k8s.io/v1alpha1"
KIND: Final = "KubeProxyConfiguration"

Int32: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
UInt32: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]

RESTART: Final = msgspec.Meta(extra={"restart": True})
"""Annotation of a field that is read only at the start."""
ZERO: Final = Duration(0)
NOTHING: Final = Quantity("0")


class Section(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Base of all sections: immutable, compared by value, camel case in documents."""


class ClientConnection(Section, frozen=True):
    """`clientConnection`: access to the API server."""

    kubeconfig: str = ""
    """File with the credentials; "" for those of the pod's service account."""
    accept_content_types: str = ""
    """Content types of lists and watches; "" for that of requests. JSON always is one of them."""
    content_type: str = ""
    """Content type of requests: protobuf, or `application/json`."""
    qps: float = 0
    """Has no effect: a watch needs few requests."""
    burst: Int32 = 0
    """Has no effect, as `qps`."""


class VModule(Section, frozen=True):
    """An entry of `logging.vmodule`: the verbosity of modules that match a pattern."""

    file_pattern: str = ""
    """Name of a module, with `*` and `?`."""
    verbosity: UInt32 = 0
    """Its verbosity."""


class LogOptions(Section, frozen=True):
    """`logging.options.text` and `logging.options.json`."""

    split_stream: bool = False
    """Has no effect: all lines go to standard error."""
    info_buffer_size: Quantity = NOTHING
    """Has no effect, as `splitStream`."""


class LoggingOptions(Section, frozen=True):
    """`logging.options`."""

    text: LogOptions = LogOptions()
    """For `format: text`."""
    json: LogOptions = LogOptions()
    """For `format: json`."""


class Logging(Section, frozen=True):
    """`logging`."""

    format: Annotated[str, RESTART] = ""
    """`text` or `json`."""
    flush_frequency: Annotated[Duration, RESTART] = ZERO
    """Has no effect: every line is written immediately."""
    verbosity: UInt32 = 0
    """How much is logged; 2 logs each changed Service."""
    vmodule: Annotated[tuple[VModule, ...], RESTART] = ()
    """Other verbosities for some modules."""
    options: Annotated[LoggingOptions, RESTART] = LoggingOptions()
    """Options of the formats, without effect."""


class IPTables(Section, frozen=True):
    """`iptables`."""

    masquerade_bit: Int32 | None = None
    """Bit of the packet mark that means masquerade, 0 to 31."""
    masquerade_all: bool = False
    """Masquerade everything that goes to a cluster IP."""
    localhost_node_ports: bool | None = None
    """Serve node ports on loopback addresses (IPv4)."""
    sync_period: Duration = ZERO
    """Time after which all rules are compared with the kernel's."""
    min_sync_period: Duration = ZERO
    """Minimum time between two syncs."""


class IPVS(Section, frozen=True):
    """`ipvs`."""

    sync_period: Duration = ZERO
    """Time after which all objects are compared with the kernel's."""
    min_sync_period: Duration = ZERO
    """Minimum time between two syncs."""
    scheduler: Annotated[str, RESTART] = ""
    """Scheduler of Services without an annotation; `rr` if it is empty."""
    exclude_cidrs: Annotated[tuple[str, ...], RESTART] = field(name="excludeCIDRs", default=())
    """Virtual servers in these ranges are left alone."""
    strict_arp: Annotated[bool, RESTART] = field(name="strictARP", default=False)
    """Do not answer ARP requests for addresses of `kube-ipvs0`."""
    tcp_timeout: Annotated[Duration, RESTART] = ZERO
    """Timeout of idle TCP connections; 0 keeps the kernel's."""
    tcp_fin_timeout: Annotated[Duration, RESTART] = ZERO
    """Timeout of TCP connections after a FIN; 0 keeps the kernel's."""
    udp_timeout: Annotated[Duration, RESTART] = ZERO
    """Timeout of UDP flows; 0 keeps the kernel's."""


class NFTables(Section, frozen=True):
    """`nftables`."""

    masquerade_bit: Int32 | None = None
    """Bit of the packet mark that means masquerade, 0 to 31."""
    masquerade_all: bool = False
    """Masquerade everything that goes to a cluster IP."""
    sync_period: Duration = ZERO
    """Time after which all objects are compared with the kernel's."""
    min_sync_period: Duration = ZERO
    """Minimum time between two syncs."""


class Winkernel(Section, frozen=True):
    """`winkernel`: kept for round trips; no mode here uses it."""

    network_name: str = ""
    """Has no effect."""
    source_vip: str = ""
    """Has no effect."""
    enable_dsr: bool = field(name="enableDSR", default=False)
    """Has no effect."""
    root_hns_endpoint_name: str = ""
    """Has no effect."""
    forward_health_check_vip: bool = False
    """Has no effect."""


class DetectLocal(Section, frozen=True):
    """`detectLocal`."""

    bridge_interface: str = ""
    """Bridge of the pods of this node, for mode BridgeInterface."""
    interface_name_prefix: str = ""
    """Prefix of their interfaces, for mode InterfaceNamePrefix."""


class Conntrack(Section, frozen=True):
    """`conntrack`: sysctls set at the start (behaviour 1.6); 0 keeps the kernel's value."""

    max_per_core: Int32 | None = None
    """Entries of the conntrack table for each core."""
    min: Int32 | None = None
    """Entries of the table at least."""
    tcp_established_timeout: Duration | None = None
    """Timeout of idle TCP connections."""
    tcp_close_wait_timeout: Duration | None = None
    """Timeout of TCP connections in CLOSE_WAIT."""
    tcp_be_liberal: bool = False
    """Do not drop packets outside the window as invalid."""
    udp_timeout: Duration = ZERO
    """Timeout of UDP flows without an answer."""
    udp_stream_timeout: Duration = ZERO
    """Timeout of UDP flows with packets in both directions."""


class StateServer(Section, frozen=True):
    """`steersman.state`: the server that pages of a cluster ask about this node."""

    bind_address: str = ""
    """Address and port; "" for no server."""
    token_file: str = ""
    """File with the token that every request must carry; read again when it changes."""
    cert_file: str = ""
    """Certificate of the server, in PEM; "" for HTTP without TLS."""
    key_file: str = ""
    """Its private key."""


_POLICY = Settings()


class FailoverSection(Section, frozen=True):
    """`steersman.failover`: settings of the policy (model/failover.Settings has their meaning).

    The names and defaults are those of Settings; times are durations.
    """

    probes: Int32 = _POLICY.probes
    confirmed_share: float = _POLICY.confirmed_share
    hold: Duration = seconds(_POLICY.hold)
    longest_hold: Duration = seconds(_POLICY.longest_hold)
    check_interval: Duration = seconds(_POLICY.check_interval)
    check_timeout: Duration = seconds(_POLICY.check_timeout)


class Tracing(Section, frozen=True):
    """`steersman.tracing`: spans of each change, as upstream names the fields elsewhere."""

    endpoint: str = ""
    """URL of an OTLP receiver over HTTP, such as `http://127.0.0.1:4318`; "" for no spans."""
    sampling_rate_per_million: Int32 = 1_000_000
    """Share of the syncs that are traced."""


class Steersman(Section, frozen=True):
    """`steersman`: settings that upstream lacks.

    Upstream's strict decoder refuses the key; its lenient decoder then skips it with a log line.
    So one file serves both programs.
    """

    split_threshold: Int32 = 500
    """ServicePorts above which modes with linear rule lists split them; 0 for never."""
    large_cluster_endpoints: Int32 = 1000
    """Endpoints above which a cluster is large (behaviour 8.3)."""
    min_sync_period: Duration | None = None
    """Minimum time between two syncs in any mode; the mode's own if it is not given."""
    drain_period: Duration = ZERO
    """How long connections of the previous mode, or of this process, may take to end."""
    udp_idle_timeout: Annotated[Duration, RESTART] = Duration(250_000_000)
    """Time after which the userspace modes drop an idle UDP client."""
    userspace_portals: Annotated[str, RESTART] = ""
    """How clients reach the userspace mode: `iptables`, `nftables`, `direct` or `none`."""
    dns_search: Annotated[tuple[str, ...], RESTART] = ()
    """Suffixes that the winuserspace mode tries for questions to DNS Services."""
    iptables_variant: Annotated[str, RESTART] = ""
    """`nft` or `legacy`; "" to detect which one this machine uses."""
    strict: Annotated[bool, RESTART] = False
    """Fail if the mode cannot run here, instead of using its fallback."""
    take_over: Annotated[bool, RESTART] = False
    """Take over from a running instance on this node, instead of failing."""
    ipvs_scheduler_flags: Annotated[tuple[str, ...], RESTART] = ()
    """Flags of IPVS schedulers, as in ipvsadm; empty for the usual ones, `none` for none."""
    ipvs_local_fallback: bool = False
    """ipvs: use remote endpoints if policy Local has no local one, as upstream does."""
    ebpf_guard_node_ports: Annotated[bool, RESTART] = True
    """ebpf: refuse bind() to a node port in use to processes of the node."""
    ebpf_fast_path: Annotated[bool, RESTART] = False
    """ebpf: send packets of known connections on past the network stack and its filters."""
    ebpf_xdp_devices: Annotated[tuple[str, ...], RESTART] = ()
    """ebpf: devices on which XDP forwards packets of known connections."""
    ebpf_cgroup_root: Annotated[str, RESTART] = ""
    """ebpf: the cgroup2 directory whose sockets are balanced; "" for the root."""
    metrics_per_service: bool = False
    """Show connections by Service and endpoint on `/metrics`, up to a limit of series."""
    eject_failing_endpoints: bool = False
    """Send no new connections to endpoints that do not answer; an annotation overrides it."""
    failover: FailoverSection = FailoverSection()
    """When endpoints are ejected, and for how long."""
    manifests: Annotated[tuple[str, ...], RESTART] = ()
    """Files or directories of manifests to read instead of an API server."""
    kubeconfig_context: Annotated[str, RESTART] = ""
    """Context of the kubeconfig; "" for its current one."""
    api_servers: Annotated[tuple[str, ...], RESTART] = ()
    """URLs that override the kubeconfig's server, in a random order for each node."""
    watch_list: Annotated[bool, RESTART] = False
    """Read the first lists as a stream (WatchList), which is not compressed."""
    state: Annotated[StateServer, RESTART] = StateServer()
    """The server for pages of a cluster."""
    tracing: Annotated[Tracing, RESTART] = Tracing()
    """Spans of each change, for OpenTelemetry."""


class ProxyConfig(Section, frozen=True):
    """The document, in upstream's order of fields."""

    feature_gates: Annotated[dict[str, bool], RESTART] = {}
    """Feature gates by name; those without effect here are ignored with a warning."""
    client_connection: Annotated[ClientConnection, RESTART] = ClientConnection()
    """Access to the API server."""
    logging: Logging = Logging()
    """Log lines: how many, and in which form."""
    hostname_override: Annotated[str, RESTART] = ""
    """Name of the Node object of this node; "" for the host name."""
    bind_address: str = ""
    """Address of this node, unless it is unspecified; nothing is bound to it."""
    healthz_bind_address: Annotated[str, RESTART] = ""
    """"" disables the health server."""
    metrics_bind_address: Annotated[str, RESTART] = ""
    """"" disables the metrics server."""
    bind_address_hard_fail: Annotated[bool, RESTART] = False
    """Exit if one of the servers cannot listen."""
    enable_profiling: Annotated[bool, RESTART] = False
    """Serve `/debug/pprof` with the port of metrics."""
    show_hidden_metrics_for_version: Annotated[str, RESTART] = ""
    """Has no effect: no metric is hidden."""
    mode: Annotated[str, RESTART] = ""
    """The proxy mode; "" for the default."""
    iptables: IPTables = IPTables()
    """Settings of the iptables mode."""
    ipvs: IPVS = IPVS()
    """Settings of the ipvs mode."""
    nftables: NFTables = NFTables()
    """Settings of the nftables mode."""
    winkernel: Annotated[Winkernel, RESTART] = Winkernel()
    """Settings of a mode that exists on Windows only."""
    detect_local_mode: str = ""
    """How traffic of this node's pods is recognised; `ClusterCIDR` if it is empty."""
    detect_local: DetectLocal = DetectLocal()
    """Settings of `detectLocalMode`."""
    cluster_cidr: str = field(name="clusterCIDR", default="")
    """Ranges of the pods of the cluster, at most one of each family."""
    node_port_addresses: tuple[str, ...] = ()
    """Ranges of the node's addresses that serve node ports, or `primary`; empty for all."""
    oom_score_adj: Annotated[Int32 | None, RESTART] = None
    """Adjustment of the kernel's choice when memory runs out, -1000 to 1000."""
    conntrack: Conntrack = Conntrack()
    """Sysctls of connection tracking."""
    config_sync_period: Duration = ZERO
    """Has no effect: nothing has to be listed again."""
    port_range: Annotated[str, RESTART] = ""
    """Ports that the userspace modes listen on, `first-last`."""
    windows_run_as_service: Annotated[bool, RESTART] = False
    """Has no effect."""
    steersman: Steersman = Steersman()
    """Settings that upstream lacks."""

    @property
    def sync_period(self) -> Duration:
        """Time after which the kernel is compared with the plans, in the configured mode."""
        return self._periods.sync_period

    @property
    def min_sync_period(self) -> Duration:
        """As upstream has it; the sync loop uses `min_sync_interval`."""
        return self._periods.min_sync_period

    @property
    def min_sync_interval(self) -> Duration:
        """Minimum time between two syncs: `steersman.minSyncPeriod`, or else the mode's."""
        own = self.steersman.min_sync_period
        return self.min_sync_period if own is None else own

    @property
    def masquerade_all(self) -> bool:
        """Whether to masquerade everything that goes to a cluster IP, in the configured mode."""
        return self.masquerading.masquerade_all

    @property
    def masquerading(self) -> IPTables | NFTables:
        """The section with `masqueradeAll` and `masqueradeBit` of the configured mode."""
        section: IPTables | NFTables = getattr(self, spec_of(self.mode).masquerade_section)
        return section

    @property
    def cluster_cidrs(self) -> tuple[str, ...]:
        """`clusterCIDR` as a list; unlike in upstream's flag, an empty text has no CIDR."""
        return tuple(self.cluster_cidr.split(",")) if self.cluster_cidr else ()

    @property
    def _periods(self) -> IPTables | IPVS | NFTables:
        section: IPTables | IPVS | NFTables = getattr(self, spec_of(self.mode).periods_section)
        return section
