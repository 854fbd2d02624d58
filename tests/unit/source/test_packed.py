"""Trimmed objects: nothing but the listed fields is lost, also when a struct gets a new field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple, fields, replace

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
    Node,
    NodeAddress,
    NodeSpec,
    NodeStatus,
    ObjectMeta,
    ObjectReference,
    Selector,
    Service,
    ServicePort,
    ServiceSpec,
    ServiceStatus,
    SessionAffinityConfig,
    SliceEndpoint,
    SlicePort,
    Taint,
)
from steersman.model.names import ObjectName
from steersman.source.packed import PackedSlices, plain, trimmed_slice, unpacked
from steersman.source.store import service_sync_fields
from steersman.source.trimmed import trimmed_node, trimmed_service, trimmed_unserved

S = TypeVar("S", bound=msgspec.Struct)


def full(kind: type[S]) -> S:
    """A struct of texts, with another one in each field."""
    return kind(**{each.name: each.name for each in fields(kind)})


META = ObjectMeta(
    name="web",
    namespace="shop",
    uid="7",
    resource_version="9",
    labels=full(Labels),
    annotations=full(Annotations),
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
        ports=[ServicePort(80, "http", "TCP", 30080)],
        external_ips=["192.0.2.1"],
        session_affinity="ClientIP",
        session_affinity_config=SessionAffinityConfig(ClientIPConfig(10)),
        internal_traffic_policy="Local",
        external_traffic_policy="Local",
        health_check_node_port=30000,
        load_balancer_source_ranges=["10.0.0.0/8"],
        external_name="db.example.net",
        selector=Selector(),
    ),
    ServiceStatus(LoadBalancerStatus([full(LoadBalancerIngress)])),
)
SLICE = EndpointSlice(
    META,
    address_type="IPv4",
    endpoints=[
        SliceEndpoint(
            ["10.1.0.1"],
            EndpointConditions(ready=True, serving=True, terminating=True),
            "node-1",
            "zone-a",
            EndpointHints([ForZone("zone-a")], [ForZone("node-1")]),
            ObjectReference("Pod", "shop", "web-1"),
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


def structs_in(value: object) -> Iterator[msgspec.Struct]:
    if isinstance(value, msgspec.Struct):
        yield value
        value = astuple(value)
    if isinstance(value, list | tuple):
        for each in value:
            yield from structs_in(each)


@pytest.mark.parametrize("example", [SERVICE, SLICE])
def test_the_examples_have_every_field(example: msgspec.Struct) -> None:
    for struct in structs_in(example):
        assert filled(struct) == {each.name for each in fields(struct)}, type(struct).__name__


def test_a_trimmed_service_is_the_same_but_for_what_no_plan_reads() -> None:
    trimmed = trimmed_service(SERVICE)
    assert (trimmed.spec, trimmed.status) == (SERVICE.spec, SERVICE.status)
    assert service_sync_fields(trimmed) == service_sync_fields(SERVICE)
    assert filled(trimmed.metadata) == filled(META) - DROPPED[trimmed_service]


def test_a_trimmed_slice_is_the_same_but_for_what_no_plan_reads() -> None:
    trimmed = plain(trimmed_slice(SLICE))
    assert trimmed.endpoints == [replace(each, target_ref=None) for each in SLICE.endpoints or ()]
    assert replace(trimmed, metadata=META, endpoints=SLICE.endpoints) == SLICE
    assert filled(trimmed.metadata) == filled(META) - DROPPED[trimmed_slice]
    assert trimmed.metadata.annotations == Annotations(weight="weight")


# The objects behind endpoints

OWNER, NAME = ObjectName("shop", "web"), ObjectName("shop", "web-1")
POD = ObjectReference("Pod", "shop", "web-7d4b9c6f5-abcde")
REFS = st.one_of(
    st.none(),
    st.builds(ObjectReference, st.just("Pod"), st.just("shop"), st.text(max_size=9)),
    st.builds(ObjectReference, st.just("Pod"), st.sampled_from(["shop", ""]), st.text("ab-")),
    st.builds(ObjectReference, st.text(max_size=5), st.text(max_size=5), st.text(max_size=5)),
)


def of_pods(*refs: ObjectReference | None) -> EndpointSlice:
    endpoints = [SliceEndpoint([f"10.1.0.{n}"], target_ref=ref) for n, ref in enumerate(refs)]
    return EndpointSlice(replace(META, name=NAME.name), address_type="IPv4", endpoints=endpoints)


@given(st.lists(REFS, max_size=5))
def test_targets_are_kept_beside_the_plans_part(refs: list[ObjectReference | None]) -> None:
    held = PackedSlices()
    assert held.put(OWNER, of_pods(*refs))
    (lean,), (whole,) = held[OWNER], held.with_targets()[OWNER]
    assert [each.target_ref for each in lean.endpoints or ()] == [None] * len(refs)
    got = [each.target_ref for each in whole.endpoints or ()]
    # A pod without a namespace is one of the slice's.
    assert got == [
        replace(ref, namespace="shop") if ref and (ref.kind, ref.namespace) == ("Pod", "") else ref
        for ref in refs
    ]
    assert plain(lean) == replace(
        whole, endpoints=[replace(each, target_ref=None) for each in whole.endpoints or ()]
    )


def test_slices_of_a_service_are_in_order_of_their_names() -> None:
    held = PackedSlices()
    for name in ("web-3", "web-1", "web-2"):
        slice_ = of_pods(POD)
        slice_ = replace(slice_, metadata=replace(slice_.metadata, name=name))
        assert held.put(OWNER, slice_)
    slices = held[OWNER]
    assert [each.metadata.name for each in slices] == ["web-1", "web-2", "web-3"]
    assert list(slices) == list(slices), "they can be read again"


def test_a_new_pod_name_alone_is_kept_and_no_change() -> None:
    held = PackedSlices()
    assert held.put(OWNER, of_pods(None))
    assert not held.put(OWNER, of_pods(POD))
    [slice_] = held.with_targets()[OWNER]
    assert [each.target_ref for each in slice_.endpoints or ()] == [POD]
    assert held.owner(NAME) == OWNER
    assert [unpacked(each) for each in held.packed()] == [slice_]


def test_slices_are_found_whatever_their_names() -> None:
    held = PackedSlices()
    named = ["web-1", "web-2", "web", "mirror-of-web-1", "web2-1"]
    for text in named:
        assert held.put(OWNER, replace(of_pods(POD), metadata=replace(META, name=text)))
    names = [ObjectName("shop", text) for text in sorted(named)]
    assert sorted(held.names()) == names
    assert held.count == len(held.packed()) == len(named)
    assert [held.owner(name) for name in names] == [OWNER] * len(named)
    assert held.owner(ObjectName("shop", "web-3")) is None
    assert held.owner(ObjectName("other", "web-1")) is None
    for name in names:
        assert held.remove(name) == OWNER
        assert held.owner(name) is None
        assert held.remove(name) is None
    assert (held.count, len(held), held.packed()) == (0, 0, [])


# Other Services and Nodes


def test_an_unserved_service_keeps_what_tells_what_it_is() -> None:
    meta = replace(META, labels=Labels(proxy_name="other"))
    kept = trimmed_unserved(replace(SERVICE, metadata=meta))
    assert kept.metadata == ObjectMeta("web", "shop", labels=Labels(proxy_name="other"))
    assert filled(kept.spec) == {"type", "cluster_ip", "ports", "external_name", "selector"}
    assert (kept.spec.external_name, kept.status) == ("db.example.net", None)


def test_a_trimmed_node_keeps_zone_and_addresses() -> None:
    meta = ObjectMeta("n", uid="7", resource_version="9", labels=Labels(zone="z"))
    spec = NodeSpec("10.1.0.0/24", ["10.1.0.0/24"], [Taint("a")])
    status = NodeStatus([NodeAddress("InternalIP", "192.0.2.1")])
    kept = trimmed_node(Node(meta, spec, status))
    assert kept == Node(
        ObjectMeta("n", labels=Labels(zone="z")), replace(spec, taints=None), status
    )
    assert trimmed_node(Node(meta)).status is None
