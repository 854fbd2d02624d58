"""The plan of this node, as mode-neutral data: the output of the compiler, the input of every mode.

    NodePlan
      settings: NodeSettings            node-wide; per family: FamilySettings
      services: ServicePlan             one per ServicePort and family (PlanKey)
        frontends: Frontend             destinations of clients
          pod, node, external: Action   forward to a Pool, drop or reject; masquerade or not
        cluster, local: Endpoint        the Pools

A plan contains all decisions: the endpoints of a packet, whether its source is rewritten, and
which clients are dropped or rejected. A mode translates; it never decides.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from steersman.model.addresses import in_cidr, is_loopback, join_host_port
from steersman.model.findings import Finding, Severity
from steersman.model.names import Family, PlanKey

T = TypeVar("T")
_IPV4 = Family.IPV4  # looking a member up costs ten times as much (Python 3.11)


class Value(msgspec.Struct, frozen=True, gc=False):
    """Base of the plan's structs: immutable, compared by value."""


# Endpoints, classes of clients, Actions


class Endpoint(Value, frozen=True, order=True):
    """An address and port that receive connections."""

    ip: str
    port: int
    local: bool = False
    """Whether it runs on this node."""

    def __str__(self) -> str:
        return join_host_port(self.ip, self.port)


class SourceClass(enum.StrEnum):
    """The kind of client. A pod with an address of this node counts as a pod (behaviour 6)."""

    POD = "pod"  # a pod of the cluster, according to the node's detector
    NODE = "node"  # an address of this node itself
    EXTERNAL = "external"  # everyone else


def of_class(source: SourceClass, pod: T, node: T, external: T) -> T:
    """Return the value for a class of clients."""
    match source:
        case SourceClass.POD:
            return pod
        case SourceClass.NODE:
            return node
        case _:
            return external


class Verdict(enum.StrEnum):
    """What happens to a packet."""

    FORWARD = "forward"
    DROP = "drop"
    REJECT = "reject"


class Pool(enum.StrEnum):
    """One of the two lists of endpoints of a ServicePlan."""

    CLUSTER = "cluster"
    LOCAL = "local"


_CLUSTER = Pool.CLUSTER


class Action(Value, frozen=True):
    """The decision for packets of one SourceClass to one Frontend."""

    verdict: Verdict
    pool: Pool = Pool.CLUSTER
    """For FORWARD: the endpoints to choose from; never an empty list."""
    masquerade: bool = False
    """For FORWARD: whether the source is rewritten to an address of this node."""


# One ServicePort


class FrontendKind(enum.StrEnum):
    """Why a destination belongs to a Service."""

    CLUSTER_IP = "clusterIP"
    EXTERNAL_IP = "externalIP"
    LOAD_BALANCER_IP = "loadBalancerIP"
    NODE_PORT = "nodePort"


class Frontend(Value, frozen=True):
    """A destination at which clients reach a ServicePort, and the Action for each SourceClass."""

    kind: FrontendKind
    address: str
    """Canonical address; "" for a node port (the addresses are the node's: FamilySettings)."""
    port: int
    pod: Action
    node: Action
    external: Action
    source_ranges: tuple[str, ...] = ()
    """Canonical CIDRs that may use it; packets of others are dropped. () means everyone.
    Includes the addresses that behaviour 6 adds (the VIPs, if a range contains this node)."""

    def action(self, source: SourceClass) -> Action:
        """Return the Action for a class of clients."""
        return of_class(source, self.pod, self.node, self.external)


class Scheduling(Value, frozen=True):
    """Options of modes that leave the choice of an endpoint to a scheduler of the kernel."""

    scheduler: str = ""
    """Name of the scheduler; "" for the configured one."""
    scheduler_flags: tuple[str, ...] = ()
    """Flags in ipvsadm's words; () for the configured ones, `none` for none."""
    weights: tuple[tuple[str, int, int], ...] = ()
    """Address, port and weight of the endpoints whose weight is not 1, sorted."""


class ProxyOptions(Value, frozen=True):
    """Options of modes in which connections end in the process."""

    proxy_protocol: bool = False
    """Send the client's address to TCP endpoints by the PROXY protocol."""
    kept: tuple[Endpoint, ...] | None = None
    """The endpoints that keep their connections, in printed order; connections to others are
    closed. None if all keep theirs."""


class ServicePlan(Value, frozen=True):
    """The plan of one ServicePort in one family."""

    key: PlanKey
    frontends: tuple[Frontend, ...]
    """clusterIP first, then external IPs, load balancer IPs and the node port."""
    cluster: tuple[Endpoint, ...] = ()
    """Endpoints of Pool.CLUSTER, sorted by their printed form; all equally likely. Empty if no
    Action forwards to them, as is `local`."""
    local: tuple[Endpoint, ...] = ()
    """Endpoints of Pool.LOCAL, in the same order."""
    reachable: tuple[Endpoint, ...] = ()
    """Every endpoint that an Action can reach, in the same order."""
    affinity_seconds: int = 0
    """ClientIP session affinity: seconds after the last new connection; 0 for none."""
    health_check_node_port: int = 0
    """Port at which health check traffic is admitted; 0 for none."""
    ready_here: int = 0
    """Ready endpoints of the whole Service on this node, by address: the answer on its health
    check node port (behaviour 4). 0 without such a port."""
    metrics: bool = False
    """Show its connections on `/metrics`, by frontend and endpoint."""
    least_connections: bool = False
    """Prefer the endpoint with the fewest connections, if the mode can count them."""
    maglev: bool = False
    """Use Maglev hashing for external clients, if the mode supports it."""
    scheduling: Scheduling = Scheduling()
    proxy: ProxyOptions = ProxyOptions()
    draining: bool = False
    """None of its endpoints is ready: those in the lists terminate, but still serve."""

    def pool(self, pool: Pool) -> tuple[Endpoint, ...]:
        """Return the endpoints of a pool."""
        return self.cluster if pool is _CLUSTER else self.local


# The node


class LocalDetector(Value, frozen=True):
    """The method to recognise traffic of local pods; at most one field is set (behaviour 13)."""

    cidr: str = ""
    interface: str = ""
    interface_prefix: str = ""

    def __bool__(self) -> bool:
        return bool(self.cidr or self.interface or self.interface_prefix)

    def detects(self, address: str, interface: str) -> bool:
        """Whether a packet with this source address, from this interface, comes from a pod."""
        if self.cidr:
            return in_cidr(address, self.cidr)
        if self.interface:
            return interface == self.interface
        return bool(self.interface_prefix) and interface.startswith(self.interface_prefix)


class SourceClassifier(Value, frozen=True):
    """The rules that determine the SourceClass of a client."""

    detector: LocalDetector = LocalDetector()
    local_addresses: tuple[str, ...] = ()
    """Addresses of this node; loopback addresses always count as such."""

    def classify(self, client: str, interface: str = "") -> SourceClass:
        """Return the class of a client address; an address of a pod and of this node is a pod."""
        if self.detector.detects(client, interface):
            return SourceClass.POD
        return SourceClass.NODE if self.is_local(client) else SourceClass.EXTERNAL

    def is_local(self, address: str) -> bool:
        """Whether an address belongs to this node; every loopback address does."""
        return address in self.local_addresses or is_loopback(address)


class FamilySettings(Value, frozen=True):
    """The properties of this node that modes need, in one family."""

    detector: LocalDetector = LocalDetector()
    """Falsy if pods cannot be recognised: then no client is of the pod class."""
    node_ip: str = ""
    """Used only to decide whether a source range includes this node (behaviour 1.5)."""
    local_addresses: tuple[str, ...] = ()
    """Addresses on this node's interfaces, loopback included, sorted."""
    node_port_addresses: tuple[str, ...] | None = None
    """Addresses that serve node ports; None means every local one (behaviour 6). It has no
    loopback addresses: those depend on `localhost_node_ports`."""
    localhost_node_ports: bool = False
    """Whether node ports answer on loopback addresses."""
    service_cidrs: tuple[str, ...] = ()
    """ServiceCIDRs of this family, sorted."""

    @property
    def sources(self) -> SourceClassifier:
        """The classifier of client addresses."""
        return SourceClassifier(self.detector, self.local_addresses)


class Traits(
    Value,
    frozen=True,
    rename={"assigns_vips": "holds_addresses", "terminates_connections": "hides_clients"},
):
    """The few points at which the semantics of a mode legitimately differ (behaviour 6).

    `rename` keeps the keys of `/state` as they were in earlier versions.
    """

    refuses_node_ports_everywhere: bool = False
    """Node-port reject and drop apply on every local address, not only on the serving ones."""
    spares_own_external_traffic: bool = False
    """This node's own traffic to an external or load balancer IP without endpoints is not
    rejected: the mode filters forwarded and incoming packets only (behaviour 8.1)."""
    filters_without_endpoints: bool = False
    """Source ranges are enforced even if a Service has no endpoints."""
    rejects_unknown_ports: bool = False
    """A known clusterIP rejects connections to a port that no Service has."""
    drops_unassigned_addresses: bool = False
    """Packets to an unassigned address in the ServiceCIDRs are dropped."""
    localhost_node_ports: bool = False
    """The mode can serve node ports on IPv4 loopback."""
    assigns_vips: bool = False
    """The mode assigns the addresses of Services to an interface of this node, so an address that
    the node already has is not served."""
    terminates_connections: bool = False
    """Connections end in the proxy: endpoints always see an address of this node."""
    forwards_sctp: bool = True
    """The mode can serve SCTP."""
    tracks_connections: bool = True
    """The kernel's conntrack tracks the traffic; otherwise its sysctls are left alone."""
    one_health_check_port: bool = False
    """The health check node port of a Service is one object of the mode: only the plan of the
    first port has it."""
    spares_hairpins_elsewhere: bool = False
    """A remote endpoint that is sent back to itself is not masqueraded here and gets no answer
    (behaviour 9). Its packets come here untranslated only if its node's proxy ignored them."""
    reads_addresses: bool = False
    """Rules depend on this node's addresses (except loopback): a change renders everything."""
    relays_localhost: bool = False
    """Sockets of this process serve node ports on loopback, in both families: no packet to
    127.0.0.0/8 has to be routed, and `primary` does not exclude loopback."""


class NodeSettings(
    Value,
    frozen=True,
    rename={"split_dispatch": "many_services", "large_cluster": "many_endpoints"},
):
    """The node-wide part of a NodePlan; a change of it dirties every ServicePlan."""

    node_name: str = ""
    families: tuple[Family, ...] = (Family.IPV4,)
    ipv4: FamilySettings = FamilySettings()
    ipv6: FamilySettings = FamilySettings()
    masquerade_all: bool = False
    masquerade_bit: int = 14
    falls_back: bool = False
    """Policy Local without a local endpoint uses the remote ones instead of dropping."""
    traits: Traits = Traits()
    split_dispatch: bool = False
    """More ServicePorts than the configured threshold: iptables splits its list of Services into
    buckets."""
    large_cluster: bool = False
    """More endpoints than the large-cluster threshold (behaviour 8.3): no comments on rules."""

    def family(self, family: Family) -> FamilySettings:
        """Return the settings of one family."""
        return self.ipv4 if family is _IPV4 else self.ipv6

    @property
    def masquerade_mark(self) -> int:
        """The packet mark that requests masquerading."""
        return 1 << self.masquerade_bit


class NodePlan(msgspec.Struct, frozen=True):
    """The whole plan of this node."""

    settings: NodeSettings
    services: Mapping[PlanKey, ServicePlan]
    findings: tuple[Finding, ...] = ()
    """The listed Findings, of limited number."""
    unlisted: Mapping[Severity, int] = {}
    """The number of other Findings, by severity."""
