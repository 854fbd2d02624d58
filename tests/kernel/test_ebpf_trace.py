"""A packet followed in the ebpf mode, and what a tracer leaves behind: nothing."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from steersman.cli.output import print_answer
from steersman.host.exec import SubprocessExec
from steersman.host.netns import enter
from steersman.model.errors import BusyError
from steersman.model.inputs import Snapshot
from steersman.model.names import Protocol
from steersman.model.plan import (
    Action,
    Frontend,
    FrontendKind,
    NodePlan,
    ServicePlan,
    Verdict,
)
from steersman.model.tracing import STEERSMAN, TraceStep, TrackedConnection, WatchedFlow
from steersman.model.world import Origin, World
from steersman.modes.base import release
from steersman.modes.ebpf import loader, trace, trace_events
from steersman.modes.ebpf.bpf import Object
from steersman.modes.ebpf.datapath import EbpfOptions
from steersman.modes.ebpf.mode import EbpfMode
from steersman.modes.ebpf.trace_story import KERNEL
from steersman.operate.trace import TraceAnswer, make_tracer, trace_packet
from steersman.operate.trace_question import TraceQuestion
from tests.support.builders.ebpf_node_plan import (
    CLIENT,
    ENDPOINTS,
    HIDDEN,
    LOOKER,
    NODE,
    NODE_PORT,
    PLAIN,
    POD,
    POD6,
    STICKY,
    VIP,
    VIP6,
    node_plan,
)
from tests.support.builders.plans import plan
from tests.support.lab import trace_page
from tests.support.lab.ebpf import program_exists
from tests.support.lab.ebpf_node import MARKS, Node, programmed, serving
from tests.support.lab.traced import first_difference
from tests.support.waiting import until

pytestmark = MARKS
ROOT = Path(__file__).parents[2]
WAIT = 60.0
SINGLE = "10.96.0.22"
QUIET = 0.3
"""Seconds for an answer that does not come."""
LIMITED, EMPTY, HERE_ONLY, CLOSED = "198.51.100.7", "10.96.0.20", "198.51.100.8", "10.96.0.21"
ENDS = {str(end) for end in ENDPOINTS}
DROP, REJECT = Action(Verdict.DROP), Action(Verdict.REJECT)


def with_more() -> NodePlan:
    """The usual plan, and Services with source ranges, without endpoints, or with a closed port."""
    single = ENDPOINTS[:1]
    closed = (replace(ENDPOINTS[0], port=9),)
    more = [
        one("limited", LIMITED, HIDDEN, HIDDEN, HIDDEN, ranges=("10.0.0.0/8",)),
        one("empty", EMPTY, REJECT, REJECT, REJECT),
        one("here", HERE_ONLY, PLAIN, HIDDEN, DROP),
        replace(one("single", SINGLE, PLAIN, HIDDEN, HIDDEN), cluster=single, reachable=single),
        replace(one("closed", CLOSED, PLAIN, HIDDEN, HIDDEN), cluster=closed, reachable=closed),
    ]
    known = node_plan()
    return NodePlan(known.settings, {**known.services, **{each.key: each for each in more}})


def one(
    name: str, address: str, pod: Action, node: Action, other: Action, ranges: tuple[str, ...] = ()
) -> ServicePlan:
    kind = FrontendKind.CLUSTER_IP if address.startswith("10.") else FrontendKind.LOAD_BALANCER_IP
    frontend = Frontend(kind, address, 80, pod, node, other, ranges)
    return plan(f"shop/{name}", frontend, cluster=() if name == "empty" else ENDPOINTS)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with serving("TCP", "UDP") as lab, programmed(lab, with_more()) as made:
        yield made


def ask(sock: socket.socket, address: str, port: int) -> str:
    """Connect and read the endpoint's name; or return the error's."""
    try:
        sock.connect((address, port))
        if sock.type == socket.SOCK_DGRAM:
            sock.send(b"?")
        return sock.recv(100).decode().split()[0]
    except TimeoutError:
        return "nothing"
    except OSError as error:
        return errno.errorcode[error.errno or 0]


class Told:
    """What was told of one connection."""

    def __init__(
        self,
        answer: str,
        flow: WatchedFlow,
        steps: tuple[TraceStep, ...],
        connection: TrackedConnection | None,
    ) -> None:
        self.answer, self.flow, self.steps, self.connection = answer, flow, steps, connection

    def said(self, direction: str = "original") -> list[str]:
        """What the mode's programs did, and who dropped the packet."""
        return [
            f"{step.hook} {step.verdict}: {step.note}".removesuffix(": ")
            for step in self.steps
            if step.direction == direction and (step.owner == STEERSMAN or step.ends)
        ]

    @property
    def chosen(self) -> list[str]:
        return [step.endpoint for step in self.steps if step.endpoint]


async def follow(node: Node, sock: socket.socket, address: str, port: int = 80) -> Told:
    """Open a connection while its destination is traced."""
    protocol = Protocol.TCP if sock.type == socket.SOCK_STREAM else Protocol.UDP
    tracer = node.modes[-1].tracer()
    with sock:
        try:
            await tracer.start(WatchedFlow(protocol, address, port))
            answer = await asyncio.to_thread(ask, sock, address, port)
            async with asyncio.timeout(WAIT):
                flow = await tracer.first_packet()
            steps, connection = await tracer.steps(), await tracer.connection(flow)
            assert await tracer.count_lost() == 0
            return Told(answer, flow, steps, connection)
        finally:
            await tracer.aclose()


def outside(node: Node, address: str) -> socket.socket:
    """A socket that no program of sockets sees."""
    sock = node.lab.netns(CLIENT).socket(address, "TCP")
    sock.settimeout(WAIT)
    return sock


def impatient(sock: socket.socket) -> socket.socket:
    sock.settimeout(QUIET)
    return sock


# What happens


@pytest.mark.parametrize("kind", ["TCP", "UDP"])
async def test_a_socket_is_balanced(node: Node, kind: str) -> None:
    told = await follow(node, node.socket(VIP, kind), VIP)
    first = told.steps[0]
    assert (first.hook, first.chain) == ("connect", "sm_connect4")
    assert first.rule.startswith(f"frontend {VIP}:80/{kind}: shop/web {kind} IPv4, pods to all")
    assert first.note == f"the destination is now {told.answer}, chosen at random"
    assert told.chosen == [told.answer]
    # Then its packets pass both programs of both devices as they are.
    assert told.said()[1:] == ["ingress continue", "egress continue"]
    assert told.connection
    assert not told.connection.masqueraded
    assert told.connection.state == "replied"
    assert told.flow.source == LOOKER


async def test_a_datagram_of_a_socket_that_is_not_connected(node: Node) -> None:
    tracer = node.modes[-1].tracer()
    await tracer.start(WatchedFlow(Protocol.UDP, VIP, 80))
    with node.socket(VIP, "UDP", at=NODE) as sock:
        sock.sendto(b"?", (VIP, 80))
        name = (await asyncio.to_thread(sock.recv, 100)).decode().split()[0]
    async with asyncio.timeout(WAIT):
        await tracer.first_packet()
    steps = await tracer.steps()
    await tracer.aclose()
    assert (steps[0].hook, steps[0].chain, steps[0].endpoint) == ("sendmsg", "sm_sendmsg4", name)


async def test_a_node_port_from_outside_is_masqueraded(node: Node) -> None:
    told = await follow(node, outside(node, NODE), NODE, NODE_PORT)
    source = f"{NODE}:{told.connection.seen_port}" if told.connection else ""
    assert told.said() == [
        f"ingress continue: the destination is now {told.answer}, chosen at random",
        f"egress continue: the source is now {source}",
    ]
    client = f"{CLIENT}:{told.flow.source_port}"
    assert told.said("reply") == [
        f"ingress continue: the destination is now {client}",
        f"egress continue: the source is now {NODE}:{NODE_PORT}",
    ]
    assert told.chosen == [told.answer]
    assert told.connection
    assert told.connection.masqueraded


async def test_a_process_outside_the_cgroup_is_balanced_by_its_packets(node: Node) -> None:
    sock = node.lab.netns(NODE).socket(VIP, "TCP")
    sock.settimeout(WAIT)
    told = await follow(node, sock, VIP)
    assert told.said() == [
        f"egress continue: the destination is now {told.answer}, chosen at random"
    ]
    assert told.steps[0].rule.startswith(f"frontend {VIP}:80/TCP: shop/web")


async def test_ipv6(node: Node) -> None:
    sock = node.socket(VIP6, at=POD6)
    sock.bind((POD6, 0))
    told = await follow(node, sock, VIP6)
    assert told.chosen == [f"[{POD6}]:8080"]
    assert told.connection
    assert told.connection.masqueraded  # a pod that reaches itself


async def test_affinity_is_told_apart_from_chance(node: Node) -> None:
    first = await follow(node, node.socket(STICKY), STICKY)
    again = await follow(node, node.socket(STICKY), STICKY)
    assert first.steps[0].note.endswith("chosen at random; the client keeps it for 600 s")
    assert again.steps[0].note.endswith(" s ago (affinity, 600 s)")
    assert first.chosen == again.chosen


async def test_a_call_is_refused(node: Node) -> None:
    told = await follow(node, node.socket(EMPTY), EMPTY)
    assert told.answer == "ECONNREFUSED"
    assert told.said() == [
        "connect reject: the Service has no endpoint for this client; "
        "connect() fails: Connection refused"
    ]
    assert told.connection is None


async def test_a_port_that_the_service_does_not_have(node: Node) -> None:
    told = await follow(node, node.socket(VIP, at=NODE), VIP, 81)
    assert told.answer == "ECONNREFUSED"
    assert told.said() == [
        "connect reject: its Service has no port 81; connect() fails: Connection refused"
    ]


async def test_a_packet_is_answered_by_an_error(node: Node) -> None:
    told = await follow(node, outside(node, EMPTY), EMPTY)
    assert told.answer == "ECONNREFUSED"
    assert told.said() == [
        "ingress reject: the Service has no endpoint for this client; "
        "answered by ICMP port unreachable"
    ]
    assert told.connection is None


async def test_a_packet_of_this_node_is_answered_by_an_error(node: Node) -> None:
    sock = node.lab.netns(NODE).socket(EMPTY, "TCP")
    sock.settimeout(WAIT)
    told = await follow(node, sock, EMPTY)
    assert told.answer == "ECONNREFUSED"
    assert told.said() == [
        "egress reject: the Service has no endpoint for this client; "
        "answered by ICMP port unreachable"
    ]


async def test_source_ranges_drop(node: Node) -> None:
    told = await follow(node, impatient(outside(node, LIMITED)), LIMITED)
    assert told.answer == "nothing"
    why = "the client is in none of the Service's source ranges"
    assert told.said() == [f"ingress drop: {why}"]
    assert told.steps[0].chain == "sm_ingress"
    assert told.steps[0].rule.endswith(", source ranges")


async def test_source_ranges_admit_a_pod_by_its_packets(node: Node) -> None:
    told = await follow(node, node.socket(LIMITED), LIMITED)
    assert told.answer in ENDS
    assert told.said()[:2] == [
        "connect continue: left to the programs of devices: its source has to change",
        f"ingress continue: the destination is now {told.answer}, chosen at random",
    ]
    assert told.connection
    assert told.connection.masqueraded


async def test_no_endpoint_for_clients_outside(node: Node) -> None:
    told = await follow(node, impatient(outside(node, HERE_ONLY)), HERE_ONLY)
    assert told.said() == ["ingress drop: the Service has no endpoint for this client"]


async def test_nobody_listens_at_the_endpoint(node: Node) -> None:
    told = await follow(node, node.socket(CLOSED), CLOSED)
    assert told.answer == "ECONNREFUSED"
    (closed,) = (step for step in told.steps if step.verdict == "no socket")
    assert (closed.owner, closed.note) == (KERNEL, "nothing listens there")
    assert any(step.note == "a reset" for step in told.steps)


FIREWALL = "table ip firewall { chain f { type filter hook forward priority 0; %s; }; }"


@pytest.fixture
def firewall(node: Node) -> Iterator[Callable[[str], None]]:
    """Adds a rule of another program to the node's forward chain."""

    def add(rule: str) -> None:
        node.lab.run("nft", "-f", "-", stdin=FIREWALL % rule)

    yield add
    node.lab.run("nft", "delete", "table", "ip", "firewall")


async def test_a_firewall_drops_the_packet(node: Node, firewall: Callable[[str], None]) -> None:
    firewall(f"ip saddr {LOOKER} drop")
    told = await follow(node, impatient(node.socket(VIP)), VIP)
    assert told.said()[-1] == (
        "kernel drop: a rule of netfilter drops it: a firewall, or a NetworkPolicy"
    )
    last = next(step for step in told.steps if step.ends)
    assert (last.owner, last.rule) == ("netfilter", "NETFILTER_DROP")


async def test_a_firewall_drops_the_answer(node: Node, firewall: Callable[[str], None]) -> None:
    firewall(f"ip daddr {LOOKER} drop")
    told = await follow(node, impatient(node.socket(VIP)), VIP)
    assert [step.direction for step in told.steps if step.ends] == ["reply"]


# The whole command


def ask_from(node: Node, source: str, to: tuple[str, int], **more: Any) -> TraceAnswer:
    """Send a probe as `steersman trace` does, from the node or a pod; print what people see."""
    mode, answers = EbpfMode(SubprocessExec(), node.options), list[TraceAnswer]()
    known = with_more()
    known = NodePlan(replace(known.settings, traits=mode.traits), known.services)
    world = World(Origin("manifests", "a test"), Snapshot(), known, mode.name)
    netns = Path(node.lab.netns(source).path) if source else None
    question = TraceQuestion(*to, source=source, netns=netns, **more)

    def probe() -> None:
        enter(Path(node.lab.node.path))
        (node.cgroup / "cgroup.threads").write_text(str(threading.get_native_id()))
        answers.append(
            asyncio.run(trace_packet(world, question, partial(make_tracer, world, mode)))
        )
        asyncio.run(release(mode))

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join()
    print_answer(answers[0], "text", sys.stdout)
    assert "steersman-trace" not in node.lab.run("nft", "list", "tables")
    return answers[0]


@pytest.mark.parametrize("source", ["", LOOKER, POD])
@pytest.mark.parametrize("to", [(VIP, 80), (NODE, NODE_PORT)])
@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP])
def test_a_packet_goes_as_predicted(
    node: Node, source: str, to: tuple[str, int], protocol: Protocol
) -> None:
    answer = ask_from(node, source, to, protocol=protocol)
    assert answer.differences == ()
    assert answer.exit_code == 0
    assert answer.reply
    assert answer.reply.answered
    assert answer.endpoint in ENDS
    chosen = [shown for shown in answer.steps if shown.step.endpoint]
    assert [shown.predicted for shown in chosen] == ["to one of 3 endpoints"]
    assert all(shown.matches for shown in answer.steps)


@pytest.mark.parametrize("address", [EMPTY, CLOSED])
def test_refusals(node: Node, address: str) -> None:
    answer = ask_from(node, LOOKER, (address, 80))
    assert answer.exit_code == 1
    closed = f"the endpoint {POD}:9 refuses the connection: RST"
    assert first_difference(answer) == ("" if address == EMPTY else closed)


@pytest.mark.parametrize("tool", ["nft", "iptables-nft", "iptables-legacy"])
def test_the_rule_of_another_program_is_named(node: Node, tool: str) -> None:
    rule = ("-s", LOOKER, "-j", "DROP")
    if tool == "nft":
        node.lab.run("nft", "-f", "-", stdin=FIREWALL % f"ip saddr {LOOKER} drop")
    else:
        node.lab.run(tool, "-A", "FORWARD", *rule)
    try:
        answer = ask_from(node, LOOKER, (VIP, 80), timeout=QUIET)
    finally:
        if tool == "nft":
            node.lab.run("nft", "delete", "table", "ip", "firewall")
        else:
            node.lab.run(tool, "-D", "FORWARD", *rule)
    (last,) = (shown.step for shown in answer.steps if shown.step.ends)
    assert (last.hook, last.verdict) == ("forward", "drop")
    assert LOOKER in last.rule
    chain = "f of table ip firewall" if tool == "nft" else "FORWARD of table ip filter"
    assert first_difference(answer).startswith("dropped by a rule of another program in chain")
    assert chain in first_difference(answer)
    assert f"handle {last.handle}" in first_difference(answer)
    hooks = [shown.step.hook for shown in answer.steps]
    assert hooks.index("connect") < hooks.index("ingress") < hooks.index("forward")


def test_the_page_shows_what_is_printed(update: bool) -> None:
    # A node of its own: tables of iptables, once they are there, are steps of every packet.
    with serving("TCP") as lab, programmed(lab, with_more()) as node:
        trace_page.check("A balanced socket", ask_from(node, LOOKER, (SINGLE, 80)), update)


# Which packets


async def test_only_the_wanted_client_is_followed(node: Node) -> None:
    tracer = node.modes[-1].tracer()
    await tracer.start(WatchedFlow(Protocol.TCP, NODE, NODE_PORT, LOOKER))
    with outside(node, NODE) as other, node.socket(NODE) as wanted:
        assert ask(other, NODE, NODE_PORT) in ENDS
        assert ask(wanted, NODE, NODE_PORT) in ENDS
        async with asyncio.timeout(WAIT):
            flow = await tracer.first_packet()
        assert (flow.source, flow.source_port) == wanted.getsockname()[:2]
    steps = await tracer.steps()
    await tracer.aclose()
    assert steps[0].hook == "connect"


# Leftovers


def programs(pins: Path) -> dict[str, int]:
    """The mode's attached programs: name of the link, id of the program."""
    out = {}
    for path in sorted((pins / "links").iterdir()):
        link = Object.pinned(path)
        out[path.name] = int.from_bytes(link.info(12)[8:], sys.byteorder)
        link.close()
    return out


async def test_the_programs_of_the_mode_stay_as_they_are(node: Node) -> None:
    before = programs(node.pins)
    tracer = node.modes[-1].tracer()
    await tracer.start(WatchedFlow(Protocol.TCP, VIP, 80))
    during = programs(node.pins)
    await tracer.aclose()
    assert before == during == programs(node.pins)


async def test_nothing_is_left_after_kill(node: Node) -> None:
    argv = (sys.executable, "-m", "tests.kernel.test_ebpf_trace", node.pins, node.cgroup)
    child = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    assert child.stdout
    ids = [int(word) for word in (await child.stdout.readline()).split()]
    assert len(ids) == 7  # four of sockets, three of the kernel
    assert all(map(program_exists, ids))
    pinned = sorted(node.pins.rglob("*"))
    child.send_signal(signal.SIGKILL)
    await child.communicate()
    await until(lambda: not any(map(program_exists, ids)))  # after a grace period
    assert sorted(node.pins.rglob("*")) == pinned
    with node.socket(VIP) as sock:
        assert ask(sock, VIP, 80) in ENDS


# What cannot be traced


async def test_the_mode_does_not_run(tmp_path: Path) -> None:
    mode = EbpfMode(SubprocessExec(), EbpfOptions(tmp_path / "nothing"))
    tracer = mode.tracer()
    with pytest.raises(BusyError, match="programs are not attached: "):
        await tracer.start(WatchedFlow(Protocol.TCP, VIP, 80))
    await tracer.aclose()


async def test_the_programs_are_not_installed(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (trace, trace_events):
        monkeypatch.setattr(module, "FILE", tmp_path / "trace-el.o")
    with pytest.raises(BusyError, match=r"not installed .trace-el.o is missing"):
        await node.modes[-1].tracer().start(WatchedFlow(Protocol.TCP, VIP, 80))


async def test_the_maps_of_another_version(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.Shape, "serves_as", lambda *_: False)
    tracer = node.modes[-1].tracer()
    with pytest.raises(BusyError, match=r"another version of steersman.*flows"):
        await tracer.start(WatchedFlow(Protocol.TCP, VIP, 80))


if __name__ == "__main__":  # trace for ever, and say which programs do it

    async def main() -> None:
        options = EbpfOptions(Path(sys.argv[1]), Path(sys.argv[2]))
        tracer = EbpfMode(SubprocessExec(), options).tracer()
        await tracer.start(WatchedFlow(Protocol.TCP, VIP, 80))
        assert tracer._watcher
        programs = tracer._watcher.descriptors("program").values()
        print(*(Object(number).id for number in programs), flush=True)
        await asyncio.get_running_loop().create_future()

    asyncio.run(main())
