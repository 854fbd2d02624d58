"""`steersman trace`: real packets, in each mode, beside what the plan predicts."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from steersman.cli.output import print_answer
from steersman.host.netns import enter
from steersman.model.inputs import Snapshot
from steersman.model.names import Protocol
from steersman.model.plan import Frontend, FrontendKind, NodePlan, NodeSettings, ServicePlan
from steersman.model.ruleset import diff
from steersman.model.world import Origin, World
from steersman.modes.base import Mode
from steersman.operate.answer import QuestionError
from steersman.operate.trace import TraceAnswer, TraceQuestion, trace_packet
from tests.support.builders import nftables_plans as make
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.switches import CLIENT, ENDS, NODE, OUTSIDE, mode_of
from tests.support.modes.registry import render

VIP = "10.96.0.10"
pytestmark = pytest.mark.kernel
T = TypeVar("T")


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
    Frontend(FrontendKind.NODE_PORT, "", 30080, *make.MASQUERADED),
)


SERVICE = make.plan([0, 2], frontends=FRONTENDS)


def world_of(mode: Mode, service: ServicePlan = SERVICE) -> World:
    settings = NodeSettings(
        node_name="here",
        ipv4=replace(make.SETTINGS.ipv4, local_addresses=(NODE,)),
        traits=mode.traits,
    )
    plan = NodePlan(settings, {service.key: service})
    return World(Origin("manifests", "a test"), Snapshot(), plan, mode.name)


async def program(mode: Mode, world: World) -> None:
    assert (await mode.probe()).usable
    await mode.apply(diff(await mode.read(), render(world.plan, mode)))


def printed(answer: TraceAnswer, output: str = "text") -> str:
    out = io.StringIO()
    print_answer(answer, output, out)
    return out.getvalue()


RULES = [("iptables", "nft"), ("iptables", "legacy"), ("nftables", "nft")]


@pytest.fixture
def lab() -> Iterator[Lab]:
    pods = tuple(Pod(address) for address in (*ENDS, CLIENT))
    with Lab(Layout({"eth0": (f"{NODE}/24",)}, (OUTSIDE,), pods)) as lab:
        for address in ENDS:
            for protocol in ("TCP", "UDP"):
                lab.serve(address, 8080, protocol)
        yield lab


def mode_in(lab: Lab, name: str, variant: str, service: ServicePlan = SERVICE) -> Traced:
    """The lab's node in a mode, with one Service."""
    mode = mode_of(lab, name, variant)
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

        async def run() -> TraceAnswer:
            tracer = self.mode.tracer()
            assert tracer is not None
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


every_mode = pytest.mark.parametrize(("name", "variant"), RULES)


@every_mode
@pytest.mark.parametrize("source", ["", CLIENT, ENDS[0]])
@pytest.mark.parametrize("to", [(VIP, 80), (NODE, 30080)])
def test_a_packet_goes_as_predicted(
    lab: Lab, name: str, variant: str, source: str, to: tuple[str, int]
) -> None:
    node = mode_in(lab, name, variant)
    answer = node.trace(*to, source=source)
    assert answer.differences == ()
    assert answer.exit_code == 0
    assert answer.service == "shop/web:http"
    assert answer.reply is not None
    assert answer.reply.text == "SYN-ACK"
    assert answer.endpoint in ("10.244.0.0:8080", "10.244.0.2:8080")
    assert answer.connection is not None
    masqueraded = to[1] == 30080 or source == "" or answer.endpoint.startswith(f"{source}:")
    assert answer.connection.seen_source == (NODE if masqueraded else source)
    translating = [shown for shown in answer.steps if "the destination is now" in shown.step.note]
    assert [shown.step.note for shown in translating] == [
        f"the destination is now {answer.endpoint}"
    ]
    assert all(shown.predicted == "to one of 2 endpoints" for shown in translating)
    assert all(shown.matches for shown in answer.steps)
    assert {shown.step.owner for shown in translating} == {"steersman"}


@every_mode
@pytest.mark.parametrize("tool", ["nft", "iptables-nft", "iptables-legacy"])
@pytest.mark.parametrize("verdict", ["drop", "reject"])
def test_a_rule_of_another_program_is_named(
    lab: Lab, name: str, variant: str, tool: str, verdict: str
) -> None:
    node = mode_in(lab, name, variant)
    foreign(lab, tool, "forward", verdict)
    answer = node.trace(source=CLIENT, timeout=0.3)
    assert answer.exit_code == 1
    last = [shown for shown in answer.steps if shown.step.direction == "original"][-1]
    assert (last.step.verdict, last.step.hook, last.matches) == (verdict, "forward", False)
    done = {"drop": "dropped", "reject": "rejected"}[verdict]
    who = "another program" if tool == "nft" else "Docker"
    where = "forward of table inet firewall" if tool == "nft" else "DOCKER-USER of table ip filter"
    where += " (legacy)" if tool == "iptables-legacy" else ""
    handle = f"(forward, handle {last.step.handle})"
    assert answer.first_difference.startswith(
        f"{done} by a rule of {who} in chain {where} {handle}"
    )
    assert last.step.handle > 0
    assert answer.reply is not None
    assert answer.reply.kind == {"drop": "none", "reject": "icmp"}[verdict]


@every_mode
def test_the_policy_of_a_chain_is_named(lab: Lab, name: str, variant: str) -> None:
    node = mode_in(lab, name, variant)
    tool = f"iptables-{variant}"
    lab.run(tool, "-P", "FORWARD", "DROP")
    if name == "iptables":  # our KUBE-FORWARD lets it pass, unless its rules come too late
        lab.run(tool, "-F", "FORWARD")
    answer = node.trace(source=CLIENT, timeout=0.3)
    assert answer.first_difference.startswith("dropped by the policy of chain FORWARD of table ip")


@every_mode
def test_a_dropped_answer_is_found(lab: Lab, name: str, variant: str) -> None:
    node = mode_in(lab, name, variant)
    rules = "table inet firewall { chain f { type filter hook forward priority -10; "
    lab.run("nft", "-f", "-", stdin=rules + "tcp sport 8080 drop; }; }")
    answer = node.trace(source=CLIENT, timeout=0.3)
    assert answer.first_difference.startswith("the answer was dropped by a rule of another program")
    assert answer.endpoint


@every_mode
@pytest.mark.parametrize(
    ("actions", "verdict", "kind"),
    [(make.REJECTED, "reject", "icmp"), (make.DROPPED, "drop", "none")],
)
def test_refusals_of_the_plan_are_as_predicted(
    lab: Lab, name: str, variant: str, actions: Any, verdict: str, kind: str
) -> None:
    service = make.plan([], frontends=(make.cluster_ip(actions),))
    answer = mode_in(lab, name, variant, service).trace(source=CLIENT, timeout=0.3)
    assert answer.differences == ()
    assert answer.exit_code == 1  # the client gets no connection all the same
    last = [shown for shown in answer.steps if shown.step.direction == "original"][-1]
    assert (last.step.verdict, last.step.owner) == (verdict, "steersman")
    assert last.matches
    assert answer.reply is not None
    assert answer.reply.kind == kind


@every_mode
def test_rules_that_are_not_those_of_the_plan_are_a_difference(
    lab: Lab, name: str, variant: str
) -> None:
    node = mode_in(lab, name, variant)
    moved = make.plan([4], frontends=FRONTENDS)
    node.world = world_of(node.mode, moved)
    assert "instead of to 10.244.0.4:8080; the rules in the kernel" in node.trace().first_difference
    node.world = world_of(node.mode, make.plan([], frontends=(make.cluster_ip(make.REJECTED),)))
    assert node.trace().first_difference.startswith("no rule stopped the packet: it went to 10.244")
    node.world = world_of(node.mode)
    if name == "nftables":
        lab.run("nft", "delete", "table", "ip", "kube-proxy")
    else:
        lab.run(f"iptables-{variant}", "-t", "nat", "-F")
    unserved = node.trace(timeout=0.3)
    assert unserved.first_difference.startswith("the packet was not translated instead of to")


@every_mode
def test_an_endpoint_that_does_not_listen_is_named(lab: Lab, name: str, variant: str) -> None:
    node = mode_in(lab, name, variant)
    lab.silence()
    answer = node.trace(source=CLIENT)
    assert answer.first_difference == f"the endpoint {answer.endpoint} refuses the connection: RST"


@every_mode
@pytest.mark.parametrize("protocol", ["UDP", "SCTP"])
def test_other_protocols(lab: Lab, name: str, variant: str, protocol: str) -> None:
    kind = Protocol(protocol)
    service = make.plan([0, 2], of=make.key(protocol=kind))
    for address in ENDS:
        lab.serve(address, 8080, protocol)
    answer = mode_in(lab, name, variant, service).trace(source=CLIENT, protocol=kind)
    assert answer.differences == ()
    assert answer.reply is not None
    assert answer.reply.answered
    assert answer.endpoint in ("10.244.0.0:8080", "10.244.0.2:8080")


@every_mode
def test_real_traffic_is_waited_for(lab: Lab, name: str, variant: str) -> None:
    node = mode_in(lab, name, variant)
    done = threading.Event()

    def clients() -> None:
        while not done.is_set():
            lab.probe(OUTSIDE, NODE, 30080)

    caller = threading.Thread(target=clients)
    caller.start()
    try:
        answer = node.trace(NODE, 30080, wait=True, timeout=30)
    finally:
        done.set()
        caller.join()
    assert answer.flow.startswith(f"{OUTSIDE}:")
    assert answer.reply is None
    assert answer.differences == ()
    assert answer.connection is not None
    assert answer.connection.seen_source == NODE


def test_a_packet_that_never_comes_is_an_error(lab: Lab) -> None:
    node = mode_in(lab, "nftables", "nft")
    with pytest.raises(QuestionError, match=r"any to 10\.96\.0\.10:80/TCP came within 0\.1 s"):
        node.trace(wait=True, timeout=0.1)
    with pytest.raises(QuestionError, match="no network namespace of this machine has"):
        node.trace(source="10.244.99.99", netns=None)
