"""The canary: which destinations it watches, and when it says that they fail."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

from steersman.model.names import Family, PlanKey, Protocol, ServicePortName
from steersman.model.plan import (
    Action,
    FamilySettings,
    Frontend,
    FrontendKind,
    NodePlan,
    NodeSettings,
    Verdict,
)
from steersman.run.process.canary import Canary, Target, dial, targets_of
from tests.support.builders import nftables_plans as make

WEB, MAIL = Target("shop/web", "10.96.0.1", 80), Target("shop/mail", "10.96.0.2", 25)


class Network:
    """What answers; asked about nothing else."""

    def __init__(self) -> None:
        self.dead: set[Target] = set()
        self.dialled: list[Target] = []

    async def dial(self, target: Target) -> str:
        self.dialled.append(target)
        await asyncio.sleep(0)
        return "Connection refused" if target in self.dead else ""


def plan_of(*frontends: Frontend, node: FamilySettings) -> NodePlan:
    service = make.port([0, 2], frontends=frontends)
    return NodePlan(NodeSettings(ipv4=node), {service.key: service})


def test_only_what_this_node_is_forwarded_from_is_dialled() -> None:
    forward, drop = Action(Verdict.FORWARD), Action(Verdict.DROP)
    vip = Frontend(FrontendKind.CLUSTER_IP, "10.96.0.10", 80, forward, forward, forward)
    port = Frontend(FrontendKind.NODE_PORT, "", 30080, forward, forward, forward)
    limited = Frontend(
        FrontendKind.CLUSTER_IP, "10.96.0.11", 80, forward, forward, forward, ("192.0.2.0/24",)
    )
    dropped = Frontend(FrontendKind.CLUSTER_IP, "10.96.0.12", 80, forward, drop, forward)
    outside = Frontend(FrontendKind.EXTERNAL_IP, "198.51.100.1", 80, forward, forward, forward)
    node = FamilySettings(node_ip="192.0.2.1", node_port_addresses=("192.0.2.1",))
    found = targets_of(plan_of(vip, port, limited, dropped, outside, node=node))
    assert [(t.address, t.port) for t in found] == [("10.96.0.10", 80), ("192.0.2.1", 30080)]
    assert len(found[0].endpoints) == 2
    elsewhere = FamilySettings(node_ip="192.0.2.1", node_port_addresses=("203.0.113.1",))
    found = targets_of(plan_of(port, node=elsewhere))
    assert found == [], "it is not served there"


def test_of_many_some_are_chosen_evenly() -> None:
    names = [ServicePortName("shop", f"s{n:03}", "", Protocol.TCP) for n in range(100)]
    services = [make.port([0], of=PlanKey(name, Family.IPV4)) for name in names]
    plan = NodePlan(NodeSettings(), {each.key: each for each in services})
    found = [target.service for target in targets_of(plan, 4)]
    assert len(found) == len(set(found)) == 4


async def test_only_what_always_answered_is_watched() -> None:
    network = Network()
    network.dead = {MAIL}
    canary = Canary([WEB, MAIL], network.dial)
    await canary.prove()
    assert canary.proven == [WEB]
    several = WEB._replace(endpoints=(("10.1.0.1", 80), ("10.1.0.2", 80)))
    network.dialled.clear()
    await Canary([several], network.dial).prove()
    assert network.dialled == [several] * 8, "one of two endpoints may be dead"


async def test_a_proxy_answers_for_dead_endpoints_so_these_are_dialled() -> None:
    network = Network()
    end = ("10.1.0.1", 8080)
    network.dead = {Target("shop/web", *end)}
    canary = Canary([WEB._replace(endpoints=(end,)), MAIL], network.dial, proxied=True)
    await canary.prove()
    assert canary.proven == [MAIL]


async def test_several_failures_in_a_row_count_and_single_ones_do_not() -> None:
    network = Network()
    canary = Canary([WEB, MAIL], network.dial, sleep=lambda _: asyncio.sleep(0))
    await canary.prove()
    async with canary.watching(), asyncio.timeout(60):
        while canary.dials < 4:  # noqa: ASYNC110 - it is the canary that goes on
            await asyncio.sleep(0)
        network.dead = {MAIL}
        while canary.failed < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert canary.failing == []
        network.dead = set()
        dials = canary.dials
        while canary.dials < dials + 4:  # noqa: ASYNC110
            await asyncio.sleep(0)
        network.dead = {MAIL}
        while not canary.failing:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert canary.failing == [MAIL]
    assert canary.failures[0].startswith("shop/mail at 10.96.0.2:25: Connection refused after")
    canary.forget()
    assert canary.failing == []


async def test_nothing_is_dialled_without_a_proven_destination() -> None:
    network = Network()
    canary = Canary([], network.dial)
    await canary.prove()
    async with canary.watching():
        await asyncio.sleep(0)
    assert network.dialled == []


async def test_a_dial_says_what_went_wrong() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        target = Target("shop/web", "127.0.0.1", port)
        assert await dial(target) == os.strerror(errno.ECONNREFUSED)
        server.listen()
        assert await dial(target) == ""
