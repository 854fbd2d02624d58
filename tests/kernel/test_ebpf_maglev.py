"""Maglev in the ebpf mode: two nodes give the same client the same endpoint."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from steersman.model.names import Protocol
from steersman.model.plan import Action, Endpoint, ServicePlan, Verdict
from steersman.model.ruleset import diff
from steersman.modes.ebpf import render
from steersman.modes.ebpf.layout import Kind
from steersman.modes.ebpf.tables import Tables
from tests.support.lab.ebpf_node import MARKS
from tests.support.lab.ebpf_packets import VIP, VIP6, Programs, at
from tests.support.lab.frames import SYN, TCP, packet, see

pytestmark = MARKS
ENDS = tuple(Endpoint(f"10.244.1.{n}", 8080) for n in range(1, 11))
ENDS6 = tuple(Endpoint(f"fd00::{n}", 8080) for n in range(1, 11))
CLIENTS = [f"203.0.113.{n}" for n in range(1, 250)]


def asked(address: str, ends: tuple[Endpoint, ...]) -> ServicePlan:
    made = at(address, "table", ends, Action(Verdict.FORWARD), Protocol.TCP)
    return msgspec.structs.replace(made, maglev=True)


class Balancer(Programs):
    """A node whose one Service asks for Maglev."""

    def __init__(self, service: ServicePlan) -> None:
        super().__init__()
        self.tables = Tables(self.loaded.maps)
        self.bring(service)

    def bring(self, *services: ServicePlan) -> None:
        want = {k: v for k, v in self.tables.read().items() if k[:1] in (Kind.CONFIG, Kind.NODE_IP)}
        for each in services:
            want.update(render.render_service(each))
        self.tables.write(diff(self.tables.read(), want))
        assert self.tables.read() == want

    def endpoints(self, clients: list[str], vip: str = VIP) -> list[str]:
        """The endpoint that each client's connection goes to."""
        sent = [self.ingress(packet((client, 4000), (vip, 80), TCP, SYN))[1] for client in clients]
        return [see(frame)[1][0] for frame in sent]

    def forget(self) -> None:
        self.flows.delete_all([key for key, _ in self.flows.items()])


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[Balancer, Balancer]]:
    nodes = Balancer(asked(VIP, ENDS)), Balancer(asked(VIP, ENDS))
    yield nodes
    for node in nodes:
        node.loaded.close()


def test_two_nodes_agree(two: tuple[Balancer, Balancer]) -> None:
    for vip, ends, clients in (
        (VIP, ENDS, CLIENTS),
        (VIP6, ENDS6, [f"2001:db8::{n}" for n in range(1, 250)]),
    ):
        for node in two:
            node.forget()
            node.bring(asked(vip, ends))
        first, second = (node.endpoints(clients, vip) for node in two)
        assert first == second
        assert set(first) == {end.ip for end in ends}


def test_one_endpoint_that_goes_moves_few(two: tuple[Balancer, Balancer]) -> None:
    node = two[0]
    found = []
    for ends in (ENDS, ENDS[1:]):
        node.forget()
        node.bring(asked(VIP, ends))
        found.append(node.endpoints(CLIENTS))
    stayed = [a for a, b in zip(*found, strict=True) if a == b]
    had = [each for each in found[0] if each != ENDS[0].ip]
    assert ENDS[0].ip not in found[1]
    assert len(stayed) > 0.9 * len(had)


def test_who_does_not_ask_has_chance(two: tuple[Balancer, Balancer]) -> None:
    for node in two:
        node.forget()
        node.bring(msgspec.structs.replace(asked(VIP, ENDS), maglev=False))
    first, second = (node.endpoints(CLIENTS) for node in two)
    assert first != second


def test_affinity_comes_first(two: tuple[Balancer, Balancer]) -> None:
    node = two[0]
    node.bring(msgspec.structs.replace(asked(VIP, ENDS), affinity_seconds=60))
    seen = set()
    for _ in range(4):
        node.forget()
        seen |= set(node.endpoints([CLIENTS[0]]))
    assert len(seen) == 1


def test_a_table_goes_with_its_service(two: tuple[Balancer, Balancer]) -> None:
    node = two[0]
    node.bring(asked(VIP, ENDS))
    assert len(list(node.tables.maglevs.items())) == 1
    node.bring()
    assert not list(node.tables.maglevs.items())
