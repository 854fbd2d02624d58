"""The ebpf mode on a kernel without TCX: the same object, its programs as filters of tc."""

from __future__ import annotations

import asyncio
import platform
import re
import subprocess
from collections.abc import Iterator

import pytest

from steersman.model.names import Protocol
from steersman.model.tracing import WatchedFlow
from steersman.modes.ebpf.probe import FEATURES, missing_features
from tests.support.builders.ebpf_node_plan import (
    CLIENT,
    ENDPOINTS,
    LAYOUT,
    LOOKER,
    NODE,
    NODE_PORT,
    VIP,
    bring,
    node_plan,
)
from tests.support.lab import ebpf
from tests.support.lab.cluster import Lab
from tests.support.lab.ebpf_node import Node, replace_programs

pytestmark = pytest.mark.skipif(
    not ebpf.compiled().exists(), reason="there is no compiled object, and no clang"
)
NAMES = {str(end) for end in ENDPOINTS}


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Lab(LAYOUT) as lab:
        for pod in LAYOUT.pods:
            lab.serve(pod.address, 8080, "TCP")
        made = Node(lab)
        asyncio.run(bring(made.mode(), node_plan()))
        yield made
        made.close()


def test_what_is_missing_is_what_came_later() -> None:
    here = version(platform.release())
    assert [each.name for each in missing_features()] == [
        each.name for each in FEATURES if version(each.kernel) > here
    ]


def test_it_runs_serves_and_leaves(node: Node) -> None:
    support = node.modes[0].probe()
    assert support.usable
    assert len(support.missing) == len(missing_features())
    for _ in range(2):
        with node.socket(VIP) as sock:
            sock.connect((VIP, 80))
            assert sock.getpeername() == (VIP, 80)
            assert sock.recv(100).decode().split()[0] in NAMES
        outside = node.lab.probe(CLIENT, NODE, NODE_PORT)
        assert outside.endpoint in NAMES
        assert outside.source in node.lab.node_addresses
        assert node.lab.probe(LOOKER, VIP, 81).kind == "refused"
        asyncio.run(follow_a_packet(node))
        replace_programs(node)
    asyncio.run(bring(node.modes[-1], None))
    assert not node.pins.exists()
    argv = ["nsenter", f"--net={node.lab.node.path}", "tc", "qdisc", "show"]
    assert b"clsact" not in subprocess.run(argv, check=True, capture_output=True).stdout


async def follow_a_packet(node: Node) -> None:
    """Trace a connection to a node port from outside."""
    tracer = node.modes[-1].tracer()
    await tracer.start(WatchedFlow(Protocol.TCP, NODE, NODE_PORT))
    outside = await asyncio.to_thread(node.lab.probe, CLIENT, NODE, NODE_PORT)
    async with asyncio.timeout(60):
        flow = await tracer.first_packet()
    steps = await tracer.steps()
    connection = await tracer.connection(flow)
    await tracer.aclose()
    assert flow.source == CLIENT
    assert [step.endpoint for step in steps if step.endpoint] == [outside.endpoint]
    assert connection
    assert connection.seen_source == outside.source
