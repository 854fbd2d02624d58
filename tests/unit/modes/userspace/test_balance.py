"""Which endpoint is next, and the small pure parts around it."""

from __future__ import annotations

import socket

import pytest

from steersman.model.plan import Endpoint
from steersman.proxy.balance import PENALTY, Balancer
from steersman.proxy.sockets import PortAllocator, PortError
from steersman.proxy.tcp import proxy_protocol_header

A, B, C = (Endpoint(f"10.0.0.{n}", 80) for n in (1, 2, 3))
ALL = (A, B, C)


def first(balancer: Balancer, now: float = 0.0, client: str = "x", **more: float) -> Endpoint:
    return balancer.order(client, ALL, now, affinity_seconds=more.get("affinity", 0))[0]


def test_round_and_round() -> None:
    balancer = Balancer()
    assert [first(balancer) for _ in range(6)] == [A, B, C, A, B, C]


def test_every_endpoint_is_tried_once_and_not_too_many() -> None:
    balancer = Balancer()
    assert balancer.order("x", ALL, 0) == [A, B, C]
    assert balancer.order("x", ALL, 0, most=2) == [B, C]
    assert balancer.order("x", (), 0) == []


def test_the_failed_come_last_for_a_while() -> None:
    balancer = Balancer()
    balancer.failed(A, 0)
    assert {first(balancer, 1) for _ in range(6)} == {B, C}
    assert balancer.order("x", ALL, 1)[-1] == A
    assert A in {first(balancer, PENALTY) for _ in range(3)}


def test_a_failure_is_forgotten_when_it_answers() -> None:
    balancer = Balancer()
    balancer.failed(A, 0)
    balancer.reached("x", A, 1)
    assert A in {first(balancer, 1) for _ in range(3)}


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


@pytest.mark.parametrize(
    ("client", "destination", "body"),
    [
        (("192.0.2.1", 1000), ("192.0.2.2", 80), "2111000cc0000201c000020203e80050"),
        (
            ("2001:db8::1", 1),
            ("2001:db8::2", 2),
            "21210024" + "20010db8" + "0" * 23 + "1" + "20010db8" + "0" * 23 + "2" + "00010002",
        ),
    ],
)
def test_the_header_of_the_proxy_protocol(
    client: tuple[str, int], destination: tuple[str, int], body: str
) -> None:
    header = proxy_protocol_header(client, destination)
    assert header == b"\r\n\r\n\0\r\nQUIT\n" + bytes.fromhex(body)


class Sock:
    """A socket that can bind all but the ports in use."""

    def __init__(self, used: set[int]) -> None:
        self.used, self.port = used, 0

    def bind(self, address: tuple[str, int]) -> None:
        if address[1] in self.used:
            raise OSError(98, "in use")
        self.port = address[1]
        self.used.add(self.port)

    def getsockname(self) -> tuple[str, int]:
        return ("", self.port)


def bind(ports: PortAllocator, used: set[int]) -> int:
    sock = Sock(used)
    return ports.bind(sock, "127.0.0.1")  # type: ignore[arg-type]


def test_ports_of_a_range_in_turn_and_freed_ones_cool_down() -> None:
    now, used = 0.0, {20002}
    ports = PortAllocator((20000, 20003), lambda: now)
    assert {bind(ports, used) for _ in range(3)} == {20000, 20001, 20003}
    with pytest.raises(PortError, match="20000-20003"):
        bind(ports, used)
    used.remove(20001)
    ports.release(20001)
    with pytest.raises(PortError):
        bind(ports, used)
    now = 0.6
    assert bind(ports, used) == 20001


def test_without_a_range_the_kernel_chooses() -> None:
    ports = PortAllocator()
    with socket.socket() as one, socket.socket() as two:
        assert ports.bind(one, "127.0.0.1") != ports.bind(two, "127.0.0.1") != 0


def test_an_address_that_is_not_here_is_an_error() -> None:
    with socket.socket() as sock, pytest.raises(OSError, match="assign"):
        PortAllocator().bind(sock, "203.0.113.1")
