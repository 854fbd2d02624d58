"""Objects made small before they are kept: equal parts shared, what nobody reads later left out.

A node holds every Service and EndpointSlice of the cluster, so this is a good part of its memory.
"""

from __future__ import annotations

from sys import intern
from typing import TypeVar

from steersman.model.kube import (
    Annotations,
    EndpointConditions,
    EndpointSlice,
    ObjectMeta,
    Service,
    ServicePort,
    ServiceSpec,
    SliceEndpoint,
    SlicePort,
)

T = TypeVar("T")

_conditions: dict[EndpointConditions, EndpointConditions] = {}
_slice_ports: dict[tuple[SlicePort, ...], list[SlicePort]] = {}
_service_ports: dict[tuple[ServicePort, ...], list[ServicePort]] = {}
_words: dict[tuple[str, ...], list[str]] = {}
_MOST_SHARED = 4096
"""Different values remembered of each sort; what comes later is kept unshared."""


def lean_service(service: Service) -> Service:
    """Return an equal Service but for its uid and resourceVersion."""
    meta, spec = service.metadata, service.spec
    lean = ServiceSpec(
        type=_word(spec.type),
        cluster_ip=spec.cluster_ip,
        cluster_ips=spec.cluster_ips,
        ip_families=_shared(_words, spec.ip_families),
        ports=_shared(_service_ports, spec.ports),
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


def lean_slice(slice_: EndpointSlice) -> EndpointSlice:
    """Return an equal EndpointSlice but for uid, resourceVersion and most annotations."""
    endpoints = slice_.endpoints
    if endpoints is not None:
        endpoints = [_lean_endpoint(endpoint) for endpoint in endpoints]
    meta = slice_.metadata
    return EndpointSlice(
        ObjectMeta(
            name=meta.name,
            namespace=intern(meta.namespace),
            labels=meta.labels,
            annotations=_lean_annotations(meta.annotations),
        ),
        intern(slice_.address_type),
        endpoints,
        _shared(_slice_ports, slice_.ports),
    )


def _lean_annotations(annotations: Annotations | None) -> Annotations | None:
    if annotations is None or annotations.weight is None:
        return None
    return Annotations(weight=intern(annotations.weight))


def _lean_meta(meta: ObjectMeta) -> ObjectMeta:
    return ObjectMeta(
        name=meta.name,
        namespace=intern(meta.namespace),
        labels=meta.labels,
        annotations=meta.annotations,
        creation_timestamp=_word(meta.creation_timestamp),
    )


def _lean_endpoint(endpoint: SliceEndpoint) -> SliceEndpoint:
    conditions = endpoint.conditions
    if conditions is not None:
        conditions = _conditions.setdefault(conditions, conditions)
    return SliceEndpoint(
        endpoint.addresses,
        conditions,
        _word(endpoint.node_name),
        _word(endpoint.zone),
        endpoint.hints,
    )


def _word(text: str | None) -> str | None:
    return text if text is None else intern(text)


def _shared(known: dict[tuple[T, ...], list[T]], values: list[T] | None) -> list[T] | None:
    if values is None:
        return None
    key = tuple(values)
    if len(known) >= _MOST_SHARED:
        return known.get(key, values)
    return known.setdefault(key, values)
