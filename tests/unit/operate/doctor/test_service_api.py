"""Doctor about pods and NetworkPolicies, as an API server lists them."""

from __future__ import annotations

from typing import Any

import pytest

from steersman.compile.trace import Flow
from steersman.operate.doctor.check import Check
from steersman.operate.doctor.context import ApiReply, Question
from steersman.operate.doctor.result import CheckResult
from steersman.operate.doctor.service_api import covers_port, selects
from tests.support.builders.doctor import CART, context_of, named, only, results
from tests.support.builders.objects import endpoint, port, service, slice_

SELECTOR, POLICIES = named("selector", "network-policies")
PODS = "/api/v1/namespaces/shop/pods"
SERVICE = "/api/v1/namespaces/shop/services/cart"
NETWORK_POLICIES = "/apis/networking.k8s.io/v1/namespaces/shop/networkpolicies"


def pod(name: str, ip: str = "10.0.0.1", phase: str = "Running", **labels: str) -> dict[str, Any]:
    ports = [{"name": "web", "containerPort": 8080}]
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"containers": [{"ports": ports}]},
        "status": {"podIP": ip, "phase": phase},
    }


def dual_stack(pod: dict[str, Any], *addresses: str) -> dict[str, Any]:
    status = {**pod["status"], "podIPs": [{"ip": each} for each in addresses]}
    return {**pod, "status": status}


def selecting(**labels: str) -> dict[str, Any]:
    return {"spec": {"selector": labels}}


def asked(check: Check, answers: dict[str, Any], client: str = "") -> CheckResult:
    """Ask with an API server that has these pages; the others are forbidden."""

    async def ask_api(path: str) -> ApiReply:
        if path not in answers:
            return ApiReply(403, {}, {"message": "no"})
        return ApiReply(200, {}, answers[path])

    flow = Flow(client, "10.96.0.10", 80) if client else None
    question = Question(CART, flow=flow)
    things = service(), slice_(endpoint("10.0.0.1"))
    return only(check, context_of(*things, question=question, ask_api=ask_api))


# The selector


def test_a_selector_that_matches_running_pods_is_fine() -> None:
    found = asked(
        SELECTOR, {SERVICE: selecting(app="cart"), PODS: {"items": [pod("cart-1", app="cart")]}}
    )
    assert (found.verdict, found.text) == ("ok", "the selector app=cart matches 1 pods")


def test_a_selector_that_matches_nothing_names_near_pods() -> None:
    pods = [pod("cart-1", app="crat", tier="front"), pod("other", app="db"), pod("bare")]
    found = asked(SELECTOR, {SERVICE: selecting(app="cart", tier="front"), PODS: {"items": pods}})
    assert found.verdict == "error"
    assert "matches none of the 3 pods" in found.text
    assert found.evidence == ("pod cart-1 has app=crat,tier=front", "pod other has app=db")


def test_pods_that_do_not_run_are_named() -> None:
    pods = [pod("cart-1", phase="Pending", app="cart")]
    found = asked(SELECTOR, {SERVICE: selecting(app="cart"), PODS: {"items": pods}})
    assert (found.verdict, found.evidence) == ("error", ("cart-1: Pending",))


def test_a_service_without_a_selector_is_fine() -> None:
    assert asked(SELECTOR, {SERVICE: {"spec": {}}, PODS: {"items": []}}).verdict == "ok"


@pytest.mark.parametrize("check", [SELECTOR, POLICIES], ids=lambda check: check.name)
def test_without_the_right_to_ask_nothing_is_known(check: Check) -> None:
    found = asked(check, {})
    assert found.verdict == "unknown"
    assert "403" in found.text


@pytest.mark.parametrize("check", [SELECTOR, POLICIES], ids=lambda check: check.name)
def test_without_an_api_server_it_is_skipped(check: Check) -> None:
    found = only(check, context_of(service()))
    assert found.verdict == "skipped"
    assert "--kubeconfig" in found.text


# NetworkPolicies


def policy(*ingress: dict[str, Any], types: tuple[str, ...] = ("Ingress",)) -> dict[str, Any]:
    spec = {"podSelector": {}, "policyTypes": list(types), "ingress": list(ingress)}
    return {"metadata": {"name": "strict"}, "spec": spec}


FRIENDS = {"from": [{"podSelector": {"matchLabels": {"app": "shop"}}}]}
OFFICE = {"from": [{"ipBlock": {"cidr": "198.18.0.0/16", "except": ["198.18.7.0/24"]}}]}


def test_policies_are_judged_for_each_protocol_of_a_number() -> None:
    """DNS has port 53 of UDP and of TCP: a policy may let in only one of them."""
    ports = [port("udp", 53, protocol="UDP"), port("tcp", 53)]
    ends = slice_(
        endpoint("10.0.0.1"), ports=[port("udp", number=53, protocol="UDP"), port("tcp", number=53)]
    )
    answers = {
        NETWORK_POLICIES: {"items": [policy({"ports": [{"port": 53, "protocol": "UDP"}]})]},
        PODS: {"items": [pod("dns", app="cart")]},
    }

    async def ask_api(path: str) -> ApiReply:
        return ApiReply(200, {}, answers[path])

    found = results(POLICIES, context_of(service(ports=ports), ends, ask_api=ask_api))
    assert [each.verdict for each in found] == ["error", "ok"]
    assert "lets nobody in at port 53/TCP" in found[0].text


@pytest.mark.parametrize(
    ("policies", "client", "verdict"),
    [
        ((), "", "ok"),
        ((policy(types=("Egress",)),), "", "ok"),
        ((policy(),), "", "error"),
        ((policy({}),), "10.0.0.9", "ok"),
        ((policy({"ports": [{"port": 8080}]}),), "10.0.0.9", "ok"),
        ((policy({"ports": [{"port": 9090}]}),), "10.0.0.9", "error"),
        ((policy(), policy({})), "10.0.0.9", "ok"),
        ((policy(FRIENDS),), "", "ok"),
        ((policy(FRIENDS),), "10.0.0.9", "ok"),
        ((policy(FRIENDS),), "10.0.0.8", "warning"),
        ((policy(FRIENDS),), "203.0.113.1", "warning"),
        ((policy(OFFICE),), "198.18.1.1", "ok"),
        ((policy(OFFICE),), "198.18.7.1", "warning"),
        ((policy({"from": [{"ipBlock": {"cidr": "nonsense"}}]}),), "198.18.7.1", "warning"),
        ((policy({"from": [{"namespaceSelector": {}}]}),), "10.0.0.9", "warning"),
    ],
)
def test_network_policies_that_keep_clients_out(
    policies: tuple[Any, ...], client: str, verdict: str
) -> None:
    pods = [
        pod("cart-1", app="cart"),
        pod("friend", "10.0.0.9", app="shop"),
        pod("stranger", "10.0.0.8", app="db"),
    ]
    answers = {NETWORK_POLICIES: {"items": list(policies)}, PODS: {"items": pods}}
    assert asked(POLICIES, answers, client).verdict == verdict


def test_an_endpoint_may_have_any_address_of_its_pod() -> None:
    both = dual_stack(pod("cart-1", "fd00::1", app="cart"), "fd00::1", "10.0.0.1")
    answers = {NETWORK_POLICIES: {"items": [policy()]}, PODS: {"items": [both]}}
    assert asked(POLICIES, answers).verdict == "error"


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({}, True),
        ({"matchLabels": {"app": "cart"}}, True),
        ({"matchLabels": {"app": "db"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["cart"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["cart"]}]}, False),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, False),
        ({"matchExpressions": [{"key": "app", "operator": "Resembles"}]}, False),
        (None, True),
    ],
)
def test_label_selectors(selector: Any, expected: bool) -> None:
    assert selects(selector, pod("cart-1", app="cart")) is expected


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        (None, True),
        ([{}], True),
        ([{"port": "web"}], True),
        ([{"port": "nope"}], False),
        ([{"port": 8000, "endPort": 8100}], True),
        ([{"port": 8080, "protocol": "UDP"}], False),
    ],
)
def test_ports_of_a_rule(ports: Any, expected: bool) -> None:
    assert covers_port({"ports": ports}, pod("cart-1"), 8080, "TCP") is expected
