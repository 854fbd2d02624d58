"""The order of endpoints: round robin, affinity, failed ones last."""

from __future__ import annotations

from steersman.model.plan import Endpoint
from steersman.proxy.balance import PENALTY, Balancer

A, B, C = (Endpoint(f"10.0.0.{n}", 80) for n in (1, 2, 3))
ALL = (A, B, C)


def first(balancer: Balancer, now: float = 0.0, client: str = "x", **more: float) -> Endpoint:
    return balancer.order(client, ALL, now, affinity_seconds=more.get("affinity", 0))[0]


def test_round_robin() -> None:
    balancer = Balancer()
    assert [first(balancer) for _ in range(6)] == [A, B, C, A, B, C]


def test_every_endpoint_is_tried_once_and_not_too_many() -> None:
    balancer = Balancer()
    assert balancer.order("x", ALL, 0) == [A, B, C]
    assert balancer.order("x", ALL, 0, most=2) == [B, C]
    assert balancer.order("x", (), 0) == []


def test_failed_endpoints_come_last_for_a_while() -> None:
    balancer = Balancer()
    balancer.failed(A, 0)
    assert {first(balancer, 1) for _ in range(6)} == {B, C}
    assert balancer.order("x", ALL, 1)[-1] == A
    assert A in {first(balancer, PENALTY) for _ in range(3)}


def test_an_endpoint_that_answers_is_no_longer_failed() -> None:
    balancer = Balancer()
    balancer.failed(A, 0)
    balancer.reached("x", A, 1)
    assert A in {first(balancer, 1) for _ in range(3)}


def test_failures_of_an_endpoint_that_left_are_forgotten() -> None:
    balancer = Balancer()
    for endpoint in (A, B):
        balancer.failed(endpoint, 0)
    balancer.forget_failures((B, C))
    assert {first(balancer, 1) for _ in range(6)} == {A, C}


def test_affinity_slides() -> None:
    balancer = Balancer()
    balancer.reached("x", B, 0, 10)
    assert all(first(balancer, 9, affinity=10) == B for _ in range(4))
    balancer.reached("x", B, 9, 10)
    assert first(balancer, 18, affinity=10) == B
    assert {first(balancer, 19, affinity=10) for _ in range(3)} == set(ALL)


def test_affinity_is_by_client() -> None:
    balancer = Balancer()
    balancer.reached("x", B, 0, 10)
    assert {first(balancer, 1, "y", affinity=10) for _ in range(3)} == set(ALL)


def test_affinity_breaks_when_the_endpoint_goes_or_fails() -> None:
    balancer = Balancer()
    balancer.reached("x", B, 0, 10)
    assert balancer.order("x", (A, C), 1, affinity_seconds=10)[0] in (A, C)
    balancer.failed(B, 1)
    assert first(balancer, 1, affinity=10) != B


def test_idle_clients_are_forgotten() -> None:
    balancer = Balancer()
    for number in range(1000):
        balancer.reached(f"client {number}", A, float(number), 10)
    assert len(balancer._affinity) == 10


def test_fewest_connections_first() -> None:
    balancer = Balancer()
    for endpoint in (A, A, B):
        balancer.reached("x", endpoint, 0)
    order = balancer.order("x", ALL, 0, least_connections=True)
    assert order == [C, B, A]
    for endpoint in (A, A, B):
        balancer.ended(endpoint)
    assert not balancer.active
