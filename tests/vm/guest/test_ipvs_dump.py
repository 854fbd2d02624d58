"""`steersman dump` in ipvs mode: what the kernel has, read without changing it."""

from __future__ import annotations

import asyncio

from steersman.model.inputs import Snapshot
from steersman.model.names import ObjectName
from steersman.model.plan import NodePlan
from steersman.model.world import Origin, World
from steersman.modes.base import release
from steersman.operate.dump import KernelLine, compare
from tests.support.builders.plans import SETTINGS
from tests.support.lab.ipvs_node import BOTH, ONE, OTHER, Node, mode_in, node, of, table

__all__ = ["node"]


def dumped(node: Node) -> list[KernelLine]:
    """The lines of another process, which knows the plan."""
    plan = of(*BOTH)
    planned = NodePlan(SETTINGS, {plan.key: plan})
    world = World(Origin("process", ""), Snapshot(), planned, "ipvs")
    mode = mode_in(node.name)

    async def read() -> list[KernelLine]:
        assert (await mode.worker.do(mode.probe)).usable
        try:
            return await compare(world, ObjectName("ns", "a"), mode)
        finally:
            await release(mode)

    return asyncio.run(read())


def test_virtual_servers_are_read_and_compared(node: Node) -> None:
    node.bring(of(*BOTH))
    lines = dumped(node)
    assert {line.state for line in lines} == {"planned"}
    texts = [line.text for line in lines]
    assert "TCP  10.96.0.1:80 rr" in texts
    for address, port in (ONE, OTHER):
        assert f"  -> {address}:{port}  Masq  1" in texts
    assert "10.96.0.1,tcp:80" in texts

    node.sh("ipvsadm", "-d", "-t", "10.96.0.1:80", "-r", f"{OTHER[0]}:{OTHER[1]}")
    lines = dumped(node)
    assert [line.text for line in lines if line.state == "missing"] == [
        f"  -> {OTHER[0]}:{OTHER[1]}  Masq  1"
    ]
    assert not [line for line in lines if line.state == "unexpected"]


def test_a_drained_real_server_is_left_to_the_process(node: Node) -> None:
    node.bring(of(*BOTH))
    node.sh("ipvsadm", "-e", "-t", "10.96.0.1:80", "-r", f"{OTHER[0]}:{OTHER[1]}", "-m", "-w", "0")
    before = table(node)
    dumped(node)
    assert table(node) == before
