"""Doctor about the objects of a Service: existence, Findings, endpoints, policies, node ports."""

from __future__ import annotations

import re
from typing import Any

import pytest

from steersman.compile.trace import Flow
from steersman.model import codes
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.names import ObjectName
from steersman.operate.doctor.check import Check
from steersman.operate.doctor.context import Question
from steersman.operate.doctor.result import Verdict
from tests.support.builders import objects
from tests.support.builders.doctor import CART, context_of, named, only, results
from tests.support.builders.objects import NODE, endpoint, node, port, service, slice_

EXISTS, FINDINGS, ENDPOINTS = named("service-exists", "service-findings", "service-endpoints")
FLOW, POLICIES, NODE_PORT = named("flow", "service-policy", "node-port-addresses")
HERE, ELSEWHERE = endpoint("10.0.0.1", NODE), endpoint("10.0.0.2", "node-2")


def asked(check: Check, *things: Any, **more: Any) -> tuple[Verdict, str]:
    found = only(check, context_of(*things, **more))
    return found.verdict, found.text


# The Service


def test_a_service_that_exists_is_described() -> None:
    found = only(EXISTS, context_of(service(type="NodePort", ports=[port(nodePort=30080)])))
    assert (found.verdict, found.text) == ("ok", "shop/cart is a Service of type NodePort")
    assert found.evidence == ("clusterIP: 10.96.0.10:80/TCP", "nodePort: node port 30080/TCP")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("shop/crat", "did you mean shop/cart?"),
        ("store/cart", "did you mean shop/cart?"),
        ("shop/zzz", "the namespace shop has cart"),
        ("store/zzz", "no Service of the namespace store is known: is it spelt so?"),
    ],
)
def test_a_name_that_does_not_exist_gets_near_ones(name: str, remedy: str) -> None:
    question = Question(ObjectName(*name.split("/")))
    found = only(EXISTS, context_of(service(), question=question))
    assert (found.verdict, found.remedy) == ("error", remedy)
    assert f"there is no Service {name}" in found.text


@pytest.mark.parametrize(
    ("spec", "labels", "words"),
    [
        ({"clusterIP": "None"}, None, "headless"),
        (
            {"type": "ExternalName", "clusterIP": ""},
            None,
            "ExternalName: cluster DNS answers with another name",
        ),
        ({}, {"service.kubernetes.io/service-proxy-name": "mesh"}, "another proxy .*'mesh'"),
    ],
)
def test_a_service_that_no_proxy_serves_says_so(
    spec: dict[str, Any], labels: dict[str, str] | None, words: str
) -> None:
    other = service(labels=labels, **spec)
    context = context_of(question=Question(CART), world={"unserved": {CART: other}})
    verdict, text = asked_of(EXISTS, context)
    assert verdict == "warning"
    assert re.search(words, text)


def asked_of(check: Check, context: Any) -> tuple[str, str]:
    found = only(check, context)
    return found.verdict.value, found.text


def test_a_service_without_ports_or_valid_ones_is_not_served() -> None:
    assert asked(EXISTS, service(ports=[]))[0] == "error"
    verdict, text = asked(EXISTS, service(ports=[port(number=70000)]))
    assert verdict == "error"
    assert "no port that is valid and free" in text


def test_a_port_that_does_not_exist_is_an_error() -> None:
    context = context_of(service(), question=Question(CART, "https"))
    assert asked_of(EXISTS, context) == (
        "error",
        "shop/cart has no port https; it has http (80/TCP)",
    )


def test_findings_of_the_service_and_its_slices_are_repeated() -> None:
    bad = slice_(endpoint("127.0.0.1"), HERE)
    found = results(FINDINGS, context_of(service(ports=[port(), port("b", 70000)]), bad))
    assert [each.verdict for each in found] == ["error", "warning"]
    assert "70000" in found[0].text
    assert "EndpointSlice shop/cart-1" in found[1].text
    assert [each.code for each in found] == [codes.SERVICE_FIELD, codes.ENDPOINT]
    assert "[SM" not in found[0].text
    assert asked(FINDINGS, service(), slice_(HERE))[0] == "ok"


# Endpoints


@pytest.mark.parametrize(
    ("slices", "verdict", "words"),
    [
        ((slice_(HERE, ELSEWHERE),), "ok", r"every endpoint of .* is ready \(2\)"),
        ((), "error", "no EndpointSlice belongs to shop/cart"),
        ((slice_(),), "error", "the EndpointSlices of shop/cart are empty"),
        ((slice_(HERE, ports=[port("web")]),), "error", "has a port named 'http': .* have 'web'"),
        ((slice_(HERE, ports=[]),), "error", "the EndpointSlices have none at all"),
        ((slice_(endpoint("fd00::1"), family="IPv6"),), "error", "no endpoint of this family"),
        ((slice_(endpoint("10.0.0.1", ready=False)),), "error", r"is ready \(0 of 1\)"),
        (
            (slice_(endpoint("10.0.0.1", ready=False, serving=True, terminating=True)),),
            "warning",
            "1 that terminate still serve",
        ),
        ((slice_(HERE, endpoint("10.0.0.3", ready=False)),), "warning", "1 of 2 .* is not ready"),
    ],
)
def test_endpoints_in_and_out_are_judged(slices: tuple[Any, ...], verdict: str, words: str) -> None:
    found = asked(ENDPOINTS, service(), *slices)
    assert found[0] == verdict
    assert re.search(words, found[1])


def test_why_each_endpoint_is_out_is_the_evidence() -> None:
    found = only(ENDPOINTS, context_of(service(), slice_(HERE, endpoint("10.0.0.3", ready=False))))
    assert found.evidence == ("10.0.0.1:8080: in: ready", "10.0.0.3:8080: out: not ready")


# Policies


def test_the_flow_in_question_is_decided_by_the_plan() -> None:
    def flow(destination: str, number: int = 80) -> tuple[Verdict, str]:
        question = Question(CART, flow=Flow("10.0.0.9", destination, number))
        return asked(FLOW, service(), slice_(HERE), question=question)

    assert flow("10.96.0.10") == ("ok", "10.0.0.9 to 10.96.0.10:80/TCP goes to 10.0.0.1:8080")
    verdict, text = flow("192.0.2.200")
    assert verdict == "error"
    assert "is not for a Service on this node" in text
    assert asked(FLOW, service())[0] == "skipped"


def test_a_flow_that_the_service_refuses_says_why() -> None:
    question = Question(CART, flow=Flow("10.0.0.9", "10.96.0.10", 80))
    found = asked(FLOW, service(), question=question)
    assert found == (
        "error",
        "10.0.0.9 to 10.96.0.10:80/TCP is rejected as the Service asks: no endpoint in the "
        "whole cluster can take the traffic",
    )


def test_policy_local_without_a_local_endpoint() -> None:
    inside = service(internalTrafficPolicy="Local")
    outside = service(type="NodePort", externalTrafficPolicy="Local", ports=[port(nodePort=30080)])
    verdict, text = asked(POLICIES, inside, slice_(ELSEWHERE))
    assert verdict == "error"
    assert text.startswith("internalTrafficPolicy of shop/cart:http is Local")
    verdict, text = asked(POLICIES, outside, slice_(ELSEWHERE))
    assert verdict == "warning"
    assert text.startswith("externalTrafficPolicy of shop/cart:http is Local")
    for each in (inside, outside):
        assert asked(POLICIES, each, slice_(HERE, ELSEWHERE))[0] == "ok"
        assert asked(POLICIES, each)[0] == "ok"  # the check of endpoints has said it


def test_a_health_check_port_is_the_remedy_of_a_load_balancer() -> None:
    balanced = service(
        type="LoadBalancer",
        externalTrafficPolicy="Local",
        ports=[port(nodePort=30080)],
        healthCheckNodePort=30999,
        ingress=[{"ip": "198.51.100.1"}],
    )
    found = only(POLICIES, context_of(balanced, slice_(ELSEWHERE)))
    assert found.remedy == "load balancers must probe health check node port 30999"


def test_source_ranges_are_named() -> None:
    balanced = service(
        type="LoadBalancer",
        loadBalancerSourceRanges=["198.18.0.0/16"],
        ingress=[{"ip": "198.51.100.1"}],
    )
    verdict, text = asked(POLICIES, balanced, slice_(HERE))
    assert verdict == "ok"
    assert text.startswith("only clients in 198.18.0.0/16 may use 198.51.100.1:80/TCP")


# Node ports


@pytest.mark.parametrize(
    ("cidrs", "verdict", "words"),
    [
        ((), "ok", "answers on every IPv4 address"),
        (("primary",), "ok", "answers on 192.168.0.2"),
        (("198.18.0.0/16",), "error", "answers on no IPv4 address"),
        (("192.168.1.0/24",), "warning", "does not answer on 192.168.0.2 .InternalIP."),
    ],
)
def test_addresses_of_node_ports(cidrs: tuple[str, ...], verdict: str, words: str) -> None:
    config = NodeConfig(
        node_name=NODE, cluster_cidrs=objects.CONFIG.cluster_cidrs, node_port_addresses=cidrs
    )
    this = node(addresses=(("InternalIP", "192.168.0.2"),))
    exposed = service(type="NodePort", ports=[port(nodePort=30080)])
    found = asked(NODE_PORT, exposed, slice_(HERE), this, world={"config": config})
    assert found[0] == verdict
    assert re.search(words, found[1])


def test_without_a_node_port_there_is_nothing_to_check() -> None:
    assert asked(NODE_PORT, service())[0] == "skipped"


@pytest.mark.parametrize(
    ("address", "verdict"), [("10.96.0.10/32", "notice"), ("192.0.2.7/24", "ok")]
)
def test_a_cluster_ip_may_be_an_address_of_the_node(address: str, verdict: str) -> None:
    facts = HostFacts(NODE, {"eth0": ("192.0.2.1/24",), "nodelocaldns": (address,)})
    found = only(named("cluster-ip-on-node")[0], context_of(service(), world={"facts": facts}))
    assert found.verdict == verdict
    assert ("nodelocaldns" in found.text) is (verdict == "notice")
