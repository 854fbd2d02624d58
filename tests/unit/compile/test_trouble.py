"""Services that clients cannot use on a node, by their plans."""

from __future__ import annotations

from typing import Any

import pytest

from steersman.compile.trouble import service_trouble, services_in_trouble
from steersman.model import codes
from steersman.model.findings import Finding, Severity
from steersman.model.names import ObjectName
from tests.support.builders.objects import NODE, endpoint, plan_of, port, service, slice_

HERE, ELSEWHERE = endpoint("10.1.0.1", node=NODE), endpoint("10.1.0.2", node="node-2")
ENDING = {"ready": False, "serving": True, "terminating": True}
CART = ObjectName("shop", "cart")


def troubles(*endpoints: dict[str, Any], **spec: Any) -> list[Finding]:
    plans = plan_of(service(**spec), slice_(*endpoints)).services.values()
    return [service_trouble(*each) for each in services_in_trouble(plans).items()]


@pytest.mark.parametrize("policy", ["Local", "Cluster"])
def test_a_service_that_every_client_can_use_is_in_no_trouble(policy: str) -> None:
    local = {"internalTrafficPolicy": policy, "externalTrafficPolicy": policy}
    assert troubles(HERE, ELSEWHERE, type="NodePort", ports=[port(nodePort=30080)], **local) == []


def test_without_endpoints_clients_are_rejected() -> None:
    (only,) = troubles(endpoint("10.1.0.2", ready=False))
    assert only == Finding(
        "Service shop/cart",
        "port http/TCP IPv4",
        "no endpoint: clients are rejected",
        Severity.ERROR,
        codes.NO_ENDPOINT,
    )


def test_without_local_endpoints_the_destinations_are_named() -> None:
    spec: dict[str, Any] = {"type": "NodePort", "externalTrafficPolicy": "Local"}
    (only,) = troubles(ELSEWHERE, ports=[port(nodePort=30080)], **spec)
    assert (only.severity, only.code) == (Severity.WARNING, codes.NO_LOCAL_ENDPOINT)
    assert only.reason == "no endpoint on this node: clients of node port 30080/TCP are dropped"
    more = [f"192.0.2.{number}" for number in range(1, 6)]
    (only,) = troubles(ELSEWHERE, ports=[port(nodePort=30080)], externalIPs=more, **spec)
    assert "clients of 192.0.2.1:80/TCP, 192.0.2.2:80/TCP, 192.0.2.3:80/TCP and 3 more" in (
        only.reason
    )


@pytest.mark.parametrize("policy", ["Local", "Cluster"])
def test_the_last_endpoints_that_terminate_are_a_warning(policy: str) -> None:
    ending = endpoint("10.1.0.1", node=NODE, **ENDING)
    (only,) = troubles(ending, internalTrafficPolicy=policy)
    assert (only.severity, only.code) == (Severity.WARNING, codes.ONLY_DRAINING)
    assert troubles(ending, HERE, internalTrafficPolicy=policy) == []


def test_the_worst_port_is_told_with_those_like_it() -> None:
    ports = [port("http"), port("https", 443), port("dns", 53, protocol="UDP")]
    plans = plan_of(
        service(ports=ports, internalTrafficPolicy="Local"),
        slice_(ELSEWHERE, ports=[port("http", 8080)]),
    ).services.values()
    ((name, found),) = services_in_trouble(plans).items()
    assert name == CART
    assert len(found) == 3
    worst = service_trouble(name, found)
    assert worst.code == codes.NO_ENDPOINT
    assert worst.field == "port dns/UDP IPv4, https/TCP IPv4"
    unnamed = troubles(ports=[port(None)])[0]
    assert unnamed.field == "port TCP IPv4"
