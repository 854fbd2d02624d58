from __future__ import annotations

import json

import pytest

from steersman.model.kube import Node, NodeSpec, ObjectMeta, Taint
from steersman.model.names import Family, ObjectName
from steersman.run.health import (
    DELETION_TAINT,
    Moment,
    ProxyHealth,
    ServiceHealth,
    eligible,
    readyz,
    rfc3339,
)
from steersman.run.http import Answer

NODE = Node(ObjectMeta(name="n"))
CART, SHOP = ObjectName("shop", "cart"), ObjectName("shop", "front")


def at(seconds: float, wall_step: float = 0) -> Moment:
    return Moment(round((seconds + wall_step) * 1e9), seconds)


def body(answer: Answer) -> dict[str, object]:
    decoded: dict[str, object] = json.loads(answer.body)
    return decoded


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "1970-01-01T00:00:00Z"),
        (1_500_000_000, "1970-01-01T00:00:01.5Z"),
        (1_000_000_001, "1970-01-01T00:00:01.000000001Z"),
        (1_795_232_331_101_931_518, "2026-11-21T03:38:51.101931518Z"),
        (-62135596800 * 10**9, "0001-01-01T00:00:00Z"),
    ],
)
def test_times_are_printed_as_go_does(nanoseconds: int, text: str) -> None:
    assert rfc3339(nanoseconds) == text


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (None, False),
        (NODE, True),
        (Node(ObjectMeta(name="n", deletion_timestamp="2026-01-01T00:00:00Z")), False),
        (Node(ObjectMeta(name="n"), NodeSpec(taints=[Taint(DELETION_TAINT)])), False),
        (Node(ObjectMeta(name="n"), NodeSpec(taints=[Taint("other", DELETION_TAINT)])), True),
    ],
)
def test_a_node_that_goes_gets_no_new_traffic(node: Node | None, expected: bool) -> None:
    assert eligible(node) is expected
    health = ProxyHealth(10)
    assert health.healthz(at(0), node).status == (200 if expected else 503)
    assert body(health.healthz(at(0), node))["healthy"] is True
    assert health.livez(at(0)).status == 200


def test_a_family_is_unhealthy_once_its_oldest_change_has_waited_the_timeout() -> None:
    health = ProxyHealth(10)
    health.updated(Family.IPV6, at(0))
    health.queued(Family.IPV6, at(5))
    health.queued(Family.IPV6, at(14))
    assert health.healthy(at(14.999))
    assert not health.healthy(at(15))
    health.updated(Family.IPV6, at(15))
    assert health.healthy(at(1000))


def test_a_family_never_updated_is_not_judged() -> None:
    health = ProxyHealth(10)
    health.queued(Family.IPV4, at(0))
    assert health.healthy(at(1000))
    assert "status" not in body(health.livez(at(1000)))


def test_the_clock_on_the_wall_may_be_set() -> None:
    health = ProxyHealth(10)
    health.updated(Family.IPV4, at(0))
    health.queued(Family.IPV4, at(1))
    assert health.healthy(at(2, wall_step=86400))
    assert not health.healthy(at(11, wall_step=-86400))


def test_an_unhealthy_answer_has_the_newest_real_update() -> None:
    health = ProxyHealth(10)
    assert body(health.healthz(at(5), None))["lastUpdated"] == "0001-01-01T00:00:00Z"
    health.updated(Family.IPV4, at(1))
    health.updated(Family.IPV6, at(2))
    assert body(health.healthz(at(5), None))["lastUpdated"] == rfc3339(2 * 10**9)
    assert body(health.healthz(at(5), NODE))["lastUpdated"] == rfc3339(5 * 10**9)
    assert body(health.healthz(at(5), NODE))["currentTime"] == rfc3339(5 * 10**9)


def test_ready_is_said_only_after_the_first_sync() -> None:
    assert readyz(True).status == 200
    answer = readyz(False)
    assert answer.status == 503
    assert "first sync" in str(answer.body)
    assert "no iptables" in str(readyz(False, "no iptables").body)


def test_a_service_answers_with_its_count() -> None:
    services = ServiceHealth()
    services.sync_services({CART: 30001})
    services.sync_endpoints({CART: 2, SHOP: 7})
    answer = services.answer(CART, proxy_healthy=True)
    assert answer.status == 200
    assert answer.headers["X-Load-Balancing-Endpoint-Weight"] == "2"
    assert answer.body == (
        '{\n\t"service": {\n\t\t"namespace": "shop",\n\t\t"name": "cart"\n\t},\n'
        '\t"localEndpoints": 2,\n\t"serviceProxyHealthy": true\n}'
    )
    assert services.answer(CART, proxy_healthy=False).status == 503
    assert services.answer(SHOP, proxy_healthy=True).status == 503


def test_a_service_missing_from_the_counts_has_none() -> None:
    services = ServiceHealth()
    services.sync_services({CART: 30001})
    services.sync_endpoints({CART: 2})
    services.sync_endpoints({})
    assert services.answer(CART, proxy_healthy=True).status == 503


def test_a_changed_port_closes_and_opens_and_starts_at_none() -> None:
    services = ServiceHealth()
    assert services.sync_services({CART: 30001}) == ({}, {CART: 30001})
    services.sync_endpoints({CART: 2})
    assert services.sync_services({CART: 30001}) == ({}, {})
    assert services.answer(CART, proxy_healthy=True).status == 200
    assert services.sync_services({CART: 30002}) == ({CART: 30001}, {CART: 30002})
    assert services.answer(CART, proxy_healthy=True).status == 503
    assert services.sync_services({}) == ({CART: 30002}, {})
    assert services.ports == {}


def test_a_longer_sync_period_is_more_patience() -> None:
    health = ProxyHealth(60.0)
    for family in Family:
        health.updated(family, at(0))
        health.queued(family, at(1))
    assert not health.healthy(at(62))
    health.timeout = 120.0
    assert health.healthy(at(62))
