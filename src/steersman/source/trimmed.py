"""Services and Nodes without the fields that no plan depends on; equal parts are shared.

Objects are stripped with `structs.replace`, so that a new field of a struct is kept by default.
"""

from __future__ import annotations

from sys import intern
from typing import TypeVar

from msgspec.structs import replace

from steersman.model.kube import (
    Node,
    NodeSpec,
    NodeStatus,
    ObjectMeta,
    Selector,
    Service,
    ServicePort,
    ServiceSpec,
)

T = TypeVar("T")

_MAX_SHARED = 4096  # different values of each sort; later ones are not shared

_ports: dict[tuple[ServicePort, ...], list[ServicePort]] = {}
_families: dict[tuple[str, ...], list[str]] = {}
_SELECTOR = Selector()


def trimmed_service(service: Service) -> Service:
    """Return the Service as it is kept: the same to `sync_fields`, but smaller."""
    meta, spec, status = service.metadata, service.spec, service.status
    cluster_ips = spec.cluster_ips
    if cluster_ips and cluster_ips[0] == spec.cluster_ip:
        cluster_ips = [spec.cluster_ip, *cluster_ips[1:]]  # the first one is the same string
    if status is not None and (lb := status.load_balancer) is not None and not lb.ingress:
        status = None
    return replace(
        service,
        metadata=replace(
            meta,
            namespace=intern(meta.namespace),
            uid="",
            resource_version="",
            creation_timestamp=_interned(meta.creation_timestamp),
            deletion_timestamp=None,
        ),
        spec=replace(
            spec,
            type=_interned(spec.type),
            cluster_ips=cluster_ips,
            ip_families=_shared(_families, spec.ip_families),
            ports=_shared(_ports, spec.ports),
            session_affinity=_interned(spec.session_affinity),
            internal_traffic_policy=_interned(spec.internal_traffic_policy),
            external_traffic_policy=_interned(spec.external_traffic_policy),
            selector=_SELECTOR if spec.selector is not None else None,
        ),
        status=status,
    )


def trimmed_unserved(service: Service) -> Service:
    """Return a Service that we do not serve as it is kept: enough to tell why not."""
    meta, spec = service.metadata, service.spec
    return Service(
        ObjectMeta(meta.name, intern(meta.namespace), labels=meta.labels),
        ServiceSpec(
            type=_interned(spec.type),
            cluster_ip=_interned(spec.cluster_ip),
            ports=_shared(_ports, spec.ports),
            external_name=spec.external_name,
            selector=_SELECTOR if spec.selector is not None else None,
        ),
    )


def trimmed_node(node: Node) -> Node:
    """Return a Node as it is kept: name, zone, pod CIDRs and addresses."""
    meta, spec = node.metadata, node.spec
    return Node(
        ObjectMeta(meta.name, labels=meta.labels),
        NodeSpec(pod_cidr=spec.pod_cidr, pod_cidrs=spec.pod_cidrs),
        NodeStatus(node.status.addresses) if node.status else None,
    )


def _interned(text: str | None) -> str | None:
    return text if text is None else intern(text)


def _shared(known: dict[tuple[T, ...], list[T]], values: list[T] | None) -> list[T] | None:
    """Return an equal list that was seen before, if there is one."""
    if values is None:
        return None
    key = tuple(values)
    if len(known) >= _MAX_SHARED:
        return known.get(key, values)
    return known.setdefault(key, values)
