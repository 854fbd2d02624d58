"""A node and its Services for tests of the ebpf mode; run as a program, it applies them and dies.

python -m tests.support.builders.ebpf_node_plan PINS CGROUP
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from steersman.host.exec import SubprocessExec
from steersman.model.names import Family, PlanKey, Protocol, ServicePortName
from steersman.model.plan import (
    Action,
    Endpoint,
    FamilySettings,
    Frontend,
    FrontendKind,
    LocalDetector,
    NodePlan,
    NodeSettings,
    ServicePlan,
    Verdict,
)
from steersman.model.ruleset import diff
from steersman.modes.base import Mode
from steersman.modes.ebpf.datapath import EbpfOptions
from steersman.modes.ebpf.mode import EbpfMode
from tests.support.lab.cluster import Layout, Pod

NODE, NODE6, CLIENT = "192.168.0.2", "2001:db8::2", "203.0.113.9"
POD, OTHER, REMOTE, POD6 = "10.244.1.5", "10.244.1.6", "10.244.2.5", "fd00:10:244:1::5"
LOOKER = "10.244.1.100"
VIP, VIP6, STICKY, NODE_PORT = "10.96.0.10", "fd00:10:96::10", "10.96.0.11", 30080
LAYOUT = Layout(
    {"eth0": (f"{NODE}/24", f"{NODE6}/64")},
    (CLIENT,),
    (Pod(POD), Pod(OTHER), Pod(REMOTE, local=False), Pod(POD6), Pod(LOOKER)),
)
ENDPOINTS = tuple(Endpoint(ip, 8080, ip != REMOTE) for ip in (POD, OTHER, REMOTE))
SETTINGS = NodeSettings(
    families=(Family.IPV4, Family.IPV6),
    ipv4=FamilySettings(LocalDetector("10.244.0.0/16"), NODE, (NODE,), localhost_node_ports=True),
    ipv6=FamilySettings(LocalDetector("fd00:10:244::/48"), NODE6, (NODE6,)),
)
PLAIN, HIDDEN = Action(Verdict.FORWARD), Action(Verdict.FORWARD, masquerade=True)


def service(
    name: str, address: str, protocol: Protocol, ends: tuple[Endpoint, ...], seconds: int = 0
) -> ServicePlan:
    """A ServicePort with a clusterIP, and a node port where it is `web`."""
    family = Family.IPV6 if ":" in address else Family.IPV4
    frontends = [Frontend(FrontendKind.CLUSTER_IP, address, 80, PLAIN, HIDDEN, HIDDEN)]
    if name == "web":
        frontends.append(Frontend(FrontendKind.NODE_PORT, "", NODE_PORT, HIDDEN, HIDDEN, HIDDEN))
    key = PlanKey(ServicePortName("shop", name, "", protocol), family)
    return ServicePlan(key, tuple(frontends), ends, reachable=ends, affinity_seconds=seconds)


def node_plan(ends: tuple[Endpoint, ...] = ENDPOINTS, seconds: int = 600) -> NodePlan:
    """Everything, with these endpoints of IPv4."""
    services = [
        each
        for protocol in (Protocol.TCP, Protocol.UDP)
        for each in (
            service("web", VIP, protocol, ends),
            service("web", VIP6, protocol, (Endpoint(POD6, 8080, True),)),
            service("sticky", STICKY, protocol, ends, seconds),
        )
    ]
    return NodePlan(SETTINGS, {each.key: each for each in services})


def ruleset(plan: NodePlan, mode: Mode) -> dict[bytes, bytes]:
    """What a mode makes of a plan."""
    out = dict(mode.render_node(plan.settings))
    for each in plan.services.values():
        out.update(mode.render_service(each, plan.settings))
    return out


async def bring(mode: EbpfMode, plan: NodePlan | None) -> None:
    """Bring the kernel to a plan, or to nothing."""
    want = ruleset(plan, mode) if plan else {}
    await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), want))


if __name__ == "__main__":
    options = EbpfOptions(Path(sys.argv[1]), Path(sys.argv[2]))
    asyncio.run(bring(EbpfMode(SubprocessExec(), options), node_plan()))
    os.kill(os.getpid(), signal.SIGKILL)
