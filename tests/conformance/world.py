"""From a conformance case to what steersman takes: objects, configuration, machine.

The schema of cases is described beside the data; a case may come from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from steersman.model.addresses import canonical_ip, family_of
from steersman.model.inputs import DetectLocalMode, HostFacts, NodeConfig, Snapshot
from steersman.model.kube import EndpointSlice, KubeObject, Node, Service, ServiceCIDR
from steersman.model.names import Family
from steersman.model.plan import Traits
from steersman.source.store import Store
from tests.support.builders.store import replace_objects

Case = dict[str, Any]
T = TypeVar("T", bound=KubeObject)

DATA = Path(__file__).parents[2] / "../shared/conformance"
TRAITS: Mapping[str, Traits] = {
    "iptables": Traits(
        refuses_node_ports_everywhere=True,
        spares_own_external_traffic=True,
        localhost_node_ports=True,
    ),
    "nftables": Traits(
        filters_without_endpoints=True,
        rejects_unknown_ports=True,
        drops_unassigned_addresses=True,
    ),
}
"""How each mode differs (behaviour 6)."""


def load(suite: str) -> list[Case]:
    """Return the cases of a suite's file, [] where the data is absent."""
    path = DATA / f"{suite}.json"
    if not path.exists():
        return []
    cases: list[Case] = msgspec.json.decode(path.read_bytes())["cases"]
    return cases


def read(kind: type[T], value: object) -> T:
    """Turn a case's JSON object into one of ours."""
    return msgspec.convert(value, kind)


def world(case: Case) -> tuple[Snapshot, NodeConfig, HostFacts]:
    """Return the cluster, the configuration and the machine of a packet flow case."""
    node = case["node"]
    store = Store(node["nodeName"])
    replace_objects(store, "Service", (read(Service, s) for s in case["services"]))
    replace_objects(
        store, "EndpointSlice", (read(EndpointSlice, s) for s in case["endpointslices"])
    )
    replace_objects(store, "Node", (read(Node, n) for n in case.get("nodes") or ()))
    replace_objects(store, "ServiceCIDR", _service_cidrs(node))
    return store.snapshot, config(node), facts(node)


def config(node: Mapping[str, Any]) -> NodeConfig:
    """Return the configuration of a case's `node`."""
    detector = node.get("localDetector") or {}
    mode, interface = detector.get("mode"), detector.get("interface", "")
    return NodeConfig(
        node_name=node["nodeName"],
        families=(Family.IPV6 if node["ipFamily"] == "IPv6" else Family.IPV4,),
        bind_address=_bind_address(node),
        detect_local_mode=DetectLocalMode.BRIDGE_INTERFACE
        if mode == "Interface"
        else DetectLocalMode.CLUSTER_CIDR,
        cluster_cidrs=(detector["cidr"],) if mode == "ClusterCIDR" else (),
        bridge_interface=interface if mode == "Interface" else "",
        node_port_addresses=tuple(node.get("nodePortAddresses") or ()),
        localhost_node_ports=bool(node.get("localhostNodePorts", False)),
        masquerade_all=bool(node.get("masqueradeAll", False)),
        masquerade_bit=int(node.get("masqueradeMark") or "0x4000", 16).bit_length() - 1,
    )


def facts(node: Mapping[str, Any]) -> HostFacts:
    """Return the machine of a case's `node`."""
    interfaces = {name: tuple(addresses) for name, addresses in node["interfaces"].items()}
    return HostFacts(hostname=node["nodeName"], interfaces=interfaces)


def _bind_address(node: Mapping[str, Any]) -> str:
    """Use the bind address to say what the node IP is, where the case does, in its family."""
    ip = canonical_ip(node.get("nodeIP") or "")
    wanted = Family.IPV6 if node["ipFamily"] == "IPv6" else Family.IPV4
    return ip if ip is not None and family_of(ip) is wanted else "0.0.0.0"


def _service_cidrs(node: Mapping[str, Any]) -> Iterable[ServiceCIDR]:
    text = node.get("serviceCIDRs") or ""
    cidrs = text.split(",") if isinstance(text, str) else list(text)
    spec = {"cidrs": [cidr for cidr in cidrs if cidr]}
    return [read(ServiceCIDR, {"metadata": {"name": "kubernetes"}, "spec": spec})]
