"""Manifests as people paste them, and the World of a node that they are for."""

from __future__ import annotations

from typing import Any

import msgspec

from steersman import __version__
from steersman.compile.planner import compile_all
from steersman.host.exec import SubprocessExec
from steersman.model.inputs import HostFacts, NodeConfig, Snapshot
from steersman.model.kube import EndpointSlice, Service
from steersman.model.node_state import NodeState
from steersman.model.world import Origin, World
from steersman.modes.registry import create
from steersman.modes.specs import ModeOptions
from steersman.run.pages.world_wire import encode_world
from steersman.source.store import Store

MODE = "iptables"
SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: %s, namespace: shop}
spec:
  type: %s
  selector: {app: cart}
  ports: [{port: 80, name: http%s}]
"""
SLICE = """
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %s, namespace: shop, labels: {kubernetes.io/service-name: %s}}
addressType: IPv4
endpoints: [{addresses: [10.244.1.%s]}]
ports: [{name: http, protocol: TCP, port: 8080}]
"""


def service(name: str, address: str, **spec: Any) -> Service:
    return msgspec.convert(
        {
            "metadata": {
                "name": name,
                "namespace": "shop",
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {
                "type": "ClusterIP",
                "clusterIP": address,
                "clusterIPs": [address],
                "ipFamilies": ["IPv4"],
                "ports": [{"name": "http", "port": 80, "protocol": "TCP"}],
                **spec,
            },
        },
        Service,
    )


def slice_of(name: str) -> EndpointSlice:
    return msgspec.convert(
        {
            "metadata": {
                "name": f"{name}-1",
                "namespace": "shop",
                "labels": {"kubernetes.io/service-name": name},
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["10.244.1.7"]}],
            "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
        },
        EndpointSlice,
    )


def world(*services: Service, mode: str = MODE, cidrs: tuple[str, ...] = ()) -> World:
    by_name = {each.metadata.object_name: each for each in services}
    slices = {name: (slice_of(name.name),) for name in by_name}
    snapshot = Snapshot(by_name, slices, service_cidrs=cidrs)
    config = NodeConfig(node_name="worker-1", cluster_cidrs=("10.244.0.0/16",))
    facts = HostFacts("worker-1", {"eth0": ("192.0.2.1/24",), "lo": ("127.0.0.1/8",)})
    traits = create(mode, SubprocessExec(), ModeOptions()).traits
    plan = compile_all(snapshot, config, facts, traits)
    return World(
        Origin("process", "node worker-1"), snapshot, plan, mode, config=config, facts=facts
    )


CART = service("cart", "10.96.0.10")
USER = service("user", "10.96.0.11")


def encoded(of: World, version: str = __version__) -> bytes:
    """The World as a node answers to `/world`."""
    store = Store("worker-1")
    for service in of.snapshot.services.values():
        store.upsert(service)
    for group in of.snapshot.slices.values():
        for slice_ in group:
            store.upsert(slice_)
    process = NodeState(mode=of.mode, variant=of.variant, version=version)
    return b"".join(
        encode_world(msgspec.structs.replace(of, process=process), store.packed_slices())
    )
