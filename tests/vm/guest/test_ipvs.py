"""Every behaviour of tests/cases and of the conformance flows in the ipvs mode, by packets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from steersman.host.exec import SubprocessExec
from tests import case_files
from tests.conformance.runner import Case, flow_world
from tests.conformance.world import load
from tests.flows import FlowCase, by_packets, compare
from tests.vm.guest.ipvs import IPVS, mode_behind
from tests.worlds import LabPool, World, apply

FLOWS: list[Case] = [*load("packetflow_common")]


@pytest.fixture(scope="module")
def pool() -> Iterator[LabPool]:
    pool = LabPool()
    yield pool
    pool.close()


def wrong(pool: LabPool, world: World, flows: tuple[FlowCase, ...]) -> list[str]:
    lab = pool.lab(world)
    mode = mode_behind(SubprocessExec(lab.exec_argv(())))
    try:
        asyncio.run(apply(world.plan(IPVS.traits), mode))
    finally:
        mode.close()
    return [found for flow in flows if (found := compare(flow, by_packets(lab, flow)))]


@pytest.mark.parametrize("name", case_files.names())
def test_case(name: str, pool: LabPool) -> None:
    world = case_files.world(name, IPVS.traits)
    assert wrong(pool, world, world.flows) == []


@pytest.mark.parametrize("case", FLOWS, ids=lambda case: case["id"])
def test_conformance(case: Case, pool: LabPool) -> None:
    world = flow_world(case, IPVS.traits)
    assert wrong(pool, world, world.flows) == []
