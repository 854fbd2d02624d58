"""A packet is seen on every device, in every namespace, with every pair of addresses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from steersman.host.packet_watch import PacketWatch
from steersman.model.names import Protocol
from steersman.model.tracing import Sighting, WatchedFlow
from tests.support.lab.cluster import Lab
from tests.support.lab.ebpf import compiled, program_exists
from tests.support.lab.switches import CLIENT, ENDS, mode_of
from tests.support.lab.traced import VIP, service_lab, serving
from tests.support.waiting import wait_until

pytestmark = pytest.mark.kernel


@pytest.fixture(autouse=True, scope="module")
def programs_are_compiled() -> None:
    compiled()


@pytest.fixture
def lab() -> Iterator[Lab]:
    with service_lab() as lab:
        yield lab


def watched(lab: Lab, protocol: Protocol, to: tuple[str, int], last: str) -> list[Sighting]:
    """Send a packet of the client; return where it was seen, once `last` is one of the places."""
    netns = lab.netns(CLIENT)
    with lab.socket(CLIENT, protocol.value) as client:
        client.bind((CLIENT, 0))
        flow = WatchedFlow(protocol, *to, CLIENT, client.getsockname()[1])
        with PacketWatch(flow, os.stat(netns.path).st_ino) as watch:
            client.setblocking(False)
            client.connect_ex(to)
            if protocol is Protocol.UDP:
                client.send(os.urandom(16))  # equal ones of other tests would be seen, too
            wait_until(lambda: last in places(lab, watch.sightings()))
            return watch.sightings()


def places(lab: Lab, sightings: list[Sighting]) -> list[str]:
    """Where a packet was seen, in words."""
    names = {
        os.stat(lab.node.path).st_ino: "node",
        os.stat(lab.netns(CLIENT).path).st_ino: "client",
        **{os.stat(lab.netns(end).path).st_ino: "pod" for end in ENDS},
    }
    out = []
    for each in sightings:
        done = {"sent": "by", "received": "at", "dropped": f"{each.reason} at"}[each.kind]
        where = each.device.rstrip("0123456789")
        out.append(f"{each.what} {done} {where} of {names[each.netns]}".lstrip())
    return out


def ends(sighting: Sighting) -> tuple[str, int, str, int]:
    return sighting.source, sighting.source_port, sighting.destination, sighting.port


REQUEST = ["by eth of client", "at pod of node", "by pod of node", "at eth of pod"]
ANSWER = ["by eth of pod", "at pod of node", "by pod of node", "at eth of client"]


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP])
def test_a_packet_and_its_answer_are_seen_everywhere(lab: Lab, protocol: Protocol) -> None:
    serving(lab, mode_of(lab, "nftables", "nft"))
    to = (VIP, 80) if protocol is Protocol.TCP else (ENDS[0], 8080)
    what = "SYN-ACK" if protocol is Protocol.TCP else "a datagram"
    found = watched(lab, protocol, to, f"{what} at eth of client")
    assert places(lab, found)[:8] == [*REQUEST, *(f"{what} {each}" for each in ANSWER)]
    assert [each.reply for each in found[:8]] == [False] * 4 + [True] * 4
    assert ends(found[0]) == (CLIENT, found[0].source_port, *to)
    assert found[3].destination in ENDS
    assert ends(found[7]) == (*to, *ends(found[0])[:2])


def test_a_drop_has_its_reason(lab: Lab) -> None:
    lab.run("nft", "add table inet other; add chain inet other f { type filter hook forward"
            " priority 0; policy drop; }")  # fmt: skip
    found = watched(lab, Protocol.TCP, (ENDS[0], 8080), "NETFILTER_DROP at pod of node")
    assert places(lab, found)[:3] == [*REQUEST[:2], "NETFILTER_DROP at pod of node"]
    assert found[2].function in ("nft_do_chain", "nf_hook_slow")


def test_an_error_is_an_answer(lab: Lab) -> None:
    found = watched(lab, Protocol.UDP, (ENDS[0], 8081), "an ICMP error at eth of client")
    assert "NO_SOCKET at eth of pod" in places(lab, found)
    assert found[-1].reply
    assert ends(found[-1]) == ends(found[0])  # of the packet that it quotes


def test_other_packets_are_not_seen(lab: Lab) -> None:
    with lab.socket(CLIENT, "TCP") as other:
        other.bind((CLIENT, 0))
        other.connect((ENDS[0], 8080))
        source = other.getsockname()[1]
        found = watched(lab, Protocol.TCP, (ENDS[0], 8080), "SYN-ACK at eth of client")
        assert source not in [port for each in found for port in ends(each)]


def test_nothing_stays_after_kill() -> None:
    code = (
        "from steersman.host.packet_watch import PacketWatch\n"
        "from steersman.model.names import Protocol\n"
        "from steersman.model.tracing import WatchedFlow\n"
        "watch = PacketWatch(WatchedFlow(Protocol.TCP, '192.0.2.1', 1, '', 1), 1)\n"
        "print(flush=True)\n"
        "input()\n"
    )
    argv = [sys.executable, "-c", code]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout
        assert child.stdout.readline()
        numbers = programs(child.pid)
        assert len(numbers) == 3
        assert all(map(program_exists, numbers))
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    wait_until(lambda: not any(map(program_exists, numbers)))


def programs(pid: int) -> set[int]:
    """The kernel's ids of the programs that a process has."""
    found = set()
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        words = path.read_text().split()
        if "prog_id:" in words:
            found.add(int(words[words.index("prog_id:") + 1]))
    return found
