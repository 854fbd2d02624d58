"""The nftables mode on the machine's kernel: packets, changes, damage, and nothing left behind."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator

import pytest

from steersman.model.ruleset import diff
from steersman.modes.nftables.mode import NftablesMode
from tests.support.builders import case_files
from tests.support.builders.worlds import LabPool, World
from tests.support.lab.cluster import Lab
from tests.support.lab.inside import Inside
from tests.support.lab.nft import mode_behind
from tests.support.modes.flows import by_packets, compare
from tests.support.modes.registry import NFTABLES, answered, render
from tests.vm.machine import chosen

SELECTED = ("both-policies-local", "session-affinity", "source-ranges")
"""Each is brought about by a change of the one before; in an emulated machine it takes long."""
CASES = chosen(case_files.names(), SELECTED)


class Node:
    """A lab whose node is programmed by one mode, from case to case."""

    def __init__(self) -> None:
        self._pool = LabPool()
        self._modes: dict[str, NftablesMode] = {}

    def lab(self, world: World) -> tuple[Lab, NftablesMode]:
        lab = self._pool.lab(world)
        if lab.node.path not in self._modes:
            mode = mode_behind(Inside(lab.node.path))
            assert asyncio.run(mode.worker.do(mode.probe)).usable
            self._modes[lab.node.path] = mode
        return lab, self._modes[lab.node.path]

    def close(self) -> None:
        self._pool.close()


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.close()


def listing(lab: Lab) -> str:
    argv = lab.exec_argv(("nft", "list", "ruleset"))
    return subprocess.run(argv, check=True, text=True, stdout=subprocess.PIPE).stdout


def nft(lab: Lab, script: str) -> None:
    """What some other program does."""
    subprocess.run(lab.exec_argv(("nft", "-f", "-")), input=script, text=True, check=True)


async def bring(mode: NftablesMode, want: dict[object, object]) -> None:
    """Bring the kernel to a Ruleset; nothing is left to do afterwards."""
    await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), want))
    assert not diff(await mode.worker.do(mode.read), want)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, node: Node) -> None:
    world = case_files.world(name, NFTABLES.traits)
    lab, mode = node.lab(world)
    plan = world.plan(NFTABLES.traits)
    asyncio.run(bring(mode, dict(render(plan, mode))))
    flows = answered(plan, world.flows)
    assert [wrong for flow in flows if (wrong := compare(flow, by_packets(lab, flow)))] == []
    assert "chain nat-prerouting" in listing(lab)


def test_damage_is_healed_and_nothing_is_left(node: Node) -> None:
    world = case_files.world("session-affinity", NFTABLES.traits)
    lab, mode = node.lab(world)
    want = dict(render(world.plan(NFTABLES.traits), mode))
    asyncio.run(bring(mode, want))
    token = asyncio.run(mode.worker.do(mode.fingerprint))
    nft(lab, "flush ruleset")
    assert asyncio.run(mode.worker.do(mode.fingerprint)) != token
    asyncio.run(bring(mode, want))
    asyncio.run(bring(mode, {}))
    assert "kube-proxy" not in listing(lab)
