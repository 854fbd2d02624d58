"""Kubernetes objects, as structs of the fields that affect traffic (behaviour 2-4).

All other fields of the JSON are skipped by the decoder. A field is optional if Go's decoder
accepts `null` or absence. Absence means the same as upstream, so there are no defaults as the API
server sets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from steersman.model.names import ObjectName

Int32: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
"""The range of int32: other numbers make an object malformed, as for Go's decoder."""


class Lean(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """Base of all objects here: immutable, compared by value, not tracked by the collector."""


# Metadata


class Labels(Lean, frozen=True, rename=None):
    """The labels that are read, of all kinds of objects."""

    service_name: str | None = msgspec.field(name="kubernetes.io/service-name", default=None)
    """On an EndpointSlice: its Service."""
    headless: str | None = msgspec.field(name="service.kubernetes.io/headless", default=None)
    """On an EndpointSlice: if present, the slice is not served."""
    proxy_name: str | None = msgspec.field(
        name="service.kubernetes.io/service-proxy-name", default=None
    )
    """On a Service: if present, another proxy serves it."""
    zone: str | None = msgspec.field(name="topology.kubernetes.io/zone", default=None)
    """On a Node: its zone."""


class Annotations(Lean, frozen=True, rename=None):
    """The annotations that are read."""

    trigger_time: str | None = msgspec.field(
        name="endpoints.kubernetes.io/last-change-trigger-time", default=None
    )
    """On an EndpointSlice: time of the change that triggered it (RFC 3339)."""
    close_connections: str | None = msgspec.field(name="steersman/close-connections", default=None)
    """On a Service: "true" closes TCP and SCTP connections to removed endpoints."""
    load_balancing: str | None = msgspec.field(name="steersman/load-balancing", default=None)
    """On a Service: "least-connections" prefers idle endpoints, in modes that count connections."""
    ipvs_scheduler: str | None = msgspec.field(name="steersman/ipvs-scheduler", default=None)
    """On a Service: the scheduler of the ipvs mode, by its name in the kernel."""
    ipvs_scheduler_flags: str | None = msgspec.field(
        name="steersman/ipvs-scheduler-flags", default=None
    )
    """On a Service: flags of the scheduler, in ipvsadm's words with commas between."""
    weight: str | None = msgspec.field(name="steersman/weight", default=None)
    """On an EndpointSlice: the weights of its endpoints, in the ipvs mode."""
    proxy_protocol: str | None = msgspec.field(name="steersman/proxy-protocol", default=None)
    """On a Service: "v2" sends TCP endpoints the client's address, in the userspace modes."""
    metrics: str | None = msgspec.field(name="steersman/metrics", default=None)
    """On a Service: "true" shows its connections on `/metrics`, by frontend and endpoint."""
    eject: str | None = msgspec.field(name="steersman/eject", default=None)
    """On a Service: "true" ejects its endpoints that do not answer, "false" never does."""
    probe: str | None = msgspec.field(name="steersman/probe", default=None)
    """On a Service: its endpoints are checked, "tcp" by a connection, "http:/path" by a request."""
    probe_interval: str | None = msgspec.field(name="steersman/probe-interval", default=None)
    """On a Service: time between two checks of an endpoint, such as "10s"."""
    probe_failures: str | None = msgspec.field(name="steersman/probe-failures", default=None)
    """On a Service: checks in a row that fail before an ejection."""
    probe_successes: str | None = msgspec.field(name="steersman/probe-successes", default=None)
    """On a Service: checks in a row that succeed before the return."""


class ObjectMeta(Lean, frozen=True):
    """`metadata` of every object."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: Labels | None = None
    annotations: Annotations | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None

    @property
    def object_name(self) -> ObjectName:
        """Namespace and name."""
        return ObjectName(self.namespace, self.name)


# Service


class ServicePort(Lean, frozen=True):
    """An entry of `spec.ports` of a Service."""

    port: Int32 = 0
    name: str | None = None
    protocol: str | None = None
    """Absent means TCP."""
    node_port: Int32 | None = None


class ClientIPConfig(Lean, frozen=True):
    """`sessionAffinityConfig.clientIP`."""

    timeout_seconds: Int32 | None = None


class SessionAffinityConfig(Lean, frozen=True):
    """`sessionAffinityConfig`."""

    client_ip: ClientIPConfig | None = msgspec.field(name="clientIP", default=None)


class Selector(Lean, frozen=True):
    """`spec.selector` of a Service, of which only the presence is read: all of them are equal."""


class ServiceSpec(Lean, frozen=True):
    """`spec` of a Service."""

    type: str | None = None
    cluster_ip: str | None = msgspec.field(name="clusterIP", default=None)
    cluster_ips: list[str] | None = msgspec.field(name="clusterIPs", default=None)
    ip_families: list[str] | None = None
    ports: list[ServicePort] | None = None
    external_ips: list[str] | None = msgspec.field(name="externalIPs", default=None)
    session_affinity: str | None = None
    session_affinity_config: SessionAffinityConfig | None = None
    internal_traffic_policy: str | None = None
    external_traffic_policy: str | None = None
    health_check_node_port: Int32 | None = None
    load_balancer_source_ranges: list[str] | None = None
    external_name: str | None = None
    """The host name of an ExternalName Service."""
    selector: Selector | None = None
    """None if nobody but the user maintains its EndpointSlices."""


class LoadBalancerIngress(Lean, frozen=True):
    """An entry of `status.loadBalancer.ingress`."""

    ip: str | None = None
    ip_mode: str | None = None
    hostname: str | None = None


class LoadBalancerStatus(Lean, frozen=True):
    """`status.loadBalancer`."""

    ingress: list[LoadBalancerIngress] | None = None


class ServiceStatus(Lean, frozen=True):
    """`status` of a Service."""

    load_balancer: LoadBalancerStatus | None = None


class Service(Lean, frozen=True):
    """A Service."""

    metadata: ObjectMeta
    spec: ServiceSpec = ServiceSpec()
    status: ServiceStatus | None = None

    @property
    def is_served(self) -> bool:
        """Whether this proxy serves it (behaviour 2, 3).

        It does not serve one without a clusterIP (headless, ExternalName) or of another proxy.
        """
        spec, labels = self.spec, self.metadata.labels
        return (
            bool(spec.cluster_ip)
            and spec.cluster_ip != "None"
            and spec.type != "ExternalName"
            and (labels is None or labels.proxy_name is None)
        )

    @property
    def ingress(self) -> Sequence[LoadBalancerIngress]:
        """The entries of its load balancer."""
        balancer = self.status.load_balancer if self.status else None
        return (balancer.ingress if balancer else None) or ()


# EndpointSlice


class EndpointConditions(Lean, frozen=True):
    """`conditions` of an endpoint; null and absent mean the same (behaviour 4)."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class ForZone(Lean, frozen=True):
    """An entry of `hints.forZones` or `hints.forNodes`."""

    name: str = ""


class EndpointHints(Lean, frozen=True):
    """`hints` of an endpoint."""

    for_zones: list[ForZone] | None = None
    for_nodes: list[ForZone] | None = None


class ObjectReference(Lean, frozen=True):
    """`targetRef` of an endpoint: the object behind the address, a Pod as a rule."""

    kind: str = ""
    namespace: str = ""
    name: str = ""


class SliceEndpoint(Lean, frozen=True):
    """An entry of `endpoints` of an EndpointSlice."""

    addresses: list[str] | None = None
    conditions: EndpointConditions | None = None
    node_name: str | None = None
    zone: str | None = None
    hints: EndpointHints | None = None
    target_ref: ObjectReference | None = None
    """No plan reads it: it is for answers to people."""


class SlicePort(Lean, frozen=True):
    """An entry of `ports` of an EndpointSlice."""

    name: str | None = None
    protocol: str | None = None
    port: Int32 | None = None


class EndpointSlice(Lean, frozen=True):
    """An EndpointSlice."""

    metadata: ObjectMeta
    address_type: str = ""
    endpoints: list[SliceEndpoint] | None = None
    ports: list[SlicePort] | None = None


# Pod: never watched, only fetched to answer a question


class ContainerPort(Lean, frozen=True):
    """An entry of `ports` of a container."""

    name: str = ""
    container_port: int = 0


class Container(Lean, frozen=True):
    """An entry of `spec.containers` of a Pod."""

    image: str = ""
    ports: list[ContainerPort] | None = None


class PodSpec(Lean, frozen=True):
    """`spec` of a Pod."""

    node_name: str | None = None
    containers: list[Container] | None = None


class PodIP(Lean, frozen=True):
    """An entry of `status.podIPs`."""

    ip: str = ""


class PodCondition(Lean, frozen=True):
    """An entry of `status.conditions`."""

    type: str = ""
    status: str = ""


class ContainerRunning(Lean, frozen=True):
    """A container that runs."""


class ContainerStopped(Lean, frozen=True):
    """A container that waits or has ended."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""


class ContainerState(Lean, frozen=True):
    """`state` of a container: one of these."""

    running: ContainerRunning | None = None
    waiting: ContainerStopped | None = None
    terminated: ContainerStopped | None = None


class ContainerStatus(Lean, frozen=True):
    """An entry of `status.containerStatuses` of a Pod."""

    name: str = ""
    state: ContainerState = ContainerState()


class PodStatus(Lean, frozen=True):
    """`status` of a Pod."""

    phase: str | None = None
    reason: str = ""
    message: str = ""
    container_statuses: list[ContainerStatus] | None = None
    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    pod_ips: list[PodIP] | None = msgspec.field(name="podIPs", default=None)
    conditions: list[PodCondition] | None = None


class Pod(Lean, frozen=True):
    """A Pod."""

    metadata: ObjectMeta
    spec: PodSpec = PodSpec()
    status: PodStatus | None = None


# Node


class NodeAddress(Lean, frozen=True):
    """An entry of `status.addresses` of a Node."""

    type: str = ""
    address: str = ""


class NodeStatus(Lean, frozen=True):
    """`status` of a Node."""

    addresses: list[NodeAddress] | None = None


class Taint(Lean, frozen=True):
    """An entry of `spec.taints` of a Node."""

    key: str = ""


class NodeSpec(Lean, frozen=True):
    """`spec` of a Node."""

    pod_cidr: str | None = msgspec.field(name="podCIDR", default=None)
    pod_cidrs: list[str] | None = msgspec.field(name="podCIDRs", default=None)
    taints: list[Taint] | None = None


class Node(Lean, frozen=True):
    """A Node."""

    metadata: ObjectMeta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus | None = None

    @property
    def zone(self) -> str:
        """Its zone, "" if it has none."""
        labels = self.metadata.labels
        return (labels.zone if labels else None) or ""

    @property
    def pod_cidrs(self) -> Sequence[str]:
        """The CIDRs of its pods, as written."""
        return self.spec.pod_cidrs or ([self.spec.pod_cidr] if self.spec.pod_cidr else ())

    @property
    def addresses(self) -> Sequence[NodeAddress]:
        """All its addresses."""
        return (self.status.addresses if self.status else None) or ()


# ServiceCIDR


class ServiceCIDRSpec(Lean, frozen=True):
    """`spec` of a ServiceCIDR."""

    cidrs: list[str] | None = None


class ServiceCIDR(Lean, frozen=True):
    """A ServiceCIDR (networking.k8s.io)."""

    metadata: ObjectMeta
    spec: ServiceCIDRSpec = ServiceCIDRSpec()


KubeObject: TypeAlias = Service | EndpointSlice | Node | ServiceCIDR

KINDS: dict[str, type[KubeObject]] = {
    "Service": Service,
    "EndpointSlice": EndpointSlice,
    "Node": Node,
    "ServiceCIDR": ServiceCIDR,
}
"""The structs by `kind` of the object."""
