"""Floods of packets that open connections which nobody completes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import IPv4Address

import pytest

from steersman.model.plan import Endpoint
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.dump import dump
from steersman.modes.ebpf.flows import TO_ENDPOINT
from tests.support.builders.ebpf_node_plan import NODE as ADDRESS
from tests.support.builders.ebpf_node_plan import NODE_PORT, node_plan
from tests.support.lab.ebpf_node import MARKS, WAIT, programmed, serving
from tests.support.lab.ebpf_packets import CLIENT, NEXT, PLAIN, POD, VIP, Programs
from tests.support.lab.frames import ACK, RST, SYN, TCP, UDP, packet, see

pytestmark = MARKS
HALF_OPEN = 16384
KIND = layout.OFFSETS["flow"]["kind"]
OTHER_CLIENT = "203.0.113.77"
EPHEMERAL = 40000
"""A port that most clients would use; the node could give it to a socket of its own."""


def test_a_flood_of_real_packets_keeps_nobody_from_connecting() -> None:
    plan = node_plan((Endpoint(POD, 8080, True),))
    with serving("TCP") as lab, programmed(lab, plan) as node, ExitStack() as stack:
        ways = lab.netns(CLIENT)
        held = [stack.enter_context(ways.socket(ADDRESS, "TCP")) for _ in range(10)]
        for sock in held:
            sock.settimeout(WAIT)
            sock.connect((ADDRESS, NODE_PORT))
        raw = stack.enter_context(ways.call(raw_socket))
        first = int(IPv4Address("198.18.0.1"))
        for number in range(30_000):
            source = str(IPv4Address(first + number))
            raw.sendto(packet((source, EPHEMERAL), (ADDRESS, NODE_PORT))[14:], (ADDRESS, 0))
        fresh = [stack.enter_context(ways.socket(ADDRESS, "TCP")) for _ in range(20)]
        for sock in fresh:
            sock.settimeout(WAIT)
            sock.connect((ADDRESS, NODE_PORT))
        for sock in (*held, *fresh):
            assert sock.recv(100).decode().split()[0] == f"{POD}:8080"
        said = dict(line.split() for line in dump("counters", node.pins))
        assert int(said["packet_forwarded"]) > 29_000


def raw_socket() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)


@pytest.fixture
def programs() -> Iterator[Programs]:
    made = Programs(trusting=True)
    yield made
    made.loaded.close()


def opened(programs: Programs, client: tuple[str, int], vip: str) -> bool:
    """Whether a client's SYN gets to an endpoint."""
    answer, inside = programs.ingress(packet(client, (vip, 80)))
    return answer == NEXT and programs.egress(inside)[0] == NEXT


def established(programs: Programs, client: tuple[str, int], vip: str) -> tuple[str, int]:
    """Complete a connection; return the client that the endpoint sees."""
    seen, endpoint = see(programs.through(packet(client, (vip, 80))))
    programs.through(packet(endpoint, seen, TCP, SYN | ACK))
    programs.through(packet(client, (vip, 80), TCP, ACK))
    return seen


def flood(
    programs: Programs, count: int, vip: str, protocol: int = TCP, *, out: bool = False
) -> None:
    """Have so many clients begin something, each with an address of its own."""
    first = int(IPv4Address("198.18.0.1"))
    for number in range(count):
        source = str(IPv4Address(first + number))
        answer, inside = programs.ingress(packet((source, EPHEMERAL), (vip, 80), protocol))
        if out and answer == NEXT:
            programs.egress(inside)


def entries(programs: Programs) -> int:
    return sum(1 for _ in programs.flows.items())


def test_a_flood_of_syns_takes_neither_connections_nor_ports_of_others(programs: Programs) -> None:
    """There are 27,304 ports to masquerade with that the node does not need itself."""
    seen = established(programs, (CLIENT, 4000), VIP)
    flood(programs, 30_000, VIP, out=True)
    assert entries(programs) <= 4 * HALF_OPEN + 4
    assert see(programs.through(packet((CLIENT, 4000), (VIP, 80), TCP, ACK)))[0] == seen
    assert see(programs.through(packet((POD, 8080), seen, TCP, ACK)))[1] == (CLIENT, 4000)
    ports = range(EPHEMERAL, EPHEMERAL + 200)
    refused = [port for port in ports if not opened(programs, (OTHER_CLIENT, port), VIP)]
    assert len(refused) <= 2  # of 16 ports tried all may be taken


def test_a_client_has_time_to_complete_its_connection(programs: Programs) -> None:
    seen, endpoint = see(programs.through(packet((CLIENT, 4000), (VIP, 80))))
    flood(programs, HALF_OPEN - 1, PLAIN)
    assert see(programs.through(packet(endpoint, seen, TCP, SYN | ACK)))[1] == (CLIENT, 4000)
    assert see(programs.through(packet((CLIENT, 4000), (VIP, 80), TCP, ACK)))[0] == seen
    flood(programs, HALF_OPEN, PLAIN)
    assert see(programs.through(packet((CLIENT, 4000), (VIP, 80), TCP, ACK)))[0] == seen


def test_connections_that_endpoints_refuse_are_bounded_too(programs: Programs) -> None:
    for number in range(HALF_OPEN + 100):
        client = (str(IPv4Address(int(IPv4Address("198.18.0.1")) + number)), 4000)
        _, endpoint = see(programs.through(packet(client, (PLAIN, 80))))
        programs.through(packet(endpoint, client, TCP, RST | ACK))
    assert entries(programs) <= 2 * HALF_OPEN


@pytest.mark.parametrize("answered", [True, False])
def test_a_client_of_udp_that_was_answered_is_kept(programs: Programs, answered: bool) -> None:
    """It may go on listening without a word."""
    client = (CLIENT, 4000)
    _, endpoint = see(programs.through(packet(client, (PLAIN, 80), UDP)))
    if answered:
        programs.through(packet(endpoint, client, UDP))
    flood(programs, HALF_OPEN, PLAIN, UDP)
    sources = [key[:16] for key, value in programs.flows.items() if value[KIND] == TO_ENDPOINT]
    assert (layout.pack_address(CLIENT) in sources) is answered
