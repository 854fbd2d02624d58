"""XDP in the ebpf mode: packets of known connections are sent on, all else is left to tc."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import pytest

from steersman.host.libbpf import load_program
from steersman.model.names import Protocol, ServicePortName
from steersman.model.plan import Endpoint
from steersman.modes.base import release
from steersman.modes.ebpf.bpf import XDP, Link
from steersman.modes.ebpf.dump import dump
from tests.support.builders.ebpf_node_plan import (
    CLIENT,
    ENDPOINTS,
    LAYOUT,
    NODE,
    NODE_PORT,
    POD,
    REMOTE,
    bring,
    node_plan,
)
from tests.support.lab.cluster import Lab
from tests.support.lab.ebpf import run_packet
from tests.support.lab.ebpf_node import MARKS, WAIT, Node, compute_checksums, replace_programs
from tests.support.lab.frames import (
    ACK,
    ETHERNET,
    FIN,
    RST,
    SCTP,
    SYN,
    TCP,
    UDP,
    ip,
    packet,
    see,
    transport,
    unwrap,
    with_checksum,
)
from tests.support.lab.sockets import Netns

pytestmark = MARKS
PASS, REDIRECT = 2, 4
PROG_TYPE_XDP = 6
PLAN = node_plan((ENDPOINTS[2],))  # the one elsewhere, behind eth1
PASSING = struct.pack("=BBhi", 0xB7, 0, 0, PASS) + struct.pack("=BBhi", 0x95, 0, 0, 0)
HELD_OPEN = 8095
"""Port of a server that ends no connection."""
TTL = 14 + 8
"""Where a frame has its time to live."""


def index(netns: Netns, name: str) -> int:
    return netns.call(lambda: socket.if_nametoindex(name))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab whose outer devices take packets that XDP sends."""
    with Lab(LAYOUT) as made, ExitStack() as stack:
        passing = load_program(PROG_TYPE_XDP, XDP, PASSING)
        stack.callback(os.close, passing)
        for end in (made.netns(CLIENT), made.netns(REMOTE)):
            # XDP sees packets as on a wire: nobody is to fill in checksums later.
            end.call(lambda: compute_checksums("eth0", on=False))
        for end in (made.netns(CLIENT), made.netns("remote")):
            link = end.call(lambda: Link.attach(passing, socket.if_nametoindex("eth0"), XDP))
            stack.callback(link.close)
        for protocol in ("TCP", "UDP"):
            made.serve(REMOTE, 8080, protocol)
        yield made


@pytest.fixture
def node(lab: Lab) -> Iterator[Node]:
    made = Node(lab)
    made.options = msgspec.structs.replace(made.options, xdp_devices=("eth0", "eth1", "none9"))
    asyncio.run(bring(made.mode(), PLAN))
    yield made
    asyncio.run(bring(made.modes[-1], None))
    made.close()


def counted(node: Node) -> int:
    said = dict(line.split() for line in dump("counters", node.pins))
    return int(said["packet_accelerated"])


def run_on(node: Node, device: str, frame: bytes) -> tuple[int, bytes]:
    """Run the program on a packet that comes in by a device of the node."""
    loaded: Any = node.modes[-1].datapath._loaded
    number = index(node.lab.node, device)

    def run() -> tuple[int, bytes]:
        context = struct.pack("=IIIIII", 0, len(frame), 0, number, 0, 0)
        return run_packet(loaded.programs["sm_xdp"], frame, context)

    return node.lab.node.call(run)


def test_a_connection_is_carried_whole(node: Node) -> None:
    assert (node.pins / f"links/xdp_{index(node.lab.node, 'eth0')}").exists()
    before = counted(node)
    with node.lab.netns(CLIENT).socket(CLIENT, "TCP") as client:
        client.settimeout(WAIT)
        client.connect((NODE, NODE_PORT))
        assert client.recv(100).decode().split()[0] == f"{REMOTE}:8080"
    assert counted(node) > before
    assert node.lab.probe(CLIENT, NODE, NODE_PORT, "UDP").endpoint == f"{REMOTE}:8080"


@contextmanager
def known(node: Node, kind: str) -> Iterator[int]:
    """A connection that is known, and not over; yields its client's port."""
    with ExitStack() as stack:
        client = stack.enter_context(node.lab.netns(CLIENT).socket(CLIENT, kind))
        client.settimeout(WAIT)
        if kind == "TCP":
            server = stack.enter_context(node.lab.netns(REMOTE).socket(REMOTE, kind))
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((REMOTE, HELD_OPEN))
            server.listen()
            asyncio.run(bring(node.modes[-1], node_plan((Endpoint(REMOTE, HELD_OPEN),))))
        client.connect((NODE, NODE_PORT))
        if kind == "TCP":
            server.settimeout(WAIT)
            stack.enter_context(server.accept()[0]).sendall(b"hello")
        else:
            client.send(b"?")
        client.recv(100)
        yield client.getsockname()[1]


@pytest.mark.parametrize(("kind", "protocol"), [("TCP", TCP), ("UDP", UDP)])
def test_packet_in_packet_out(node: Node, kind: str, protocol: int) -> None:
    with known(node, kind) as port:
        sent = packet((CLIENT, port), (NODE, NODE_PORT), protocol, ACK, b"hello")
        answer, out = run_on(node, "eth0", sent)
        assert answer == REDIRECT
        source, destination = see(out)
        assert destination == (REMOTE, HELD_OPEN if kind == "TCP" else 8080)
        assert source[0] in node.lab.node_addresses
        assert out[TTL] == sent[TTL] - 1
        assert out[:12] != sent[:12]
        answer, back = run_on(node, "eth1", packet(destination, source, protocol, ACK, b"hi"))
        assert answer == REDIRECT
        assert see(back) == ((NODE, NODE_PORT), (CLIENT, port))


def test_checksums_stay_right_whatever_they_are(node: Node) -> None:
    with known(node, "UDP") as port:
        for value in (*range(0, 1 << 16, 509), 0xFFFE, 0xFFFF):
            sent = packet((CLIENT, port), (NODE, NODE_PORT), UDP, payload=struct.pack(">H", value))
            answer, out = run_on(node, "eth0", sent)
            assert answer == REDIRECT
            assert see(out)[1] == (REMOTE, 8080)


def test_a_datagram_without_checksum_stays_without(node: Node) -> None:
    with known(node, "UDP") as port:
        answer, out = run_on(
            node, "eth0", ip(CLIENT, NODE, UDP, transport(UDP, (port, NODE_PORT), 0, b""))
        )
    assert answer == REDIRECT
    assert unwrap(out)[3][6:8] == b"\0\0"


def test_all_else_is_left_to_tc(node: Node) -> None:
    with known(node, "TCP") as port:
        ends = (CLIENT, port), (NODE, NODE_PORT)
        data = with_checksum(CLIENT, NODE, TCP, transport(TCP, (port, NODE_PORT), ACK, b""))
        old = bytearray(packet(*ends, TCP, ACK))
        old[TTL] = 1
        for frame in (
            packet(*ends, TCP, SYN),
            packet(*ends, TCP, FIN | ACK),
            packet(*ends, TCP, RST),
            packet(*ends, TCP, ACK, options=b"\x01" * 4),
            packet((CLIENT, port), (NODE, NODE_PORT + 1), TCP, ACK),
            packet((CLIENT, port ^ 1), (NODE, NODE_PORT), TCP, ACK),
            packet(*ends, SCTP, 0),
            ip(CLIENT, NODE, TCP, data, fragment=0x2000),
            bytes(old),
            ETHERNET + b"\x08\x06" + bytes(28),
            ETHERNET + b"\x86\xdd" + bytes(20),
        ):
            assert run_on(node, "eth0", frame) == (PASS, frame)


def test_an_endpoint_here_is_left_to_tc(node: Node) -> None:
    asyncio.run(bring(node.modes[-1], node_plan(ENDPOINTS[:1])))
    node.lab.serve(POD, 8080, "UDP")
    with known(node, "UDP") as port:
        frame = packet((CLIENT, port), (NODE, NODE_PORT), UDP)
        assert run_on(node, "eth0", frame) == (PASS, frame)
    node.lab.servers.silence(POD)


@pytest.mark.parametrize("end", [ENDPOINTS[0], ENDPOINTS[2]], ids=["here", "elsewhere"])
def test_a_packet_is_counted_once_whoever_sends_it_on(node: Node, end: Endpoint) -> None:
    plan = node_plan((end,))
    asyncio.run(bring(node.modes[-1], plan))
    node.lab.serve(end.ip, 8080, "UDP")
    with node.lab.netns(CLIENT).socket(CLIENT, "UDP") as client:
        client.settimeout(WAIT)
        client.connect((NODE, NODE_PORT))
        for _ in range(5):
            client.send(b"?")
            assert client.recv(100)
    mode = node.modes[-1]
    made = asyncio.run(mode.worker.do_slowly(mode.stats(tuple(plan.services.values()))))
    moved = made.traffic_by_endpoint[ServicePortName("shop", "web", "", Protocol.UDP), str(end)]
    assert (moved.packets_in, moved.packets_out) == (5, 5)
    if end.local:
        node.lab.servers.silence(end.ip)


def test_devices_that_are_named_no_more(node: Node) -> None:
    pin = node.pins / f"links/xdp_{index(node.lab.node, 'eth0')}"
    assert pin.exists()
    asyncio.run(release(node.modes[-1]))
    node.options = msgspec.structs.replace(node.options, xdp_devices=("eth1",))
    replace_programs(node)
    assert not pin.exists()
    with known(node, "UDP") as port:
        there = packet((CLIENT, port), (NODE, NODE_PORT), UDP)
        answer, out = run_on(node, "eth0", there)
        assert answer == REDIRECT  # to eth1
        back = packet((REMOTE, 8080), see(out)[0], UDP)
        assert run_on(node, "eth1", back) == (PASS, back)  # to eth0


def test_who_has_a_device_keeps_it(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(bring(node.modes[-1], None))
    other = load_program(PROG_TYPE_XDP, XDP, PASSING)
    link = node.lab.node.call(lambda: Link.attach(other, socket.if_nametoindex("eth0"), XDP))
    asyncio.run(bring(node.modes[-1], PLAN))
    assert "eth0 takes no XDP program" in caplog.text
    assert node.lab.probe(CLIENT, NODE, NODE_PORT).endpoint == f"{REMOTE}:8080"
    link.close()
    os.close(other)
