"""Malformed, forged and countless packets for the ipvs mode: it goes on serving, unchanged."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import subprocess
from collections.abc import Iterator
from ipaddress import IPv4Address

import pytest

from steersman.model.plan import NodePlan
from steersman.model.ruleset import diff
from steersman.modes.base import release
from steersman.modes.ipvs.mode import IpvsMode
from steersman.modes.specs import IpvsOptions
from tests.support.builders.ebpf_node_plan import (
    CLIENT,
    ENDPOINTS,
    LAYOUT,
    LOOKER,
    NODE,
    NODE_PORT,
    VIP,
    node_plan,
)
from tests.support.lab.cluster import Lab
from tests.support.lab.frames import ACK, FIN, RST, SCTP, SYN, TCP, UDP, packet
from tests.support.lab.inside import Inside
from tests.support.modes.ipvs import call, mode_behind
from tests.support.modes.registry import render

NAMES = {str(end) for end in ENDPOINTS}
FRAMES, FLOOD = 400, 2000
"""Packets of each kind: the machine is an emulated one."""
ETHERNET = 14
IP = 20


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(LAYOUT) as made:
        for pod in LAYOUT.pods:
            for protocol in ("TCP", "UDP"):
                made.serve(pod.address, 8080, protocol)
        yield made


@pytest.fixture(params=["rr", "lc", "sh", "mh"])
def mode(lab: Lab, request: pytest.FixtureRequest) -> Iterator[IpvsMode]:
    options = IpvsOptions(scheduler=request.param)
    made = mode_behind(Inside(lab.node.path), options)
    bring(made, node_plan())
    yield made
    asyncio.run(release(made))


def bring(mode: IpvsMode, plan: NodePlan) -> None:
    call(mode, mode.apply, diff(call(mode, mode.read), render(plan, mode)))


def unchanged(mode: IpvsMode) -> bool:
    return not diff(call(mode, mode.read), render(node_plan(), mode))


def serves(lab: Lab) -> bool:
    """Whether clients outside and pods reach an endpoint."""
    ways = ((CLIENT, NODE, NODE_PORT), (LOOKER, VIP, 80))
    return all(lab.probe(*way).endpoint in NAMES for way in ways)


def complaints() -> list[str]:
    """What the kernel has printed about itself."""
    lines = subprocess.run(["dmesg"], check=True, capture_output=True, text=True).stdout
    words = ("BUG", "Oops", "WARNING", "general protection", "Call Trace")
    return [line for line in lines.splitlines() if any(word in line for word in words)]


def send(lab: Lab, packets: Iterator[bytes]) -> None:
    """Send IP packets as they are, from outside."""

    def opened() -> socket.socket:
        return socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)

    with lab.netns(CLIENT).call(opened) as sock:
        for each in packets:
            destination = socket.inet_ntoa(each[16:20])
            try:
                sock.sendto(each, (destination, 0))
            except OSError:  # too malformed for the kernel that is to send it
                continue


def malformed(rng: random.Random) -> Iterator[bytes]:
    """Packets for a node port that are cut short, in pieces, or lie about their lengths."""
    for _ in range(FRAMES):
        protocol = rng.choice([TCP, UDP, SCTP])
        flags = rng.choice([SYN, ACK, FIN, RST, SYN | ACK, 0, 0xFF])
        ends = (CLIENT, rng.randrange(65536)), (NODE, NODE_PORT)
        data = bytearray(packet(*ends, protocol, flags, rng.randbytes(rng.randrange(60))))
        data = data[ETHERNET:]
        for _ in range(rng.randrange(4)):
            data[rng.randrange(IP, len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            struct.pack_into("!H", data, 6, rng.choice([0x2000, 0x2001, 1, 100, 0x1FFF]))
        yield bytes(data[: rng.randrange(IP, len(data) + 1)])


def forged(rng: random.Random) -> Iterator[bytes]:
    """ICMP errors that quote packets of connections that there may be."""
    for _ in range(FRAMES):
        inner = packet((NODE, NODE_PORT), (CLIENT, rng.randrange(65536)), TCP, ACK)[ETHERNET:]
        inner = inner[: rng.randrange(len(inner) + 1)]
        kind = rng.choice([3, 4, 5, 11, 12])
        icmp = bytes((kind, rng.randrange(16))) + bytes(2) + rng.randbytes(4) + inner
        head = struct.pack("!BBHHHBBH", 0x45, 0, 0, rng.randrange(65536), 0, 64, 1, 0)
        yield head + socket.inet_aton(CLIENT) + socket.inet_aton(NODE) + icmp


def flood() -> Iterator[bytes]:
    """SYNs of as many clients, that nobody completes."""
    first = int(IPv4Address("198.18.0.1"))
    for number in range(FLOOD):
        source = str(IPv4Address(first + number))
        yield packet((source, 40000), (NODE, NODE_PORT))[ETHERNET:]


def test_it_goes_on_serving_whatever_comes_in(lab: Lab, mode: IpvsMode) -> None:
    before = complaints()
    assert serves(lab)
    rng = random.Random(13)
    for packets in (malformed(rng), forged(rng), flood()):
        send(lab, packets)
        assert serves(lab)
    assert unchanged(mode)
    assert complaints() == before
