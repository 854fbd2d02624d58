"""Trimmed objects: nothing but the listed fields is lost, also when a struct gets a new field."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import fields

from steersman.model.kube import (
    Annotations,
    ClientIPConfig,
    EndpointConditions,
    EndpointHints,
    EndpointSlice,
    ForZone,
    Labels,
    LoadBalancerIngress,
    LoadBalancerStatus,
    ObjectMeta,
    Service,
    ServicePort,
    ServiceSpec,
    ServiceStatus,
    SessionAffinityConfig,
    SliceEndpoint,
    SlicePort,
)
from steersman.source.packed import trimmed_service, trimmed_slice
from steersman.source.store import service_sync_fields

META = ObjectMeta(
    name="web",
    namespace="shop",
    uid="7",
    resource_version="9",
    labels=Labels(service_name="web"),
    annotations=Annotations(weight="3", trigger_time="2026-01-01T00:00:00Z"),
    creation_timestamp="2026-01-01T00:00:00Z",
    deletion_timestamp="2026-01-02T00:00:00Z",
)
SERVICE = Service(
    META,
    ServiceSpec(
        type="LoadBalancer",
        cluster_ip="10.96.0.1",
        cluster_ips=["10.96.0.1", "fd00::1"],
        ip_families=["IPv4", "IPv6"],
        ports=[ServicePort(port=80)],
        external_ips=["192.0.2.1"],
        session_affinity="ClientIP",
        session_affinity_config=SessionAffinityConfig(ClientIPConfig(10)),
        internal_traffic_policy="Local",
        external_traffic_policy="Local",
        health_check_node_port=30000,
        load_balancer_source_ranges=["10.0.0.0/8"],
    ),
    ServiceStatus(LoadBalancerStatus([LoadBalancerIngress(ip="192.0.2.2")])),
)
SLICE = EndpointSlice(
    META,
    address_type="IPv4",
    endpoints=[
        SliceEndpoint(
            ["10.1.0.1"],
            EndpointConditions(ready=False),
            "node-1",
            "zone-a",
            EndpointHints([ForZone("zone-a")]),
        )
    ],
    ports=[SlicePort("http", "TCP", 80)],
)
DROPPED = {
    trimmed_service: {"uid", "resource_version", "deletion_timestamp"},
    trimmed_slice: {"uid", "resource_version", "creation_timestamp", "deletion_timestamp"},
}


def filled(struct: msgspec.Struct) -> set[str]:
    """The fields that do not have their default."""
    return {
        each.name
        for each in fields(struct)
        if getattr(struct, each.name) not in (each.default, None, "", 0)
    }


@pytest.mark.parametrize("struct", [META, SERVICE, SERVICE.spec, SLICE, (SLICE.endpoints or [])[0]])
def test_the_examples_have_every_field(struct: msgspec.Struct) -> None:
    assert filled(struct) == {each.name for each in fields(struct)}


def test_a_trimmed_service_is_the_same_but_for_what_no_plan_reads() -> None:
    trimmed = trimmed_service(SERVICE)
    assert (trimmed.spec, trimmed.status) == (SERVICE.spec, SERVICE.status)
    assert service_sync_fields(trimmed) == service_sync_fields(SERVICE)
    assert filled(trimmed.metadata) == filled(META) - DROPPED[trimmed_service]


def test_a_trimmed_slice_is_the_same_but_for_what_no_plan_reads() -> None:
    trimmed = trimmed_slice(SLICE)
    assert trimmed.endpoints == SLICE.endpoints
    assert msgspec.structs.replace(trimmed, metadata=META) == SLICE
    assert filled(trimmed.metadata) == filled(META) - DROPPED[trimmed_slice]
    assert trimmed.metadata.annotations == Annotations(weight="3")
