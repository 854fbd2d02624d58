"""What the operator asked for, as far as traffic depends on it: the other input of compile."""

from __future__ import annotations

import enum

import msgspec

from steersman.model.names import Family


class DetectLocalMode(enum.StrEnum):
    """How local pods' traffic is told from other traffic (`detectLocalMode`)."""

    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE_INTERFACE = "BridgeInterface"
    INTERFACE_NAME_PREFIX = "InterfaceNamePrefix"


class NodeConfig(msgspec.Struct, frozen=True):
    """Settings of the proxy that shape the plan. Defaults are upstream's (behaviour 1.2)."""

    node_name: str = ""
    families: tuple[Family, ...] = (Family.IPV4, Family.IPV6)
    """The families to serve, the primary one first."""
    bind_address: str = "0.0.0.0"
    """An address other than the unspecified one is this node's IP in its family (behaviour 1.5)."""
    detect_local_mode: DetectLocalMode = DetectLocalMode.CLUSTER_CIDR
    cluster_cidrs: tuple[str, ...] = ()
    bridge_interface: str = ""
    interface_name_prefix: str = ""
    node_port_addresses: tuple[str, ...] = ()
    """CIDRs whose addresses serve node ports, or the one word `primary`; () means all."""
    localhost_node_ports: bool = True
    masquerade_all: bool = False
    local_falls_back: bool = False
    """Policy Local without an endpoint here goes to those elsewhere, as upstream's ipvs mode."""
    masquerade_bit: int = 14
    allow_service_external_ips: bool = True
    """Feature gate AllowServiceExternalIPs (behaviour 3)."""
    split_threshold: int = 500
    """ServicePorts above which modes with linear lists split them; 0 turns splitting off."""
    large_cluster_endpoints: int = 1000
    """Endpoints above which a cluster is large (behaviour 8.3)."""
