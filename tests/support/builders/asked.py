"""Worlds to ask questions about, of Kubernetes objects as JSON values."""

from __future__ import annotations

from typing import Any, Literal

from steersman.compile.node import facts_of_node
from steersman.compile.planner import compile_all
from steersman.model.findings import Finding
from steersman.model.inputs import DetectLocalMode, NodeConfig
from steersman.model.plan import Traits
from steersman.model.world import Origin, World
from steersman.source.objects import decode_value
from steersman.source.store import Store
from tests.support.builders import kube
from tests.support.builders.objects import NFTABLES

NODE_A, NODE_B = "192.0.2.1", "192.0.2.2"
POD_A, POD_B, POD_C = "10.244.1.11", "10.244.1.12", "10.244.2.13"


def pod_endpoint(address: str, name: str, node: str, **more: Any) -> kube.Object:
    """An endpoint with the pod behind it; keyword arguments are conditions."""
    value: kube.Object = {"addresses": [address], "nodeName": node}
    if name:
        value["targetRef"] = {"kind": "Pod", "namespace": "shop", "name": name}
    return value | ({"conditions": more} if more else {})


PODS = (
    pod_endpoint(POD_A, "web-1", "node-a"),
    pod_endpoint(POD_B, "web-2", "node-a"),
    pod_endpoint(POD_C, "web-3", "node-b"),
)
HTTP = {"name": "http", "port": 80, "protocol": "TCP", "nodePort": 30080}
HTTP_TARGET = {"name": "http", "port": 8080, "protocol": "TCP"}
WEB = kube.service("web", "10.96.0.10", type="NodePort", ports=[HTTP], selector={"app": "web"})
WEB_SLICE = kube.endpoint_slice("web-1", "web", *PODS, ports=[HTTP_TARGET])
NODES = (
    kube.node("node-a", NODE_A, "2001:db8::1", podCIDR="10.244.1.0/24"),
    kube.node("node-b", NODE_B, podCIDR="10.244.2.0/24"),
)
DEMO = (WEB, WEB_SLICE, *NODES)
"""A Service with a node port, three pods of it, on two nodes."""


def asked(
    *values: kube.Object,
    node: str = "node-a",
    kind: Literal["process", "manifests", "apiserver"] = "manifests",
    traits: Traits = NFTABLES,
    findings: tuple[Finding, ...] = (),
    detect: DetectLocalMode = DetectLocalMode.CLUSTER_CIDR,
    **config: Any,
) -> World:
    """The World of these objects, as a node sees it."""
    store = Store(node)
    for value in values:
        decoded = decode_value(value["kind"], value)
        assert not isinstance(decoded, Finding), decoded
        store.upsert(decoded)
    snapshot = store.detailed_snapshot
    fields = {"cluster_cidrs": ("10.244.0.0/16", "fd00:10:244::/48"), **config}
    settings = NodeConfig(node_name=node, detect_local_mode=detect, **fields)
    facts = facts_of_node(node, snapshot.node)
    plan = compile_all(snapshot, settings, facts, traits)
    return World(
        Origin(kind, "test"),
        snapshot,
        plan,
        "memory",
        config=settings,
        facts=facts,
        findings=(*plan.findings, *findings),
        nodes=store.nodes,
        unserved=store.unserved,
    )
