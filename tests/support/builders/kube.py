"""Kubernetes objects as JSON values, as the API server sends them; one builder for each kind."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


def service(
    name: str = "web",
    cluster_ip: str = "10.96.0.1",
    *,
    namespace: str = "shop",
    ports: list[Object] | None = None,
    ingress: list[Object] | None = None,
    metadata: Object | None = None,
    **spec: Any,
) -> Object:
    """Return a Service with port 80; further keyword arguments are fields of its spec."""
    value: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": namespace, "name": name, **(metadata or {})},
        "spec": {
            "clusterIP": cluster_ip,
            "ports": [{"port": 80, "protocol": "TCP"}] if ports is None else ports,
            **spec,
        },
    }
    if ingress is not None:
        value["status"] = {"loadBalancer": {"ingress": ingress}}
    return value


def endpoint_slice(
    name: str,
    owner: str | None,
    *endpoints: str | Object,
    namespace: str = "shop",
    family: str = "IPv4",
    ports: list[Object] | None = None,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
) -> Object:
    """Return an EndpointSlice with port 8080; an endpoint is an address or a whole value."""
    named = {"kubernetes.io/service-name": owner} if owner else {}
    metadata: Object = {"namespace": namespace, "name": name, "labels": {**named, **(labels or {})}}
    if annotations:
        metadata["annotations"] = annotations
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": metadata,
        "addressType": family,
        "endpoints": [{"addresses": [e]} if isinstance(e, str) else e for e in endpoints],
        "ports": [{"name": "", "port": 8080, "protocol": "TCP"}] if ports is None else ports,
    }


def node(name: str, *addresses: str, zone: str | None = None, **spec: Any) -> Object:
    """Return a Node with these InternalIPs; keyword arguments are fields of its spec."""
    metadata: Object = {"name": name}
    if zone:
        metadata["labels"] = {"topology.kubernetes.io/zone": zone}
    value: Object = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
    if spec:
        value["spec"] = spec
    if addresses:
        status = [{"type": "InternalIP", "address": address} for address in addresses]
        value["status"] = {"addresses": status}
    return value
