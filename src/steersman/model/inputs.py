"""The inputs of the compiler: the cluster, this machine, and the operator's configuration."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

import msgspec

from steersman.model.failover import Ejection
from steersman.model.kube import EndpointSlice, Node, Service
from steersman.model.names import Family, ObjectName


class Snapshot(msgspec.Struct, frozen=True):
    """The objects of the cluster, as last seen. A read-only view: it moves with the Store."""

    services: Mapping[ObjectName, Service] = {}
    slices: Mapping[ObjectName, Iterable[EndpointSlice]] = {}
    """EndpointSlices by the name of their Service."""
    node: Node | None = None
    """The Node object of this node, if known."""
    service_cidrs: tuple[str, ...] = ()
    """Canonical CIDRs of all ServiceCIDR objects, sorted."""
    ejected: Mapping[ObjectName, tuple[Ejection, ...]] = {}
    """Endpoints that do not answer, by Service: they are planned as if they were not ready."""


class HostFacts(msgspec.Struct, frozen=True):
    """The properties of this machine that affect traffic."""

    hostname: str = ""
    interfaces: Mapping[str, tuple[str, ...]] = {}
    """Canonical `address/length` by interface name, loopback included."""
    ipv6: bool = True
    """The kernel has IPv6 and it is not disabled (behaviour 1.5)."""


class DetectLocalMode(enum.StrEnum):
    """The method that recognises traffic of local pods (`detectLocalMode`)."""

    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE_INTERFACE = "BridgeInterface"
    INTERFACE_NAME_PREFIX = "InterfaceNamePrefix"


class NodeConfig(msgspec.Struct, frozen=True):
    """The settings of the proxy that shape the plan. Defaults are upstream's (behaviour 1.2)."""

    node_name: str = ""
    families: tuple[Family, ...] = (Family.IPV4, Family.IPV6)
    """The families to serve, the primary one first."""
    bind_address: str = "0.0.0.0"
    """A specified address is this node's IP in its family (behaviour 1.5)."""
    detect_local_mode: DetectLocalMode = DetectLocalMode.CLUSTER_CIDR
    cluster_cidrs: tuple[str, ...] = ()
    bridge_interface: str = ""
    interface_name_prefix: str = ""
    node_port_addresses: tuple[str, ...] = ()
    """CIDRs of the addresses that serve node ports, or the one word `primary`; () means all."""
    localhost_node_ports: bool = True
    masquerade_all: bool = False
    local_falls_back: bool = False
    """Policy Local without a local endpoint uses the remote ones, as upstream's ipvs mode."""
    masquerade_bit: int = 14
    allow_service_external_ips: bool = True
    """Feature gate AllowServiceExternalIPs (behaviour 3)."""
    split_threshold: int = 500
    """Number of ServicePorts above which modes split linear lists; 0 turns splitting off."""
    large_cluster_endpoints: int = 1000
    """Number of endpoints above which a cluster is large (behaviour 8.3)."""
