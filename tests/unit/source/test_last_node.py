from __future__ import annotations

import msgspec
import pytest

from steersman.compile.planner import Planner
from steersman.model.inputs import DetectLocalMode, HostFacts, NodeConfig
from steersman.model.kube import Labels, Node, NodeAddress, NodeSpec, NodeStatus, ObjectMeta
from steersman.model.names import Family, ObjectName
from steersman.model.plan import Traits
from steersman.source.last_node import LastNode
from steersman.source.store import Store
from tests.support.builders.store import replace_objects, service, slice_


def node(
    *ips: str, cidr: str | None = None, zone: str | None = None, uid: str = "1", kind: str = ""
) -> Node:
    addresses = [NodeAddress(kind or "InternalIP", ip) for ip in ips]
    return Node(
        ObjectMeta(name="me", uid=uid, labels=Labels(zone=zone)),
        NodeSpec(pod_cidr=cidr, pod_cidrs=[cidr] if cidr else None),
        NodeStatus(addresses) if addresses else None,
    )


def listed(last: LastNode) -> list[str]:
    assert last.node is not None
    assert last.node.status is not None
    return [each.address for each in last.node.status.addresses or ()]


WHOLE = node("192.0.2.1", "2001:db8::1", cidr="10.1.0.0/24", zone="z1")


def seen(*nodes: Node | None) -> LastNode:
    last = LastNode()
    for each in nodes:
        last.update(each)
    return last


def test_a_node_that_never_was_is_not_deleted() -> None:
    last = seen(None)
    assert (last.node, last.deleted) == (None, False)


def test_a_deleted_node_stays() -> None:
    last = seen(WHOLE, None, None)
    assert (last.node, last.deleted) == (WHOLE, True)


def test_what_is_seen_again_counts() -> None:
    again = node("192.0.2.9", "2001:db8::9", cidr="10.2.0.0/24", zone="z2", uid="2")
    last = seen(WHOLE, None, again)
    assert (last.node, last.deleted, last.kept) == (again, False, ())


@pytest.mark.parametrize("gone", [(), (None,)])
def test_a_node_registered_again_keeps_what_it_has_not_got_yet(gone: tuple[None, ...]) -> None:
    bare = node(uid="2")
    last = seen(WHOLE, *gone, bare)
    assert last.node is not None
    assert listed(last) == ["192.0.2.1", "2001:db8::1"]
    assert last.node.spec == WHOLE.spec
    assert last.node.metadata.labels == WHOLE.metadata.labels
    assert last.kept == ("IPv4 addresses", "IPv6 addresses", "pod CIDRs", "zone")
    last.update(bare)  # a heartbeat
    assert last.kept == ("IPv4 addresses", "IPv6 addresses", "pod CIDRs", "zone")
    last.update(node("192.0.2.9", "2001:db8::1", cidr="10.2.0.0/24", zone="z2", uid="2"))
    assert listed(last) == ["192.0.2.9", "2001:db8::1"]
    assert not last.kept
    last.update(node("192.0.2.9", "2001:db8::1", cidr="10.2.0.0/24", uid="2"))
    assert last.node.metadata.labels is not None
    assert last.node.metadata.labels.zone is None  # removed on purpose


def test_a_family_that_loses_its_addresses_keeps_them_and_its_rank() -> None:
    last = seen(WHOLE, node("2001:db8::2", cidr="10.1.0.0/24", zone="z1"))
    assert listed(last) == ["192.0.2.1", "2001:db8::2"]
    assert last.kept == ("IPv4 addresses",)


def test_host_names_are_no_addresses_and_stay_as_they_are() -> None:
    name = NodeAddress("Hostname", "me")
    bare = msgspec.structs.replace(WHOLE, status=NodeStatus([name, NodeAddress("InternalIP", "?")]))
    last = seen(WHOLE, bare)
    assert listed(last) == ["192.0.2.1", "2001:db8::1", "me"]


def test_no_node_port_opens_on_other_addresses_and_pods_stay_pods() -> None:
    """The plan of a node whose object is deleted, registered again and completed step by step."""
    interfaces = {"eth0": ("192.0.2.1/24",), "pub0": ("198.51.100.7/24",)}
    facts = HostFacts("me", interfaces, ipv6=False)
    config = NodeConfig(
        node_name="me",
        families=(Family.IPV4,),
        detect_local_mode=DetectLocalMode.NODE_CIDR,
        node_port_addresses=("primary",),
    )
    store, planner = Store("me"), Planner(config, Traits())
    replace_objects(store, "Service", [service(clusterIP="10.96.0.1")])
    replace_objects(store, "EndpointSlice", [slice_()])

    def plan() -> object:
        planner.update(store.snapshot, facts)
        return planner.settings, dict(planner.services)

    store.upsert(node("192.0.2.1", cidr="10.1.0.0/24", zone="z1"))
    before = plan()
    assert planner.settings.ipv4.node_port_addresses == ("192.0.2.1",)
    assert planner.settings.ipv4.detector.cidr == "10.1.0.0/24"
    store.delete("Node", ObjectName("", "me"))
    assert plan() == before
    for step in (node(uid="2"), node("192.0.2.1", uid="2"), node("192.0.2.1", zone="z1", uid="2")):
        store.upsert(step)
        assert plan() == before
