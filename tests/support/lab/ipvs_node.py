"""A node in ipvs mode inside the virtual machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from steersman.model.names import Protocol
from steersman.model.plan import NodePlan, ServicePlan
from steersman.model.ruleset import Ruleset, diff
from steersman.modes.base import release
from steersman.modes.ipvs.mode import IpvsMode
from steersman.modes.ipvs.objects import Server, ServerKey
from steersman.modes.specs import IpvsOptions
from tests.support.builders.plans import SETTINGS, cluster_ip, endpoints, key, plan
from tests.support.lab.inside import Inside
from tests.support.modes.ipvs import call, mode_behind
from tests.support.modes.registry import render

VIP = ServerKey(Protocol.TCP, "10.96.0.1", 80)


ONE, OTHER = ("10.244.0.1", 8080), ("10.244.0.2", 8080)


BOTH = (ONE[0], OTHER[0])


@dataclass
class Node:
    """A namespace, and a mode for it."""

    name: str
    mode: IpvsMode

    def again(self, options: IpvsOptions | None = None) -> IpvsMode:
        """A fresh process, as far as the mode knows."""
        asyncio.run(release(self.mode))
        self.mode = mode_in(self.name, options)
        return self.mode

    def bring(self, *plans: ServicePlan) -> int:
        """Bring the kernel to these plans; how many objects that changed."""
        wanted = self.rendered(*plans)
        change = diff(call(self.mode, self.mode.read), wanted)
        call(self.mode, self.mode.apply, change)
        assert not diff(call(self.mode, self.mode.read), wanted)
        return len(change)

    def rendered(self, *plans: ServicePlan) -> Ruleset:
        return render(NodePlan(SETTINGS, {each.key: each for each in plans}), self.mode)

    def apply(self, *plans: ServicePlan) -> None:
        """Carry out what leads to these plans, and do not look afterwards."""
        change = diff(call(self.mode, self.mode.read), self.rendered(*plans))
        call(self.mode, self.mode.apply, change)

    def servers(self) -> dict[ServerKey, Server]:
        ruleset = call(self.mode, self.mode.read)
        return {k: v for k, v in ruleset.items() if isinstance(k, ServerKey)}

    def sh(self, *argv: str) -> str:
        full = ["ip", "netns", "exec", self.name, *argv]
        return subprocess.run(full, check=True, capture_output=True, text=True).stdout


def mode_in(name: str, options: IpvsOptions | None = None) -> IpvsMode:
    return mode_behind(Inside(f"/run/netns/{name}"), options)


@pytest.fixture
def node() -> Iterator[Node]:
    name = f"sm-ipvs-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)  # or: no local table
    node = Node(name, mode_in(name))
    yield node
    asyncio.run(release(node.mode))
    subprocess.run(["ip", "netns", "del", name], check=True)


def of(*addresses: str, protocol: Protocol = Protocol.TCP) -> ServicePlan:
    return plan(key("ns/a:p", protocol), cluster_ip("10.96.0.1"), cluster=endpoints(*addresses))


def table(node: Node) -> str:
    return node.sh("cat", "/proc/net/ip_vs")


def bring(plan: NodePlan, mode: IpvsMode) -> None:
    """Bring the kernel to a plan; nothing is left to do afterwards."""
    call(mode, mode.apply, diff(call(mode, mode.read), render(plan, mode)))
    assert not diff(call(mode, mode.read), render(plan, mode))
