"""The names that shell completion offers, by kind."""

from __future__ import annotations

import pytest

from steersman.compile.planner import compile_all
from steersman.model.findings import Finding
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.kube import EndpointSlice, Node, ObjectMeta
from steersman.model.names import ObjectName
from steersman.model.plan import Traits
from steersman.run.pages.names_page import KINDS, names
from steersman.source.objects import decode_value
from tests.support.builders import kube
from tests.support.builders.objects import snapshot
from tests.support.builders.store import make


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("service", ["bank/ledger", "shop/web"]),
        ("namespace", ["bank", "shop"]),
        ("endpoint", ["10.1.0.1:8080"]),
        ("node", ["node-a", "node-b"]),
        ("pod", ["shop/web-1"]),
        ("nonsense", []),
    ],
)
def test_names_of_a_kind(kind: str, found: list[str]) -> None:
    service = make("Service", kube.service("web", "10.96.0.1", clusterIPs=["10.96.0.1"]))
    endpoint = {
        "addresses": ["10.1.0.1"],
        "nodeName": "node-b",
        "targetRef": {"kind": "Pod", "namespace": "shop", "name": "web-1"},
    }
    slice_ = decode_value("EndpointSlice", kube.endpoint_slice("web-1", "web", endpoint))
    assert isinstance(slice_, EndpointSlice)
    plan = compile_all(
        snapshot(service, slice_),  # type: ignore[arg-type]
        NodeConfig("node-a"),
        HostFacts(),
        Traits(),
    )
    services = [ObjectName("shop", "web"), ObjectName("bank", "ledger")]
    nodes = [Node(ObjectMeta("node-a"))]
    assert names(kind, services, [slice_], nodes, list(plan.services.values())) == found
    assert (kind in KINDS) == bool(found)


def test_services_in_trouble_are_those_without_endpoints_and_those_with_findings() -> None:
    web, mail, sound = (
        make("Service", kube.service(name, ip, clusterIPs=[ip]))
        for name, ip in (("web", "10.96.0.1"), ("mail", "10.96.0.2"), ("sound", "10.96.0.3"))
    )
    slices = [
        decode_value("EndpointSlice", kube.endpoint_slice(f"{name}-1", name, "10.1.0.1"))
        for name in ("mail", "sound")
    ]
    plan = compile_all(
        snapshot(web, mail, sound, *slices),  # type: ignore[arg-type]
        NodeConfig("node-a"),
        HostFacts(),
        Traits(),
    )
    findings = [
        Finding("Service shop/mail", "spec.x", "is bad"),
        Finding("Service shop/gone", "spec.x", "is bad"),
        Finding("EndpointSlice shop/sound", "endpoints", "is bad"),
    ]
    services = [ObjectName("shop", name) for name in ("web", "mail", "sound")]
    plans = list(plan.services.values())
    found = names("trouble", services, [], [], plans, findings=findings)
    assert found == ["shop/mail", "shop/web"]
