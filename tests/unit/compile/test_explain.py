from __future__ import annotations

import json
from typing import Any

import pytest

from steersman.compile.explain import explain_flow, explain_service, why_endpoints
from steersman.compile.planner import compile_all
from steersman.compile.trace import Flow
from steersman.model.kube import EndpointSlice, Node, Service
from steersman.model.names import Family, ObjectName, PlanKey, Protocol
from steersman.model.plan import NodePlan
from tests.support.builders.objects import (
    CONFIG,
    FACTS,
    HTTP,
    IPTABLES,
    KEY,
    NODE,
    endpoint,
    node,
    plan_of,
    port,
    service,
    settings_of,
    slice_,
    snapshot,
)

HERE, THERE = endpoint("10.0.0.1", NODE), endpoint("10.0.0.2", "other")
DRAINING = endpoint("10.0.0.3", NODE, ready=False, serving=True, terminating=True)
CART = ObjectName("shop", "cart")
LOCAL: dict[str, Any] = {
    "type": "NodePort",
    "externalTrafficPolicy": "Local",
    "ports": [port(nodePort=30000)],
}


def why(
    *slices: EndpointSlice, zone: str = "z1", key: PlanKey = KEY, obj: Service | None = None
) -> tuple[str, ...]:
    return why_endpoints(obj or service(), slices, settings_of(), zone, key)


# why_endpoints


@pytest.mark.parametrize(
    ("conditions", "says"),
    [
        ({}, "in: ready"),
        ({"ready": False, "serving": True}, "out: not ready"),
        ({"ready": False, "serving": False, "terminating": True}, "out: not ready, terminating"),
        (
            {"ready": False, "serving": True, "terminating": True},
            "out: terminating, and others are ready",
        ),
    ],
)
def test_each_endpoint_is_in_or_out_for_a_reason(conditions: dict[str, Any], says: str) -> None:
    assert why(slice_(HERE, endpoint("10.0.0.9", **conditions))) == (
        "10.0.0.1:8080: in: ready",
        f"10.0.0.9:8080: {says}",
    )


def test_what_shuts_down_is_used_where_nothing_is_ready() -> None:
    assert why(slice_(DRAINING)) == (
        "10.0.0.3:8080: in: terminating, but it still serves and nothing is ready",
    )


def test_both_policies_are_told_apart() -> None:
    assert why(slice_(HERE, THERE, DRAINING), obj=service(**LOCAL)) == (
        "10.0.0.1:8080: for policy Cluster in: ready; for policy Local in: ready, on this node",
        "10.0.0.2:8080: for policy Cluster in: ready; for policy Local out: on another node",
        "10.0.0.3:8080: for policy Cluster out: terminating, and others are ready; "
        "for policy Local out: terminating, and others are ready",
    )


def test_policy_local_inside_alone() -> None:
    inside = service(internalTrafficPolicy="Local")
    hinted = endpoint("10.0.0.2", "other", zones=["z9"])
    assert why(slice_(DRAINING, hinted), obj=inside) == (
        "10.0.0.2:8080: for policy Local out: on another node",
        "10.0.0.3:8080: for policy Local in: terminating, but it still serves and nothing is ready",
    )


Z1 = endpoint("10.0.0.1", zones=["z1"])
Z2 = endpoint("10.0.0.2", zones=["z2", "z3"])
N1 = endpoint("10.0.0.3", nodes=[NODE], zones=["z1"])
N2 = endpoint("10.0.0.4", nodes=["n2"], zones=["z2"])


@pytest.mark.parametrize(
    ("endpoints", "zone", "lines"),
    [
        (
            (Z1, Z2),
            "z1",
            [
                "zone hints count: only endpoints meant for zone z1 are used",
                "10.0.0.1:8080: in: ready",
                "10.0.0.2:8080: out: ready, but meant for zone z2, z3",
            ],
        ),
        (
            (N1, N2),
            "z1",
            [
                f"node hints count: only endpoints meant for node {NODE} are used",
                "10.0.0.3:8080: in: ready",
                "10.0.0.4:8080: out: ready, but meant for node n2",
            ],
        ),
    ],
)
def test_hints_that_count(
    endpoints: tuple[dict[str, Any], ...], zone: str, lines: list[str]
) -> None:
    assert list(why(slice_(*endpoints), zone=zone)) == lines


@pytest.mark.parametrize(
    ("endpoints", "zone", "says"),
    [
        ((Z1, HERE | {"addresses": ["10.0.0.9"]}), "z1", "10.0.0.9:8080 has none"),
        ((Z1, Z2), "", "this node has no zone label"),
        ((Z1, Z2), "z9", "no ready endpoint is meant for this node's zone z9"),
    ],
)
def test_hints_that_do_not_count(
    endpoints: tuple[dict[str, Any], ...], zone: str, says: str
) -> None:
    lines = why(slice_(*endpoints), zone=zone)
    assert lines[0].startswith("hints are ignored: ")
    assert says in lines[0]
    assert all(line.endswith("in: ready") for line in lines[1:])


@pytest.mark.parametrize(
    ("slices", "says"),
    [
        ((), "does its selector match any pod?"),
        ((slice_(HERE, ports=[port("web"), port("")]),), "(there are: '', 'web')"),
        ((slice_(HERE, ports=[]),), "(there are: none)"),
        ((slice_(HERE, ports=[port(protocol="UDP")]),), "has an IPv4 endpoint for TCP"),
        ((slice_(family="IPv6"),), "has an IPv4 endpoint for TCP"),
    ],
)
def test_no_endpoint_at_all(slices: tuple[EndpointSlice, ...], says: str) -> None:
    assert says in why(*slices)[0]


def test_findings_on_the_slices_are_told() -> None:
    lines = why(slice_(HERE, endpoint("bad")))
    assert "endpoints[1].addresses[0]: 'bad' is not an IPv4 address" in lines[-1]


def test_a_port_that_is_not_served() -> None:
    (line,) = why(key=PlanKey(HTTP, Family.IPV6))
    assert "is not served: see the Findings on Service shop/cart" in line


# explain


def service_text(*objects: Service | EndpointSlice | Node, name: ObjectName = CART) -> str:
    world = snapshot(*objects)
    answer = explain_service(world, compile_all(world, CONFIG, FACTS, IPTABLES), name)
    json.dumps(answer.data)  # is of JSON's types
    return answer.text


def test_explain_a_flow() -> None:
    plan = plan_of(service(), slice_(HERE, THERE))
    answer = explain_flow(plan, Flow("203.0.113.5", "10.96.0.10", 80))
    assert answer.text.splitlines() == [
        "203.0.113.5 to 10.96.0.10:80/TCP: "
        "forwarded to 10.0.0.1:8080 or 10.0.0.2:8080, masqueraded",
        "  1. 10.96.0.10:80/TCP is the clusterIP of shop/cart:http",
        "  2. the client 203.0.113.5 is no pod of this cluster (pods: 10.0.0.0/8)",
        "  3. goes to one of 2 endpoints, each equally likely: 10.0.0.1:8080, 10.0.0.2:8080",
        "  4. masqueraded: the endpoint sees an address of this node as the client",
    ]
    assert json.loads(json.dumps(answer.data)) == answer.data
    assert answer.data["service"] == "shop/cart:http"
    assert answer.data["frontend"] == "clusterIP"
    assert answer.data["endpoints"] == ["10.0.0.1:8080", "10.0.0.2:8080"]


@pytest.mark.parametrize(
    ("flow", "says"),
    [
        (Flow("10.200.0.9", "10.96.0.10", 80), "rejected (the client gets an error at once)"),
        (Flow("10.200.0.9", "10.96.0.10", 81), "not touched"),
    ],
)
def test_explain_what_is_not_forwarded(flow: Flow, says: str) -> None:
    answer = explain_flow(plan_of(service()), flow)
    assert answer.text.splitlines()[0].endswith(says)
    assert answer.data["endpoints"] == []


def test_explain_not_masqueraded_and_dropped() -> None:
    plan = plan_of(service(**LOCAL), slice_(THERE))
    assert (
        "10.0.0.2:8080, not masqueraded"
        in explain_flow(plan, Flow("10.200.0.9", "10.96.0.10", 80)).text
    )
    assert (
        "dropped (the client waits"
        in explain_flow(plan, Flow("203.0.113.5", "192.168.0.2", 30000)).text
    )


def test_explain_a_service() -> None:
    obj = service(
        type="LoadBalancer",
        externalTrafficPolicy="Local",
        healthCheckNodePort=30100,
        sessionAffinity="ClientIP",
        loadBalancerSourceRanges=["203.0.113.0/24", "bad"],
        ingress=[{"ip": "192.0.2.1"}],
    )
    text = service_text(obj, slice_(THERE), node())
    assert text.splitlines() == [
        "Service shop/cart",
        "  port 'http' TCP IPv4",
        "    clusterIP 10.96.0.10:80/TCP",
        "      from pod: to 10.0.0.2:8080",
        "      from node: to 10.0.0.2:8080, masqueraded",
        "      from external: to 10.0.0.2:8080, masqueraded",
        "    loadBalancerIP 192.0.2.1:80/TCP",
        "      only for clients in 203.0.113.0/24, others are dropped",
        "      from pod: to 10.0.0.2:8080",
        "      from node: to 10.0.0.2:8080, masqueraded",
        "      from external: drop",
        "    session affinity by client address, 10800 s",
        "    health check node port 30100",
        "    endpoints:",
        "      10.0.0.2:8080: for policy Cluster in: ready; for policy Local out: on another node",
        "  warning: Service shop/cart spec.loadBalancerSourceRanges[1]: 'bad' is not a CIDR such "
        "as 192.0.2.0/24; it admits no client",
    ]


def test_explain_what_everyone_gets() -> None:
    text = service_text(service(type="NodePort", ports=[port(nodePort=30000)]))
    assert "    node port 30000/TCP\n      everyone: reject" in text


def test_explain_what_is_not_there() -> None:
    assert "is not known" in service_text(name=ObjectName("shop", "x"))
    bad = service(clusterIP="bad")
    assert "is not served here" in service_text(bad)
    assert "error: Service shop/cart spec.clusterIP" in service_text(bad)


def test_findings_of_slices_are_shown_with_their_service_alone() -> None:
    other = service("other", clusterIP="bad")
    text = service_text(service(), slice_(HERE, endpoint("bad")), other)
    assert "warning: EndpointSlice shop/cart-1" in text
    assert "shop/other" not in text


def test_a_service_that_is_gone_already_is_explained_from_the_plan() -> None:
    plan: NodePlan = plan_of(service(), slice_(HERE))
    answer = explain_service(snapshot(), plan, CART)
    assert "clusterIP 10.96.0.10:80/TCP" in answer.text
    assert answer.data["ports"][0]["endpoints"] == []


def test_protocol_is_spelled_as_in_kubernetes() -> None:
    data = explain_flow(plan_of(), Flow("10.0.0.1", "10.0.0.2", 53, Protocol.UDP)).data
    assert (data["protocol"], data["service"], data["frontend"]) == ("UDP", None, None)
