"""A lab whose node serves one Service, and the traces of packets through it."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from steersman.cli.output import print_answer
from steersman.host.exec import SubprocessExec
from steersman.host.netns import enter
from steersman.model.inputs import Snapshot
from steersman.model.plan import Frontend, FrontendKind, NodePlan, NodeSettings, ServicePlan
from steersman.model.ruleset import diff
from steersman.model.world import Origin, World
from steersman.modes.base import Mode
from steersman.modes.tracer import Tracer
from steersman.modes.userspace.relay_tracer import RelayTracer
from steersman.operate.trace import TraceAnswer, trace_packet
from steersman.operate.trace_question import TraceQuestion
from tests.support.builders import nftables_plans as make
from tests.support.builders.plans import MASQUERADED
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.switches import CLIENT, ENDS, NODE, OUTSIDE
from tests.support.modes.registry import render

VIP = "10.96.0.10"
PATIENCE = 20.0
"""Seconds for an answer that comes, also on a machine under load."""
T = TypeVar("T")


def first_difference(answer: TraceAnswer) -> str:
    """Return the text of the first difference; "" if the kernel did what was predicted."""
    return answer.differences[0].text if answer.differences else ""


def inside(lab: Lab, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the node's network namespace."""
    results: list[T] = []
    failures: list[BaseException] = []

    def thread() -> None:
        try:
            enter(Path(lab.node.path))
            results.append(asyncio.run(work))
        except BaseException as failure:
            failures.append(failure)

    runner = threading.Thread(target=thread)
    runner.start()
    runner.join()
    if failures:
        raise failures[0]
    return results[0]


FRONTENDS = (
    make.cluster_ip(),
    Frontend(FrontendKind.NODE_PORT, "", 30080, *MASQUERADED),
)


SERVICE = make.port([0, 2], frontends=FRONTENDS)


def world_of(mode: Mode, service: ServicePlan = SERVICE) -> World:
    settings = NodeSettings(
        node_name="here",
        ipv4=replace(make.SETTINGS.ipv4, local_addresses=(NODE,)),
        traits=mode.traits,
    )
    plan = NodePlan(settings, {service.key: service})
    return World(Origin("manifests", "a test"), Snapshot(), plan, mode.name)


async def program(mode: Mode, world: World) -> None:
    assert (await mode.worker.do(mode.probe)).usable
    await mode.worker.do(
        mode.apply, diff(await mode.worker.do(mode.read), render(world.plan, mode))
    )


def printed(answer: TraceAnswer, output: str = "text") -> str:
    out = io.StringIO()
    print_answer(answer, output, out)
    return out.getvalue()


@contextmanager
def service_lab() -> Iterator[Lab]:
    """A lab with two endpoints, which answer TCP and UDP, and a client."""
    pods = tuple(Pod(address) for address in (*ENDS, CLIENT))
    with Lab(Layout({"eth0": (f"{NODE}/24",)}, (OUTSIDE,), pods)) as lab:
        for address in ENDS:
            for protocol in ("TCP", "UDP"):
                lab.serve(address, 8080, protocol)
        yield lab


def serving(lab: Lab, mode: Mode, service: ServicePlan = SERVICE) -> Traced:
    """The lab's node in a mode, with one Service."""
    world = world_of(mode, service)
    asyncio.run(program(mode, world))
    return Traced(lab, mode, world)


class Traced:
    """A node whose packets are traced."""

    def __init__(self, lab: Lab, mode: Mode, world: World) -> None:
        self.lab, self.mode, self.world = lab, mode, world

    def trace(self, address: str = VIP, port: int = 80, **more: Any) -> TraceAnswer:
        # Labs of other tests may have the same addresses: name the namespace.
        if more.get("source") and "wait" not in more:
            more.setdefault("netns", Path(self.lab.netns(more["source"]).path))
        more.setdefault("timeout", PATIENCE)

        def tracer() -> Tracer:
            # The userspace mode of a lab runs in a thread of this process.
            return self.mode.tracer() if self.mode.tracer else RelayTracer(SubprocessExec())

        async def run() -> TraceAnswer:
            return await trace_packet(self.world, TraceQuestion(address, port, **more), tracer)

        answer = inside(self.lab, run())
        print(printed(answer))
        assert "steersman-trace" not in self.lab.run("nft", "list", "tables")
        return answer


def foreign(lab: Lab, tool: str, chain: str, verdict: str) -> None:
    """A rule of another program, before ours."""
    if tool == "nft":
        rules = f"table inet firewall {{ chain {chain} {{ type filter hook {chain} priority -10; "
        rules += f"tcp dport 8080 {verdict}; }}; }}"
        lab.run("nft", "-f", "-", stdin=rules)
    else:
        lab.run(tool, "-N", "DOCKER-USER")
        lab.run(tool, "-I", chain.upper(), "-j", "DOCKER-USER")
        lab.run(tool, *["-A", "DOCKER-USER", "-p", "tcp", "--dport", "8080", "-j"], verdict.upper())
