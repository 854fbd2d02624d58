"""Short ways to spell Kubernetes objects and nodes in tests of pure code."""

from __future__ import annotations

from typing import Any

import msgspec

from steersman.compile.planner import compile_all
from steersman.model.inputs import HostFacts, NodeConfig, Snapshot
from steersman.model.kube import EndpointSlice, Node, Service
from steersman.model.names import Family, ObjectName, PlanKey, Protocol, ServicePortName
from steersman.model.plan import NodePlan, NodeSettings, Traits
from tests.support.builders import kube

NODE = "node-1"
FACTS = HostFacts(
    NODE,
    {
        "lo": ("127.0.0.1/8", "::1/128"),
        "eth0": ("192.168.0.2/24", "192.168.1.2/24", "2001:db8::2/64"),
    },
)
CONFIG = NodeConfig(
    node_name=NODE,
    bind_address="192.168.0.2",
    cluster_cidrs=("10.0.0.0/8", "fd00:10::/64"),
)
IPTABLES = Traits(refuses_node_ports_everywhere=True, localhost_node_ports=True)
NFTABLES = Traits(
    filters_without_endpoints=True, rejects_unknown_ports=True, drops_unassigned_addresses=True
)
HTTP = ServicePortName("shop", "cart", "http", Protocol.TCP)
KEY = PlanKey(HTTP, Family.IPV4)


def port(name: str | None = "http", number: int = 80, **more: Any) -> dict[str, Any]:
    return {"name": name, "port": number, **more}


def service(
    name: str = "cart",
    *,
    ports: list[dict[str, Any]] | None = None,
    ingress: list[dict[str, Any]] | None = None,
    created: str | None = None,
    labels: dict[str, str] | None = None,
    **spec: Any,
) -> Service:
    """A Service in namespace shop; keyword arguments are fields of its spec."""
    value = kube.service(
        name,
        "10.96.0.10",
        ports=[port()] if ports is None else ports,
        ingress=ingress,
        metadata={"creationTimestamp": created, "labels": labels},
        **{"type": "ClusterIP", **spec},
    )
    return msgspec.convert(value, Service)


def endpoint(address: str, node: str | None = None, **more: Any) -> dict[str, Any]:
    """An endpoint; keyword arguments are conditions, `zones` and `nodes` are hints."""
    zones, nodes = more.pop("zones", None), more.pop("nodes", None)
    hints: dict[str, Any] = {}
    if zones is not None:
        hints["forZones"] = [{"name": zone} for zone in zones]
    if nodes is not None:
        hints["forNodes"] = [{"name": hint} for hint in nodes]
    return {
        "addresses": [address],
        "nodeName": node,
        "conditions": more or None,
        "hints": hints or None,
    }


def slice_(
    *endpoints: dict[str, Any],
    name: str = "cart-1",
    owner: str = "cart",
    family: str = "IPv4",
    ports: list[dict[str, Any]] | None = None,
    labels: dict[str, str] | None = None,
) -> EndpointSlice:
    """An EndpointSlice of a Service in namespace shop."""
    some = [port(number=8080)] if ports is None else ports
    value = kube.endpoint_slice(name, owner, *endpoints, family=family, ports=some, labels=labels)
    return msgspec.convert(value, EndpointSlice)


def node(zone: str | None = None, addresses: tuple[tuple[str, str], ...] = (), **spec: Any) -> Node:
    """This node's object."""
    value = {
        "metadata": {"name": NODE, "labels": {"topology.kubernetes.io/zone": zone}},
        "spec": spec,
        "status": {"addresses": [{"type": kind, "address": a} for kind, a in addresses]},
    }
    return msgspec.convert(value, Node)


def snapshot(
    *objects: Service | EndpointSlice | Node, service_cidrs: tuple[str, ...] = ()
) -> Snapshot:
    """A cluster of these objects."""
    services: dict[ObjectName, Service] = {}
    slices: dict[ObjectName, list[EndpointSlice]] = {}
    this = None
    for obj in objects:
        match obj:
            case Service():
                services[obj.metadata.object_name] = obj
            case Node():
                this = obj
            case _:
                labels = obj.metadata.labels
                owner = ObjectName("shop", (labels.service_name if labels else None) or "")
                slices.setdefault(owner, []).append(obj)
    return Snapshot(services, slices, this, service_cidrs)


def plan_of(
    *objects: Service | EndpointSlice | Node,
    config: NodeConfig = CONFIG,
    traits: Traits = IPTABLES,
    service_cidrs: tuple[str, ...] = (),
) -> NodePlan:
    """What this node should do about these objects."""
    world = snapshot(*objects, service_cidrs=service_cidrs)
    return compile_all(world, config, FACTS, traits)


def settings_of(config: NodeConfig = CONFIG, traits: Traits = IPTABLES) -> NodeSettings:
    """The node-wide part of the plan."""
    return plan_of(config=config, traits=traits).settings
