"""The Store: what it holds, and what it says has changed (behaviour 2-4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from steersman.model.failover import Backend, Ejection, Observation
from steersman.model.findings import Finding
from steersman.model.inputs import HostFacts
from steersman.model.kube import (
    EndpointSlice,
    KubeObject,
    Node,
    ObjectReference,
    Service,
    ServiceCIDR,
)
from steersman.model.names import ObjectName, Protocol
from steersman.source.packed import plain
from steersman.source.store import Arrivals, Change, Store
from tests.support.builders import kube
from tests.support.builders.store import make, replace_objects, service, slice_
from tests.support.following import Changed, StoreFollower

WEB = ObjectName("shop", "web")


def node(name: str = "me", zone: str = "a", rv: str = "1") -> KubeObject:
    labels = {"topology.kubernetes.io/zone": zone}
    return make("Node", {"metadata": {"name": name, "resourceVersion": rv, "labels": labels}})


def test_nothing_is_synced_before_both_initial_lists() -> None:
    store = Store()
    replace_objects(store, "Service", [])
    assert not store.synced
    replace_objects(store, "EndpointSlice", [])
    assert store.synced


def test_a_change_of_service_or_slice_names_the_service_once() -> None:
    store = synced()
    follower = StoreFollower(store)
    assert store.upsert(service())
    assert store.upsert(slice_())
    changes = follower.take()
    assert changes.services == {WEB}
    assert changes.service_objects == {WEB}
    assert changes.endpoints == {WEB}
    assert not follower.take()


def test_what_makes_no_difference_is_no_change() -> None:
    store = synced()
    follower = StoreFollower(store)
    store.upsert(service())
    store.upsert(slice_())
    follower.take()
    assert not store.upsert(service(labels={"color": "blue"}))
    assert not store.upsert(slice_())
    assert not follower.take()


def test_a_service_that_returns_to_what_it_was_is_named_all_the_same() -> None:
    store = synced()
    follower = StoreFollower(store)
    store.upsert(service())
    follower.take()
    assert store.upsert(service(clusterIP="10.96.0.2"))
    assert store.upsert(service())
    assert follower.take().service_objects == {WEB}


def test_a_slice_that_returns_to_what_it_was_is_reported_all_the_same() -> None:
    store = synced()
    follower = StoreFollower(store)
    store.upsert(slice_())
    follower.take()
    assert store.upsert(slice_(ips=("10.1.0.2",)))
    assert store.upsert(slice_())
    assert follower.take().endpoints == {WEB}


def test_services_that_are_not_ours_are_not_held() -> None:
    store = Store()
    assert not store.upsert(service("headless", clusterIP="None"))
    assert not store.upsert(service("outside", type="ExternalName"))
    assert not store.upsert(service("none", clusterIP=""))
    assert not store.upsert(
        service("other", labels={"service.kubernetes.io/service-proxy-name": "p"})
    )
    assert store.snapshot.services == {}


def test_a_service_that_stops_being_ours_is_gone() -> None:
    store = synced()
    follower = StoreFollower(store)
    store.upsert(service())
    follower.take()
    assert store.upsert(service(labels={"service.kubernetes.io/service-proxy-name": "p"}))
    assert follower.take().services == {WEB}
    assert store.snapshot.services == {}


def test_slices_without_service_or_headless_are_ignored() -> None:
    store = Store()
    assert not store.upsert(slice_(service_name=None))
    assert not store.upsert(slice_(headless=True))
    assert not store.snapshot.slices


def test_a_slice_that_moves_to_another_service_leaves_the_first() -> None:
    store = synced()
    follower = StoreFollower(store)
    store.upsert(slice_())
    follower.take()
    assert store.upsert(slice_(service_name="api"))
    assert follower.take().endpoints == {WEB, ObjectName("shop", "api")}
    assert set(store.snapshot.slices) == {ObjectName("shop", "api")}
    assert store.upsert(slice_(service_name=None))
    assert not store.snapshot.slices


def test_delete_of_the_unknown_is_no_change() -> None:
    store = Store()
    for kind in ("Service", "EndpointSlice", "ServiceCIDR", "Node"):
        assert not store.delete(kind, ObjectName("shop", "ghost"))


def test_a_list_is_a_difference_not_a_new_world() -> None:
    store = synced()
    follower = StoreFollower(store)
    replace_objects(store, "Service", [service(), service("api", clusterIP="10.96.0.2")])
    replace_objects(store, "EndpointSlice", [slice_()])
    follower.take()
    replace_objects(store, "Service", [service("api", clusterIP="10.96.0.2")])
    replace_objects(store, "EndpointSlice", [slice_()])
    assert follower.take().services == {WEB}


def test_listeners_hear_only_of_changes() -> None:
    heard: list[int] = []
    store = synced("me", on_change=lambda: heard.append(1))
    follower = StoreFollower(store)
    replace_objects(store, "Service", [service()])
    follower.take()
    replace_objects(store, "Service", [service()])
    store.upsert(service())
    store.delete("EndpointSlice", WEB)
    assert len(heard) == 1


def synced(
    node_name: str = "", *, on_change: Callable[[], None] = lambda: None, **options: Any
) -> Store:
    """A Store with complete, empty lists, listened to from then on."""
    store = Store(node_name, **options)
    replace_objects(store, "Service", [])
    replace_objects(store, "EndpointSlice", [])
    store.listen(on_change, lambda: None)
    return store


def trigger_times(store: Store) -> tuple[str, ...]:
    return store.take_arrivals(store.log.revision).trigger_times


def test_trigger_times_are_given_once_and_dropped_with_the_slice() -> None:
    store = synced()
    store.upsert(slice_(trigger="2026-01-01T00:00:00Z"))
    store.upsert(slice_(trigger="2026-01-01T00:00:01Z"))  # changes nothing: not collected
    assert trigger_times(store) == ("2026-01-01T00:00:00Z",)
    assert trigger_times(store) == ()
    store.upsert(slice_(ips=("10.1.0.2",), trigger="2026-01-01T00:00:02Z"))
    store.delete("EndpointSlice", ObjectName("shop", "web-1"))
    assert trigger_times(store) == ()


def test_of_one_service_sixteen_trigger_times_are_kept() -> None:
    store = synced()
    for number in range(20):
        store.upsert(slice_(ips=(f"10.1.0.{number}",), trigger=f"2026-01-01T00:00:{number:02}Z"))
    assert len(trigger_times(store)) == 16


def test_what_comes_before_the_lists_are_complete_has_no_arrival() -> None:
    store = Store("", clock=lambda: 5.0)
    store.upsert(slice_(trigger="2026-01-01T00:00:00Z"))
    replace_objects(store, "Service", [service()])
    assert store.take_arrivals(store.log.revision) == Arrivals()


def test_only_this_node_and_only_what_matters_of_it() -> None:
    store = synced("me")
    follower = StoreFollower(store)
    assert not store.upsert(node("other"))
    assert store.upsert(node())
    assert follower.take().node
    assert not store.upsert(node(rv="2"))
    assert store.upsert(node(zone="b"))
    assert not store.delete("Node", ObjectName("", "other"))


@pytest.mark.parametrize("listed", [False, True])
def test_a_node_that_is_deleted_stays_in_force(listed: bool) -> None:
    told: list[bool] = []
    store = synced("me", on_change=lambda: told.append(store.own_node.deleted))
    follower = StoreFollower(store)
    replace_objects(store, "Node", [node()])
    follower.take()
    told.clear()
    if listed:
        replace_objects(store, "Node", [])
    else:
        assert store.delete("Node", ObjectName("", "me"))
    assert store.snapshot.node == node()
    assert not follower.take()
    assert told == [True]


def test_services_of_others_are_kept_to_be_explained() -> None:
    store = synced("me")
    follower = StoreFollower(store)
    name = ObjectName("shop", "web")
    store.upsert(service(clusterIP="None"))
    assert list(store.unserved) == [name]
    assert not follower.take()
    store.upsert(service(clusterIP="10.96.0.1"))
    assert not store.unserved
    store.upsert(service(labels={"service.kubernetes.io/service-proxy-name": "x"}))
    assert list(store.unserved) == [name]
    store.retain("Service", ())
    assert not store.unserved
    store.upsert(service(type="ExternalName", externalName="db.example.net", clusterIP=""))
    assert store.unserved[name].spec.external_name == "db.example.net"
    store.delete("Service", name)
    assert not store.unserved


def test_other_nodes_are_known_and_no_change() -> None:
    store = synced("me")
    follower = StoreFollower(store)
    store.retain("Node", ())
    follower.take()
    for name in ("node-y", "node-x"):
        store.upsert(make("Node", {"metadata": {"name": name}}))
    assert [each.metadata.name for each in store.nodes] == ["node-x", "node-y"]
    assert not follower.take()
    store.delete("Node", ObjectName("", "node-x"))
    store.retain("Node", ())
    assert not store.nodes


def test_the_pods_behind_endpoints_are_in_the_detailed_snapshot() -> None:
    store, name = Store("me"), ObjectName("shop", "web")
    value = kube.endpoint_slice(
        "web-1", "web", {"addresses": ["10.1.0.1"], "targetRef": {"kind": "Pod", "name": "pod-1"}}
    )
    store.upsert(make("EndpointSlice", value))
    ((lean,),) = (each.endpoints or [] for each in store.snapshot.slices[name])
    ((whole,),) = (each.endpoints or [] for each in store.detailed_snapshot.slices[name])
    assert (lean.target_ref, whole.target_ref) == (None, ObjectReference("Pod", "shop", "pod-1"))


def test_service_cidrs_are_united_and_canonical() -> None:
    store = synced()
    follower = StoreFollower(store)
    spec = {"cidrs": ["10.96.0.1/16", "fd00::/112", "junk"]}
    store.upsert(make("ServiceCIDR", {"metadata": {"name": "a"}, "spec": spec}))
    assert list(store.snapshot.service_cidrs) == ["10.96.0.0/16", "fd00::/112"]
    assert follower.take().node
    assert store.delete("ServiceCIDR", ObjectName("", "a"))
    assert not store.snapshot.service_cidrs


def test_findings_are_replaced_by_scope() -> None:
    store = Store()
    one, two = Finding("Service a/b", "", "one"), Finding("Service a/a", "", "two")
    store.report("Service a/b", [one])
    store.report("Service a/a", [two])
    assert list(store.findings) == [two, one]
    store.report("Service a/b", ())
    store.report("Service a/c", ())
    assert list(store.findings) == [two]


def test_findings_can_be_printed_whatever_files_are_called() -> None:
    store = Store()
    store.report("a\udcff.yaml", [Finding("a\udcff.yaml", "", "is wrong")])
    assert list(store.findings) == [Finding("a\\udcff.yaml", "", "is wrong")]


def test_the_kinds_are_what_the_tests_think() -> None:
    kinds = (service(), slice_(), node(), make("ServiceCIDR", {"metadata": {"name": "a"}}))
    assert tuple(map(type, kinds)) == (Service, EndpointSlice, Node, ServiceCIDR)


def test_objects_are_kept_without_what_nobody_reads() -> None:
    store = Store()
    replace_objects(store, "Service", [service("a"), service("b")])
    store.upsert(slice_(trigger="2026-01-01T00:00:00Z"))
    store.upsert(slice_("web-2"))
    one, two = store.snapshot.services.values()
    assert one.spec.ports is two.spec.ports
    assert one == service("a")
    first, _ = store.snapshot.slices[WEB]
    assert first.metadata.annotations is None


def test_the_usual_conditions_are_no_conditions() -> None:
    usual = {"ready": True, "serving": True, "terminating": False}
    one, other, bare = (
        make(
            "EndpointSlice",
            {
                "metadata": {
                    "namespace": "shop",
                    "name": "web-1",
                    "labels": {"kubernetes.io/service-name": "web"},
                },
                "endpoints": [{"addresses": ["10.1.0.1"], "nodeName": "me", **more}],
            },
        )
        for more in ({"conditions": usual}, {"conditions": {**usual, "ready": False}}, {})
    )
    store = Store()
    assert store.upsert(one)
    assert [*map(plain, store.snapshot.slices[WEB])] == [bare]
    assert not store.upsert(bare)
    assert store.upsert(other)
    assert [*map(plain, store.snapshot.slices[WEB])] == [other]


def test_what_cannot_be_read_now_stays_as_it_was() -> None:
    store = Store()
    replace_objects(store, "Service", [service(), service("api", clusterIP="10.96.0.2")])
    finding = Finding("Service shop/web", "spec", "is wrong")
    store.reject(finding)
    store.retain("Service", (), {"Service shop/web"})
    assert set(store.snapshot.services) == {WEB}
    assert store.findings == (finding,)


@pytest.mark.parametrize("how", ["upsert", "delete", "retain"])
def test_the_finding_about_a_malformed_object_goes_with_the_next_good_one(how: str) -> None:
    store = synced()
    store.report("Service.yaml", [Finding("Service.yaml", "", "is of another scope")])
    store.reject(Finding("Service shop/web", "spec", "is wrong"))
    store.retain("EndpointSlice", ())
    assert len(store.findings) == 2
    match how:
        case "upsert":
            store.upsert(service())
        case "delete":
            store.delete("Service", WEB)
        case _:
            store.retain("Service", ())
    assert [finding.object for finding in store.findings] == ["Service.yaml"]


def test_other_findings_are_told_once() -> None:
    heard: list[int] = []
    store = Store(on_report=lambda: heard.append(1))
    finding = Finding("Service shop/web", "spec", "is wrong")
    for findings in ([finding], [finding], (), ()):
        store.report("Service shop/web", findings)
    assert len(heard) == 2


def test_the_first_change_has_its_time() -> None:
    times = iter((5.0, 9.0, 11.0, 12.0))
    store = synced(clock=lambda: next(times))

    def received() -> float | None:
        return store.take_arrivals(store.log.revision).received

    store.upsert(service())
    store.upsert(service(clusterIP="10.96.0.7"))
    assert received() == 5.0
    assert received() is None
    store.upsert(service(clusterIP="10.96.0.8"))
    in_force = store.log.revision
    store.upsert(service(clusterIP="10.96.0.9"))  # comes while the one before is written
    assert store.take_arrivals(in_force).received == 11.0
    assert received() == 12.0


def test_every_consumer_sees_every_change() -> None:
    store = synced()
    early = StoreFollower(store)
    store.upsert(service())
    late = store.log.cursor()
    assert early.take().services == {WEB}
    assert Change("Service", WEB) in late.changed()[0]


def test_facts_are_a_name_of_their_own() -> None:
    store = synced()
    follower = StoreFollower(store)
    facts = HostFacts("me", {"eth0": ("192.0.2.9/24",)})
    assert store.use_facts(facts)
    assert store.facts == facts
    assert follower.take().node
    assert not store.use_facts(facts)
    assert not follower.take()


def ejection(ip: str, strikes: int = 1) -> Ejection:
    return Ejection(Backend(ip, 80, Protocol.TCP), Observation.SILENT, 1.0, 11.0, strikes)


def test_an_ejection_is_a_change() -> None:
    calls: list[str] = []
    store = synced(on_change=lambda: calls.append("changed"))
    follower = StoreFollower(store)
    store.eject(WEB, (ejection("10.0.0.1"),))
    assert follower.take() == Changed(ejections=frozenset({WEB}))
    assert store.snapshot.ejected == {WEB: (ejection("10.0.0.1"),)}
    store.eject(WEB, (ejection("10.0.0.1", strikes=2),))  # the same endpoint
    assert not follower.take()
    assert store.snapshot.ejected[WEB][0].strikes == 2
    store.eject(WEB, ())
    assert follower.take() == Changed(ejections=frozenset({WEB}))
    assert store.snapshot.ejected == {}
    assert calls == ["changed"] * 2
