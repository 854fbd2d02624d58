"""Digests: equal for equal Services, in any order, and kept up to date at the cost of a change."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from steersman.compile.digest import Digests, digest_of
from steersman.model.kube import (
    EndpointConditions,
    EndpointSlice,
    KubeObject,
    LoadBalancerIngress,
    LoadBalancerStatus,
    Service,
    ServicePort,
    ServiceStatus,
    SliceEndpoint,
    SlicePort,
)
from steersman.model.names import ObjectName
from steersman.source.store import Store
from tests.support.builders.store import service, slice_
from tests.support.builders.strategies import OBJECTS
from tests.support.following import StoreFollower

WEB = ObjectName("shop", "web")


def digests(store: Store) -> Digests:
    found = Digests()
    for name, each in store.snapshot.services.items():
        found.put(name, digest_of(name, each, store.snapshot.slices.get(name, ())))
    return found


@given(st.lists(OBJECTS, max_size=12), st.randoms(use_true_random=False))
def test_incremental_equals_full_in_any_order(
    objects: list[KubeObject], order: random.Random
) -> None:
    store, kept = Store("me"), Digests()
    follower = StoreFollower(store)
    for each in objects:
        store.upsert(each)
        for name in follower.take().services:
            found = store.snapshot.services.get(name)
            slices = store.snapshot.slices.get(name, ())
            kept.put(name, digest_of(name, found, slices) if found is not None else 0)
    full = digests(store)
    assert (kept.total, kept.by_name()) == (full.total, full.by_name())
    # Another node has got the same objects in another order.
    last = {(type(each).__name__, each.metadata.object_name): each for each in objects}
    shuffled = list(last.values())
    order.shuffle(shuffled)
    other = Store("other")
    for each in shuffled:
        other.upsert(each)
    assert digests(other).total == full.total
    # Without any Service nothing is left.
    for text in list(kept.by_name()):
        kept.put(ObjectName(*text.split("/")), 0)
    assert (kept.total, kept.by_name()) == ("0" * 16, {})


def of(each: KubeObject, *slices: EndpointSlice) -> int:
    assert isinstance(each, Service)
    return digest_of(WEB, each, slices)


def test_all_that_matters_is_in_it_and_nothing_else() -> None:
    one = service(clusterIP="10.96.0.1")
    assert isinstance(one, Service)
    ends = msgspec.convert(
        slice_("x", "web", ("10.1.0.1", "10.1.0.2")), EndpointSlice, from_attributes=True
    )
    usual = of(one, ends)
    spec, replace = one.spec, msgspec.structs.replace

    def changed(**fields: object) -> int:
        return of(replace(one, spec=replace(spec, **fields)), ends)

    ingress = LoadBalancerStatus([LoadBalancerIngress(ip="192.0.2.1")])
    first, second = ends.endpoints or []
    down = EndpointConditions(ready=False)
    draining = EndpointConditions(ready=False, serving=True, terminating=True)
    others = [
        changed(cluster_ip="10.96.0.2"),
        changed(external_ips=["192.0.2.1"]),
        changed(ports=[ServicePort(81)]),
        changed(ports=[ServicePort(80, node_port=30000)]),
        changed(ports=[ServicePort(80, name="web")]),
        changed(session_affinity="ClientIP"),
        changed(external_traffic_policy="Local"),
        of(replace(one, status=ServiceStatus(ingress)), ends),
        of(one),
        of(one, replace(ends, endpoints=[first])),
        of(one, replace(ends, endpoints=[first, replace(second, conditions=down)])),
        of(one, replace(ends, endpoints=[first, replace(second, conditions=draining)])),
        of(one, replace(ends, ports=[SlicePort(None, "TCP", 1)])),
        digest_of(ObjectName("shop", "api"), one, [ends]),
    ]
    assert len({usual, *others}) == 1 + len(others)
    # The order, the number of slices and what only one node cares about change nothing.
    ready = EndpointConditions(ready=True, serving=True, terminating=False)
    same = [
        of(one, replace(ends, endpoints=[second, first])),
        of(one, replace(ends, endpoints=[first]), replace(ends, endpoints=[second])),
        of(one, replace(ends, endpoints=[replace(first, conditions=ready, zone="z"), second])),
        of(one, ends, replace(ends, endpoints=None), replace(ends, ports=None)),
        of(one, ends, replace(ends, endpoints=[SliceEndpoint(None)])),
    ]
    assert set(same) == {usual}
