"""What of an update is a change: the rest ends where it comes in."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from steersman.model.findings import Finding
from steersman.source.objects import decode_object
from steersman.source.store import Store
from tests.support.following import StoreFollower

Object = dict[str, Any]
SERVICE: Object = {
    "kind": "Service",
    "metadata": {"namespace": "shop", "name": "cart", "resourceVersion": "1", "uid": "u"},
    "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80, "protocol": "TCP"}]},
    "status": {"loadBalancer": {}},
}
SLICE: Object = {
    "kind": "EndpointSlice",
    "metadata": {
        "namespace": "shop",
        "name": "cart-x",
        "resourceVersion": "1",
        "labels": {"kubernetes.io/service-name": "cart"},
        "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z"},
    },
    "addressType": "IPv4",
    "endpoints": [
        {"addresses": ["10.1.0.1"], "conditions": {"ready": True}, "nodeName": "n"},
        {"addresses": ["10.1.0.2"], "conditions": {"ready": False, "serving": False}},
    ],
    "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
}
NODE: Object = {
    "kind": "Node",
    "metadata": {"name": "n", "resourceVersion": "1", "annotations": {"a": "b"}},
    "spec": {"podCIDR": "10.1.0.0/24"},
    "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}], "conditions": []},
}


def with_(path: str, value: object) -> Callable[[Object], None]:
    def change(obj: Any) -> None:
        *outer, last = path.split(".")
        for name in outer:
            obj = obj[int(name)] if isinstance(obj, list) else obj.setdefault(name, {})
        obj[last] = value

    return change


MANAGED = [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}]
LATER = "2026-01-01T00:00:09Z"
QUIET: dict[str, tuple[Object, Callable[[Object], None]]] = {
    "service, the same again": (SERVICE, with_("metadata.resourceVersion", "9")),
    "service, managed fields": (SERVICE, with_("metadata.managedFields", MANAGED)),
    "service, labels": (SERVICE, with_("metadata.labels", {"app": "cart"})),
    "service, annotations": (SERVICE, with_("metadata.annotations", {"last-applied": "{}"})),
    "service, selector": (SERVICE, with_("spec.selector", {"app": "cart"})),
    "service, conditions": (SERVICE, with_("status.conditions", [{"type": "Ready"}])),
    "service, empty ingress": (SERVICE, with_("status.loadBalancer.ingress", [])),
    "service, finalizers": (SERVICE, with_("metadata.finalizers", ["x"])),
    "slice, the same again": (SLICE, with_("metadata.resourceVersion", "9")),
    "slice, managed fields": (SLICE, with_("metadata.managedFields", MANAGED)),
    "slice, generation": (SLICE, with_("metadata.generation", 2)),
    "slice, trigger time": (
        SLICE,
        with_("metadata.annotations", {"endpoints.kubernetes.io/last-change-trigger-time": LATER}),
    ),
    "slice, conditions written out": (
        SLICE,
        with_("endpoints.0.conditions", {"ready": True, "serving": True, "terminating": False}),
    ),
    "slice, target": (SLICE, with_("endpoints.0.targetRef", {"kind": "Pod", "uid": "z"})),
    "node, heartbeat": (NODE, with_("status.conditions", [{"lastHeartbeatTime": LATER}])),
    "node, images": (NODE, with_("status.images", [{"names": ["x"], "sizeBytes": 1}])),
    "node, annotations": (NODE, with_("metadata.annotations", {"node.alpha/ttl": "0"})),
    "node, other labels": (NODE, with_("metadata.labels", {"kubernetes.io/os": "linux"})),
    "node, allocatable": (NODE, with_("status.allocatable", {"cpu": "4"})),
}
CHANGES: dict[str, tuple[Object, Callable[[Object], None]]] = {
    "service, port": (SERVICE, with_("spec.ports", [{"port": 81}])),
    "service, ingress": (SERVICE, with_("status.loadBalancer.ingress", [{"ip": "192.0.2.9"}])),
    "slice, ready": (SLICE, with_("endpoints.1.conditions", {"ready": True})),
    "slice, zone": (SLICE, with_("endpoints.0.zone", "a")),
    "node, zone": (NODE, with_("metadata.labels", {"topology.kubernetes.io/zone": "a"})),
    "node, addresses": (NODE, with_("status.addresses.0.address", "192.0.2.2")),
    "node, pod CIDRs": (NODE, with_("spec.podCIDRs", ["10.1.0.0/24"])),
}


class Counting:
    """A Store that counts what it tells, fed as a watch feeds it."""

    def __init__(self) -> None:
        self.changes = 0
        self.store = Store("n", on_change=self._changed)
        for kind in ("Service", "EndpointSlice", "Node"):
            self.store.retain(kind, ())
        for obj in (SERVICE, SLICE, NODE):
            self.event(obj)
        self.follower = StoreFollower(self.store)
        self.changes = 0

    def _changed(self) -> None:
        self.changes += 1

    def event(self, obj: Object) -> None:
        decoded = decode_object(obj["kind"], json.dumps(obj).encode())
        assert not isinstance(decoded, Finding)
        self.store.upsert(decoded)


def after(name: str, rows: dict[str, tuple[Object, Callable[[Object], None]]]) -> Counting:
    before, change = rows[name]
    counting, obj = Counting(), copy.deepcopy(before)
    seen = counting.store.seen.total()
    change(obj)
    counting.event(obj)
    counting.event(obj)
    assert counting.store.seen.total() - seen == (rows is CHANGES and obj["kind"] != "Node")
    return counting


@pytest.mark.parametrize("name", QUIET)
def test_what_nothing_depends_on_is_no_change(name: str) -> None:
    counting = after(name, QUIET)
    assert counting.changes == 0
    assert not counting.follower.take()


@pytest.mark.parametrize("name", CHANGES)
def test_what_matters_is_a_change(name: str) -> None:
    counting = after(name, CHANGES)
    assert counting.changes >= 1
    assert counting.follower.take()
