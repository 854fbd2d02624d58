"""Objects of the simulated cluster: Services that nobody changes, and those of tenants."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.sim.node import NAME
from tests.support.apiserver.world import Object

NODES = (NAME, "node-b", "node-c")
STEADY = ("10.244.1.230", "10.244.2.230", "10.244.3.230")
"""Endpoints of a Service that fail only one at a time."""
_READY = {"ready": True, "serving": True, "terminating": False}


def endpoint(address: str, node: str, conditions: Object | None = None) -> Object:
    return {"addresses": [address], "nodeName": node, "conditions": conditions or _READY}


def slice_of(namespace: str, owner: str, name: str, family: str, endpoints: list[Object]) -> Object:
    labels = {"kubernetes.io/service-name": owner}
    return {
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "addressType": family,
        "ports": [
            {"name": "web", "port": 8080, "protocol": "TCP"},
            {"name": "dns", "port": 5353, "protocol": "UDP"},
        ],
        "endpoints": endpoints,
    }


def service_of(namespace: str, name: str, ip: int, third: int = 0, **spec: Any) -> Object:
    address = f"10.96.{third // 250}.{ip or 1 + third % 250}" if third else f"10.96.0.{ip}"
    return {
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, **spec.pop("metadata", {})},
        "spec": {
            "type": "ClusterIP",
            "clusterIP": address,
            "clusterIPs": [address, f"fd00:10:96::{third:x}:{ip:x}"],
            "ipFamilies": ["IPv4", "IPv6"],
            "ports": [
                {"name": "web", "port": 80, "protocol": "TCP"},
                {"name": "dns", "port": 53, "protocol": "UDP"},
            ],
            **spec,
        },
    }


def canaries() -> list[tuple[Object, list[Object]]]:
    """Services that nothing changes."""
    ports: list[dict[str, Any]] = [
        {"name": "web", "port": 80, "protocol": "TCP", "nodePort": 30080},
        {"name": "dns", "port": 53, "protocol": "UDP", "nodePort": 30053},
    ]
    balanced: dict[str, Any] = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "ports": ports,
    }
    services = [
        service_of("canary", "plain", 201),
        service_of("canary", "sticky", 202, sessionAffinity="ClientIP"),
        service_of("canary", "outside", 203, externalIPs=["198.51.100.7"]),
        service_of("canary", "balanced", 204, **balanced, healthCheckNodePort=30999),
        service_of("canary", "idle", 205),
        service_of("canary", "names", 206, ports=[{"name": "dns", "port": 53, "protocol": "UDP"}]),
    ]
    services[3]["status"] = {"loadBalancer": {"ingress": [{"ip": "198.51.100.8"}]}}
    found = []
    for number, service in enumerate(services):
        name = service["metadata"]["name"]
        ends = (
            []
            if name == "idle"
            else [endpoint(f"10.244.{1 + i}.{240 + number}", NODES[i]) for i in range(3)]
        )
        found.append((service, [slice_of("canary", name, f"{name}-x", "IPv4", ends)]))
    ends = [endpoint(f"10.244.4.{240 + number}", "node-d") for number in range(2)]
    slices = [
        slice_of("canary", "names", "names-x", "IPv4", [*ends, endpoint("10.244.2.249", "node-b")])
    ]
    return [*found[:-1], (services[-1], slices)]


def steady() -> tuple[Object, Object]:
    """A Service with one endpoint on each node."""
    ends = [endpoint(ip, node) for ip, node in zip(STEADY, NODES, strict=True)]
    service = service_of("steady", "steady", 221)
    return service, slice_of("steady", "steady", "steady-x", "IPv4", ends)


def stranger(dice: Random, number: int) -> Object:
    """A tenant's Service, who may want what others have."""
    ports: list[dict[str, Any]] = [
        {"name": "web", "port": dice.choice((80, 80, 8080)), "protocol": "TCP"},
        {"name": "dns", "port": 53, "protocol": "UDP"},
    ]
    spec: dict[str, Any] = {"ports": ports}
    kind = dice.choice(("ClusterIP", "ClusterIP", "NodePort", "LoadBalancer", "headless"))
    if kind in ("NodePort", "LoadBalancer"):
        spec["type"] = kind
        ports[0]["nodePort"] = dice.choice((30080, 31000 + number))
        ports[1]["nodePort"] = dice.choice((30053, 32000 + number))
        spec["externalTrafficPolicy"] = dice.choice(("Cluster", "Local"))
    if dice.random() < 0.3:
        addresses = ("198.51.100.7", "198.51.100.8", f"198.51.100.{20 + number}", "10.96.0.201")
        spec["externalIPs"] = [dice.choice(addresses)]
    if dice.random() < 0.2:
        spec["sessionAffinity"] = "ClientIP"
    service = service_of("tenant", f"s{number}", 10 + number, **spec)
    if kind == "headless":
        service["spec"] |= {"clusterIP": "None", "clusterIPs": ["None"]}
    if kind == "LoadBalancer":
        ip = dice.choice(("198.51.100.8", f"198.51.100.{60 + number}"))
        service["status"] = {"loadBalancer": {"ingress": [{"ip": ip}]}}
    if dice.random() < 0.1:
        service["metadata"]["annotations"] = {"steersman/close-connections": "true"}
    return service
