"""What is known of the cluster and of this machine: the input of compile."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from steersman.model.kube import EndpointSlice, Node, Service
from steersman.model.names import ObjectName


class Snapshot(msgspec.Struct, frozen=True):
    """The objects of the cluster, as last seen. A read-only view: it moves with the Store."""

    services: Mapping[ObjectName, Service] = {}
    slices: Mapping[ObjectName, Mapping[str, EndpointSlice]] = {}
    """EndpointSlices by the Service they belong to, then by their own name."""
    node: Node | None = None
    """This node's own object, where there is one."""
    service_cidrs: tuple[str, ...] = ()
    """Canonical CIDRs of all ServiceCIDR objects, sorted."""


class HostFacts(msgspec.Struct, frozen=True):
    """What this machine is like, as far as traffic depends on it."""

    hostname: str = ""
    interfaces: Mapping[str, tuple[str, ...]] = {}
    """Canonical `address/length` by interface name, loopback included."""
    ipv6: bool = True
    """The kernel has IPv6 and it is not disabled (behaviour 1.5)."""
