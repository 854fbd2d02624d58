"""The ebpf mode beside others' programs, on kernels without TCX, and where no cgroup is."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from steersman.host.libbpf import load_program
from steersman.model.plan import Endpoint
from steersman.modes.base import release
from steersman.modes.ebpf.bpf import TCX_EGRESS, TCX_INGRESS, Link
from tests.support.builders.ebpf_node_plan import (
    CLIENT,
    ENDPOINTS,
    LOOKER,
    NODE,
    NODE6,
    NODE_PORT,
    POD,
    POD6,
    STICKY,
    VIP,
    VIP6,
    bring,
    node_plan,
)
from tests.support.lab import ebpf
from tests.support.lab.cluster import Lab, ip
from tests.support.lab.ebpf_node import MARKS, WAIT, Node, replace_programs, serving
from tests.support.waiting import until

pytestmark = MARKS
SCHED_CLS, PASS, SHOT = 3, 0, 2


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with serving("TCP", "UDP") as made:
        yield made


def node_with(lab: Lab, **options: bool) -> Iterator[Node]:
    made = Node(lab)
    made.options = msgspec.structs.replace(made.options, **options)
    asyncio.run(bring(made.mode(), node_plan()))
    yield made
    asyncio.run(bring(made.modes[-1], None))
    made.close()


@pytest.fixture(params=[False, True], ids=["clsact", "tcx"])
def node(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Node]:
    yield from node_with(lab, tcx=request.param)


@pytest.fixture(params=[False, True], ids=["clsact", "tcx"])
def bare(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Node]:
    yield from node_with(lab, tcx=request.param, sockets=False)


def tc(node: Node, *words: str) -> str:
    argv = ["nsenter", f"--net={node.lab.node.path}", "tc", *words]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout


def from_outside(node: Node, timeout: float = WAIT) -> str:
    return node.lab.probe(CLIENT, NODE, NODE_PORT, timeout=timeout).kind


def test_a_connection_outlives_other_programs(node: Node) -> None:
    asyncio.run(bring(node.modes[-1], node_plan((Endpoint(POD, 8090, True),))))
    with (
        node.lab.netns(POD).socket(POD, "TCP") as server,
        node.lab.netns(CLIENT).socket(VIP, "TCP") as client,
    ):
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((POD, 8090))
        server.listen()
        client.settimeout(WAIT)
        client.connect((NODE, NODE_PORT))
        accepted, _ = server.accept()
        with accepted:
            accepted.settimeout(WAIT)
            for _ in range(2):
                replace_programs(node)
                client.sendall(b"ping")
                assert accepted.recv(4) == b"ping"
                accepted.sendall(b"pong")
                assert client.recv(4) == b"pong"


def test_filters_are_replaced_not_multiplied(lab: Lab) -> None:
    for node in node_with(lab, tcx=False):
        for _ in range(3):
            replace_programs(node)
            for place in ("ingress", "egress"):
                said = tc(node, "filter", "show", "dev", "eth0", place)
                assert said.count("steersman/sm_") == 1
        mode = node.modes[-1]
        before = asyncio.run(mode.worker.do(mode.fingerprint))
        tc(node, "filter", "del", "dev", "eth0", "egress")
        missing = asyncio.run(mode.worker.do(mode.fingerprint))
        assert missing != before
        asyncio.run(bring(mode, node_plan()))
        assert asyncio.run(mode.worker.do(mode.fingerprint)) == missing


def test_devices_that_come_together_and_go(node: Node) -> None:
    """All get programs; of those that go nothing is kept, and the others keep theirs."""

    def known() -> set[str]:
        """The devices that pins or notes name, by index."""
        folder = node.pins / ("links" if node.options.tcx else "filters")
        return {name.partition("-")[0] for name in os.listdir(folder) if name[0].isdigit()}

    def numbers(names: tuple[str, ...]) -> set[str]:
        return node.lab.node.call(lambda: {str(socket.if_nametoindex(name)) for name in names})

    name, before = Path(node.lab.node.path).name, known()
    pairs = [("new0", "new1"), ("new2", "new3"), ("new4", "new5")]
    ip(name, [f"link add {one} type veth peer name {other}" for one, other in pairs])
    gone, kept = numbers((*pairs[0], *pairs[1])), numbers(pairs[2])
    asyncio.run(until(lambda: known() == before | gone | kept))
    ip(name, [f"link del {one}" for one, _ in pairs[:2]])
    asyncio.run(until(lambda: known() == before | kept))
    mode = node.modes[-1]
    assert any(asyncio.run(mode.worker.do(mode.read))[b"A"])
    ip(name, [f"link del {pairs[2][0]}"])
    asyncio.run(until(lambda: known() == before))
    assert from_outside(node) == "answered"


class Foreign:
    """Somebody's program on eth0 that has the same verdict on every packet: it drops it."""

    PLACE = ("dev", "eth0", "ingress", "pref", "10")

    def __init__(self, node: Node, links: bool, verdict: int = SHOT) -> None:
        self._node = node
        code = struct.pack("=BBhi", 0xB7, 0, 0, verdict) + struct.pack("=BBhi", 0x95, 0, 0, 0)
        self.program = load_program(SCHED_CLS, 0, code)
        self._links: list[Link] = []
        node.lab.node.call(self._attach_links if links else self._attach_filter)

    def _attach_links(self) -> None:
        index = socket.if_nametoindex("eth0")
        for hook in (TCX_INGRESS, TCX_EGRESS):
            self._links.append(Link.attach(self.program, index, hook))

    def _attach_filter(self) -> None:
        pin = ebpf.bpffs() / "foreign"
        Link(self.program).pin(pin)
        words = ["filter", "add", *self.PLACE, "handle", "1", "bpf", "da", "object-pinned"]
        tc(self._node, *words, str(pin))
        pin.unlink()

    def leave(self) -> None:
        for link in self._links:
            link.close()
        if not self._links:
            tc(self._node, "filter", "del", *self.PLACE)
        os.close(self.program)


def test_others_see_the_packets_too(node: Node) -> None:
    assert from_outside(node) == "answered"
    foreign = Foreign(node, bool(node.options.tcx))
    assert from_outside(node, 0.4) == "timeout"
    foreign.leave()
    assert from_outside(node) == "answered"


def test_a_program_that_was_there_before_may_accept_packets(lab: Lab) -> None:
    """Such as Cilium's, where it leaves Services to others: what follows it sees no packet."""
    made = Node(lab)
    foreign = Foreign(made, links=True, verdict=PASS)
    try:
        asyncio.run(bring(made.mode(), node_plan()))
        assert from_outside(made) == "answered"
        asyncio.run(bring(made.modes[-1], None))
    finally:
        foreign.leave()
        made.close()


def test_the_first_priority_may_be_taken(lab: Lab) -> None:
    """By a filter for one protocol, behind which there is no room for one for all."""
    made = Node(lab)
    made.options = msgspec.structs.replace(made.options, tcx=False)
    tc(made, "qdisc", "add", "dev", "eth0", "clsact")
    place = ["dev", "eth0", "ingress", "pref", "1", "protocol", "ip"]
    code = "1,6 0 0 0"  # matches nothing
    tc(made, "filter", "add", *place, "bpf", "bytecode", code, "classid", "1:1")
    try:
        for _ in range(2):
            asyncio.run(bring(made.mode(), node_plan()))
            assert from_outside(made) == "answered"
            asyncio.run(release(made.modes[-1]))
        asyncio.run(bring(made.mode(), None))
        said = tc(made, "filter", "show", "dev", "eth0", "ingress")
        assert "bytecode" in said
        assert "steersman" not in said
    finally:
        tc(made, "qdisc", "del", "dev", "eth0", "clsact")
        made.close()


def test_nothing_of_ours_is_left_and_all_of_others(lab: Lab) -> None:
    for node in node_with(lab, tcx=False):
        foreign = Foreign(node, links=False)
        asyncio.run(bring(node.modes[-1], None))
        assert "pref 10" in tc(node, "filter", "show", "dev", "eth0", "ingress")
        said = tc(node, "qdisc", "show")
        assert said.count("clsact") == 1
        foreign.leave()
        asyncio.run(bring(node.modes[-1], node_plan()))
        asyncio.run(bring(node.modes[-1], None))
        assert "clsact" in tc(node, "qdisc", "show", "dev", "eth0")  # it is not ours any more
        assert not tc(node, "filter", "show", "dev", "eth0", "ingress")
        tc(node, "qdisc", "del", "dev", "eth0", "clsact")
        asyncio.run(bring(node.modes[-1], node_plan()))
        asyncio.run(bring(node.modes[-1], None))
        assert "clsact" not in tc(node, "qdisc", "show")


@pytest.mark.parametrize("kind", ["TCP", "UDP"])
@pytest.mark.parametrize(
    ("source", "address", "port"),
    [(LOOKER, VIP, 80), (NODE, VIP, 80), (NODE6, VIP6, 80), (CLIENT, NODE, NODE_PORT)],
)
def test_packets_alone_serve(bare: Node, source: str, address: str, port: int, kind: str) -> None:
    names = {str(end) for end in ENDPOINTS} | {f"[{POD6}]:8080"}
    assert bare.lab.probe(source, address, port, kind).endpoint in names


def test_packets_alone_refuse_and_remember(bare: Node) -> None:
    assert bare.lab.probe(LOOKER, VIP, 81).kind == "refused"
    assert bare.lab.probe(NODE, VIP, 81).kind == "refused"
    assert len({bare.lab.probe(LOOKER, STICKY, 80).endpoint for _ in range(8)}) == 1


def test_the_sockets_are_taken_over_again(bare: Node) -> None:
    links = bare.pins / "links"
    assert not (links / "sm_connect4").exists()
    asyncio.run(release(bare.modes[-1]))
    bare.options = msgspec.structs.replace(bare.options, sockets=True)
    replace_programs(bare)
    assert (links / "sm_connect4").exists()
    with bare.socket(VIP) as sock:
        sock.connect((VIP, 80))
        assert sock.getpeername() == (VIP, 80)
    asyncio.run(release(bare.modes[-1]))
    bare.options = msgspec.structs.replace(bare.options, sockets=False)
    replace_programs(bare)
    assert not (links / "sm_connect4").exists()
