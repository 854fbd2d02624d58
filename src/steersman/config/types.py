"""The configuration in two forms: the document (v1alpha1), and the internal form.

    KubeProxyConfiguration   the document that people write, with a section per upstream mode
    ProxyConfig              the internal form: the settings of the configured mode are picked out

Names and order of fields are upstream's (`kubeproxy.config.k8s.io/v1alpha1`, Kubernetes v1.36);
`steersman` is our own block. Zero values mean "not given" until convert.py fills in defaults.

A field annotated with RESTART, or a whole section, is read once, at the start. load.py derives
from it which changes of the file take effect at runtime.
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

RESTART: Final = msgspec.Meta(extra={"restart": True})
"""Annotation of a field that is read only at the start."""
ZERO: Final = Duration(0)
NOTHING: Final = Quantity("0")


class Section(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Base of all sections: immutable, compared by value, camel case in documents."""


class ClientConnection(Section, frozen=True):
    """`clientConnection`: access to the API server."""

    kubeconfig: str = ""
    accept_content_types: str = ""
    content_type: str = ""
    qps: float = 0
    """Requests per second."""
    burst: Int32 = 0


class VModule(Section, frozen=True):
    """An entry of `logging.vmodule`: the verbosity of modules that match a pattern."""

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

    format: Annotated[str, RESTART] = ""
    flush_frequency: Annotated[Duration, RESTART] = ZERO
    verbosity: UInt32 = 0
    vmodule: Annotated[tuple[VModule, ...], RESTART] = ()
    options: Annotated[LoggingOptions, RESTART] = LoggingOptions()


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
    scheduler: Annotated[str, RESTART] = ""
    exclude_cidrs: Annotated[tuple[str, ...] | None, RESTART] = field(
        name="excludeCIDRs", default=None
    )
    strict_arp: Annotated[bool, RESTART] = field(name="strictARP", default=False)
    tcp_timeout: Annotated[Duration, RESTART] = ZERO
    tcp_fin_timeout: Annotated[Duration, RESTART] = ZERO
    udp_timeout: Annotated[Duration, RESTART] = ZERO


class V1NFTables(Section, frozen=True):
    """`nftables` of the document."""

    masquerade_bit: Int32 | None = None
    masquerade_all: bool = False
    sync_period: Duration = ZERO
    min_sync_period: Duration = ZERO


class Winkernel(Section, frozen=True):
    """`winkernel`: kept for round trips; no mode here uses it."""

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
    """`conntrack`: sysctls set at the start (behaviour 1.6); 0 keeps the kernel's value."""

    max_per_core: Int32 | None = None
    min: Int32 | None = None
    tcp_established_timeout: Duration | None = None
    tcp_close_wait_timeout: Duration | None = None
    tcp_be_liberal: bool = False
    udp_timeout: Duration = ZERO
    udp_stream_timeout: Duration = ZERO


class StateServer(Section, frozen=True):
    """`steersman.state`: the server that tells pages of a cluster about this node."""

    bind_address: str = ""
    """Address and port; "" for no server."""
    token_file: str = ""
    """File with the token that every request has to bring; read again when it changes."""
    cert_file: str = ""
    """Certificate of the server, in PEM; "" for HTTP without TLS."""
    key_file: str = ""
    """Its private key."""


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
    """Overrides the mode's own; None for the mode's default (ModeSpec.min_sync_seconds)."""
    drain_period: Duration = ZERO
    """Time that connections of the previous mode, or of this process, get to end."""
    udp_idle_timeout: Annotated[Duration, RESTART] = Duration(250_000_000)
    """Time after which the userspace modes drop an idle UDP client."""
    userspace_portals: Annotated[str, RESTART] = ""
    """How clients reach the userspace mode (ModeOptions.portals)."""
    dns_search: Annotated[tuple[str, ...], RESTART] = ()
    """Suffixes that the winuserspace mode tries for questions to DNS Services."""
    iptables_variant: Annotated[str, RESTART] = ""
    """`nft` or `legacy`; "" to detect which one this machine uses."""
    strict: Annotated[bool, RESTART] = False
    """Fail if the mode cannot run here, instead of using its fallback."""
    take_over: Annotated[bool, RESTART] = False
    """Take over from a running instance on this node, instead of failing."""
    ipvs_scheduler_flags: Annotated[tuple[str, ...], RESTART] = ()
    """Flags of IPVS schedulers, as in ipvsadm; () for the usual ones, `none` for none."""
    ipvs_local_fallback: bool = False
    """ipvs: use remote endpoints if policy Local has no local one, as upstream does."""
    ebpf_guard_node_ports: Annotated[bool, RESTART] = True
    """ebpf: refuse bind() to a node port in use to processes of the node."""
    ebpf_xdp_devices: Annotated[tuple[str, ...], RESTART] = ()
    """ebpf: devices on which XDP forwards packets of known connections."""
    ebpf_cgroup_root: Annotated[str, RESTART] = ""
    """ebpf: the cgroup2 directory whose sockets are balanced; "" for the root."""
    metrics_per_service: bool = False
    """Show connections by Service and endpoint on `/metrics`, up to a limit of series."""
    eject_failing_endpoints: bool = False
    """Send no new connections to endpoints that do not answer; an annotation overrides it."""
    manifests: Annotated[tuple[str, ...], RESTART] = ()
    """Files or directories of manifests to read instead of an API server."""
    kubeconfig_context: Annotated[str, RESTART] = ""
    """Context of the kubeconfig; "" for its current one."""
    api_servers: Annotated[tuple[str, ...], RESTART] = ()
    """URLs that override the kubeconfig's server, tried in turn."""
    state: Annotated[StateServer, RESTART] = StateServer()
    """The server for pages of a cluster."""
    tracing: Annotated[Tracing, RESTART] = Tracing()
    """Spans of each change, for OpenTelemetry."""


class BothForms(Section, frozen=True):
    """Fields that come first in both forms, in upstream's order."""

    feature_gates: Annotated[dict[str, bool] | None, RESTART] = None
    client_connection: Annotated[ClientConnection, RESTART] = ClientConnection()
    logging: Logging = Logging()
    hostname_override: Annotated[str, RESTART] = ""
    bind_address: str = ""
    healthz_bind_address: Annotated[str, RESTART] = ""
    """"" disables the health server."""
    metrics_bind_address: Annotated[str, RESTART] = ""
    """"" disables the metrics server."""
    bind_address_hard_fail: Annotated[bool, RESTART] = False
    enable_profiling: Annotated[bool, RESTART] = False
    show_hidden_metrics_for_version: Annotated[str, RESTART] = ""
    mode: Annotated[str, RESTART] = ""


class KubeProxyConfiguration(BothForms, frozen=True):
    """The v1alpha1 document, in upstream's order of fields."""

    iptables: V1IPTables = V1IPTables()
    ipvs: V1IPVS = V1IPVS()
    nftables: V1NFTables = V1NFTables()
    winkernel: Annotated[Winkernel, RESTART] = Winkernel()
    detect_local_mode: str = ""
    detect_local: V1DetectLocal = V1DetectLocal()
    cluster_cidr: str = field(name="clusterCIDR", default="")
    node_port_addresses: tuple[str, ...] | None = None
    oom_score_adj: Annotated[Int32 | None, RESTART] = None
    conntrack: Conntrack = Conntrack()
    config_sync_period: Duration = ZERO
    port_range: Annotated[str, RESTART] = ""
    windows_run_as_service: Annotated[bool, RESTART] = False
    steersman: Steersman = Steersman()


class IPTables(Section, frozen=True):
    """Settings of `iptables` that are not shared between modes."""

    masquerade_bit: int | None = None
    localhost_node_ports: bool | None = None


class IPVS(Section, frozen=True):
    """Settings of `ipvs` that are not shared between modes."""

    scheduler: str = ""
    exclude_cidrs: tuple[str, ...] = ()
    strict_arp: bool = False
    tcp_timeout: Duration = ZERO
    tcp_fin_timeout: Duration = ZERO
    udp_timeout: Duration = ZERO


class NFTables(Section, frozen=True):
    """Settings of `nftables` that are not shared between modes."""

    masquerade_bit: int | None = None


class DetectLocal(Section, frozen=True):
    """How to recognise traffic of local pods."""

    bridge_interface: str = ""
    interface_name_prefix: str = ""
    cluster_cidrs: tuple[str, ...] = ()


class Linux(Section, frozen=True):
    """Settings that only Linux has."""

    conntrack: Conntrack = Conntrack()
    masquerade_all: bool = False
    oom_score_adj: Annotated[int | None, RESTART] = None


class ProxyConfig(BothForms, frozen=True):
    """The internal form: one sync period, taken from the section of the configured mode."""

    feature_gates: Annotated[dict[str, bool], RESTART] = {}
    iptables: IPTables = IPTables()
    ipvs: Annotated[IPVS, RESTART] = IPVS()
    nftables: NFTables = NFTables()
    winkernel: Annotated[Winkernel, RESTART] = Winkernel()
    detect_local_mode: str = ""
    detect_local: DetectLocal = DetectLocal()
    node_port_addresses: tuple[str, ...] = ()
    sync_period: Duration = ZERO
    min_sync_period: Duration = ZERO
    """As upstream has it; the sync loop uses `min_sync_interval`."""
    config_sync_period: Duration = ZERO
    linux: Linux = Linux()
    port_range: Annotated[str, RESTART] = ""
    """Listening ports of the userspace modes, `first-last`; upstream ignores it."""
    windows_run_as_service: Annotated[bool, RESTART] = False
    steersman: Steersman = Steersman()

    @property
    def min_sync_interval(self) -> Duration:
        """Minimum time between two syncs: `steersman.minSyncPeriod`, or else the mode's."""
        own = self.steersman.min_sync_period
        return self.min_sync_period if own is None else own
