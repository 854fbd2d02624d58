"""What is kept of a Service: equal parts are shared, and what nothing depends on is left out.

A node holds every Service of the cluster, so this is a good part of its memory.
"""

from __future__ import annotations

from sys import intern
from typing import TypeVar

from steersman.model.kube import ObjectMeta, Service, ServicePort, ServiceSpec

T = TypeVar("T")

_ports: dict[tuple[ServicePort, ...], list[ServicePort]] = {}
_families: dict[tuple[str, ...], list[str]] = {}
_MOST_SHARED = 4096
"""Different values remembered of each sort; what comes later is kept unshared."""


def lean_service(service: Service) -> Service:
    """Return an equal Service but for its uid and resourceVersion."""
    meta, spec = service.metadata, service.spec
    lean = ServiceSpec(
        type=_word(spec.type),
        cluster_ip=spec.cluster_ip,
        cluster_ips=_cluster_ips(spec),
        ip_families=_shared(_families, spec.ip_families),
        ports=_shared(_ports, spec.ports),
        external_ips=spec.external_ips,
        session_affinity=_word(spec.session_affinity),
        session_affinity_config=spec.session_affinity_config,
        internal_traffic_policy=_word(spec.internal_traffic_policy),
        external_traffic_policy=_word(spec.external_traffic_policy),
        health_check_node_port=spec.health_check_node_port,
        load_balancer_source_ranges=spec.load_balancer_source_ranges,
    )
    status = service.status
    if status is not None and (lb := status.load_balancer) is not None and not lb.ingress:
        status = None
    return Service(_lean_meta(meta), lean, status)


def _lean_meta(meta: ObjectMeta) -> ObjectMeta:
    return ObjectMeta(
        name=meta.name,
        namespace=intern(meta.namespace),
        labels=meta.labels,
        annotations=meta.annotations,
        creation_timestamp=_word(meta.creation_timestamp),
    )


def _cluster_ips(spec: ServiceSpec) -> list[str] | None:
    """The first one is the same string as the clusterIP."""
    texts = spec.cluster_ips
    if not texts or texts[0] != spec.cluster_ip:
        return texts
    return [spec.cluster_ip, *texts[1:]]


def _word(text: str | None) -> str | None:
    return text if text is None else intern(text)


def _shared(known: dict[tuple[T, ...], list[T]], values: list[T] | None) -> list[T] | None:
    if values is None:
        return None
    key = tuple(values)
    if len(known) >= _MOST_SHARED:
        return known.get(key, values)
    return known.setdefault(key, values)
