"""Every behaviour of tests/cases and of the conformance flows in the ipvs mode, by packets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace as replace_fields

import pytest
from msgspec.structs import replace

from steersman.model.plan import NodePlan
from steersman.model.stats import ConnectionStats
from steersman.modes.base import release
from steersman.modes.ipvs.mode import IpvsMode
from tests.conformance.runner import Case, flow_world
from tests.conformance.world import load
from tests.support.builders import case_files
from tests.support.builders.worlds import LabPool, World
from tests.support.lab.cluster import Lab
from tests.support.lab.inside import Inside
from tests.support.lab.ipvs_node import bring
from tests.support.modes.flows import by_packets, compare
from tests.support.modes.ipvs import IPVS, as_ipvs_serves, call, mode_behind
from tests.vm.guest.ipvs import ALL, DIFFERENT
from tests.vm.machine import chosen

SELECTED = (
    "cluster-ip",
    "cluster-ip-sctp",
    "cluster-ip-udp",
    "hairpin-ipv6",
    "internal-policy-local-none-here",
    "load-balancer-local",
    "node-port",
    "session-affinity",
    "source-ranges",
)
"""One case of each kind: in an emulated machine a case takes five seconds."""
NAMES = chosen(case_files.names(), SELECTED)
FLOWS: list[Case] = list(load("packetflow_common")) if ALL else []


class Nodes:
    """Labs, and the mode that programs the node of each: probing the kernel takes long."""

    def __init__(self) -> None:
        self.pool = LabPool()
        self._modes: dict[str, IpvsMode] = {}

    def close(self) -> None:
        for mode in self._modes.values():
            asyncio.run(release(mode))
        self.pool.close()

    def mode(self, lab: Lab) -> IpvsMode:
        """The mode of a lab's node."""
        if lab.node.path not in self._modes:
            self._modes[lab.node.path] = mode_behind(Inside(lab.node.path))
            mode = self._modes[lab.node.path]
            assert call(mode, mode.probe).usable
        return self._modes[lab.node.path]

    def wrong(self, world: World) -> list[str]:
        """The differences from the expected state when a world is in force."""
        flows = as_ipvs_serves(world.flows, world.plan(IPVS.traits))
        assert (flows != world.flows) == (world.id in DIFFERENT)
        lab = self.pool.lab(world)
        bring(world.plan(IPVS.traits), self.mode(lab))
        return [found for flow in flows if (found := compare(flow, by_packets(lab, flow)))]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.close()


@pytest.mark.parametrize("name", NAMES)
def test_case(name: str, nodes: Nodes) -> None:
    world = case_files.world(name, IPVS.traits)
    assert nodes.wrong(world) == []


@pytest.mark.parametrize("case", FLOWS, ids=lambda case: case["id"])
def test_conformance(case: Case, nodes: Nodes) -> None:
    world = flow_world(case, IPVS.traits)
    assert nodes.wrong(world) == []


def test_policy_local_falls_back(nodes: Nodes) -> None:
    """`--ipvs-local-fallback`: where there is no endpoint here, those elsewhere are used."""
    world = case_files.world("both-policies-local-none-here", IPVS.traits)
    ends = frozenset({"10.244.2.5:8080"})
    flows = tuple(
        replace_fields(flow, kind="forward", endpoints=ends, masquerade=flow.name != "pod")
        for flow in world.flows
    )
    config = replace(world.config, local_falls_back=True)
    assert nodes.wrong(replace_fields(world, config=config, flows=flows)) == []


async def counted(mode: IpvsMode, plan: NodePlan) -> ConnectionStats:
    """What was counted, when the kernel has brought all counters up to date (every two seconds)."""
    async with asyncio.timeout(60):
        while True:
            made = await mode.worker.do_slowly(mode.stats(plan.services.values()))
            ends = made.endpoints.values()
            if sum(made.frontends.values()) == sum(ends) and all(ends):
                return made
            await asyncio.sleep(0.2)


OWN_PORT = 8181


def at_own_port(plan: NodePlan) -> NodePlan:
    """The same plan, its Services at a port that no other test uses."""
    services = {
        key: replace(service, frontends=tuple(replace(f, port=OWN_PORT) for f in service.frontends))
        for key, service in plan.services.items()
    }
    return replace(plan, services=services)


def test_connections_are_counted(nodes: Nodes) -> None:
    """At a port of its own: an endpoint that comes back to a virtual server within two minutes is
    the same to the kernel, and counts what it had not counted yet."""
    world = case_files.world("cluster-ip", IPVS.traits)
    plan = world.plan(IPVS.traits)
    flows, plan = as_ipvs_serves(world.flows, plan), at_own_port(plan)
    lab = nodes.pool.lab(world)
    mode = nodes.mode(lab)
    bring(plan, mode)
    for flow in flows:
        if flow.kind == "forward":
            assert compare(flow, by_packets(lab, replace_fields(flow, port=OWN_PORT))) == ""
    made = asyncio.run(counted(mode, plan))
    assert all(moved.packets_in and moved.bytes_out for moved in made.traffic_by_endpoint.values())
