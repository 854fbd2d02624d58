"""The ebpf mode sees connections fail, and moves those that wait: at sockets and as packets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from steersman.failover.policy import Policy
from steersman.failover.watch import Failure
from steersman.host.exec import SubprocessExec
from steersman.host.worker import KernelWorker
from steersman.model.errors import BusyError
from steersman.model.failover import Backend, Observation
from steersman.model.names import Protocol
from steersman.model.plan import Endpoint, NodePlan
from steersman.modes.ebpf import failures as failures_of_mode
from steersman.modes.ebpf import layout, loader
from steersman.modes.ebpf.bpf import HashMap, Object
from steersman.modes.ebpf.datapath import EbpfOptions
from steersman.modes.ebpf.failures import EbpfFailures
from steersman.modes.ebpf.mode import EbpfMode
from tests.support.builders.ebpf_node_plan import (
    CLIENT,
    LOOKER,
    NODE,
    NODE6,
    NODE_PORT,
    SETTINGS,
    STICKY,
    VIP,
    VIP6,
    bring,
    service,
)
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.ebpf import program_exists
from tests.support.lab.ebpf_node import MARKS, Node, programmed
from tests.support.lab.sockets import Outcome, printed
from tests.support.waiting import until, wait_until

pytestmark = MARKS
LOCAL, REMOTE, THIRD = "10.244.1.5", "10.244.2.5", "10.244.1.7"
LOCAL6, REMOTE6 = "fd00:10:244:1::5", "fd00:10:244:2::5"
LOOKER6, CLIENT6 = "fd00:10:244:1::100", "2001:db8:99::9"
LAYOUT = Layout(
    {"eth0": (f"{NODE}/24", f"{NODE6}/64")},
    (CLIENT, CLIENT6),
    (
        *(Pod(LOCAL), Pod(LOCAL6), Pod(THIRD), Pod(LOOKER), Pod(LOOKER6)),
        *(Pod(REMOTE, local=False), Pod(REMOTE6, local=False)),
    ),
)
LONGEST = 60.0
SILENT, REFUSED = Observation.SILENT, Observation.REFUSED


class Way(NamedTuple):
    """A client, what it connects to, and the endpoints of that."""

    source: str
    address: str
    port: int
    near: str
    far: str

    @property
    def client(self) -> str:
        """The address that the client is seen with."""
        return self.source if self.source != "" else NODE


WAYS = {
    "pod": Way(LOOKER, VIP, 80, LOCAL, REMOTE),
    "node": Way(NODE, VIP, 80, LOCAL, REMOTE),
    "outside": Way(CLIENT, NODE, NODE_PORT, LOCAL, REMOTE),
    "pod6": Way(LOOKER6, VIP6, 80, LOCAL6, REMOTE6),
    "node6": Way(NODE6, VIP6, 80, LOCAL6, REMOTE6),
    "outside6": Way(CLIENT6, NODE6, NODE_PORT, LOCAL6, REMOTE6),
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(LAYOUT) as lab:
        for address in (LOCAL, REMOTE, THIRD, LOCAL6, REMOTE6, NODE):
            for protocol in ("TCP", "UDP"):
                lab.serve(address, 8080, protocol)
        yield lab


def plan(*ends: str, seconds: int = 0, port: int = 8080) -> NodePlan:
    """Services of both families and protocols with these endpoints."""
    found = []
    for vip in (VIP, VIP6):
        own = tuple(Endpoint(ip, port, ip != REMOTE) for ip in ends if (":" in ip) == (":" in vip))
        found += [service("web", vip, each, own) for each in (Protocol.TCP, Protocol.UDP)]
    own = tuple(Endpoint(ip, port, ip != REMOTE) for ip in ends if ":" not in ip)
    found.append(service("sticky", STICKY, Protocol.TCP, own, seconds or 600))
    return NodePlan(SETTINGS, {each.key: each for each in found})


@contextlib.contextmanager
def firewall(lab: Lab, address: str, action: str) -> Iterator[None]:
    """A firewall in front of port 8080 of an endpoint."""
    argv = ["nsenter", f"--net={lab.netns(address).path}", "nft"]
    rules = "table inet fault { chain input { type filter hook input priority 0; "
    rules += f"meta l4proto {{ tcp, udp }} th dport 8080 {action}; }}; }}"
    subprocess.run([*argv, "-f", "-"], input=rules, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run([*argv, "delete", "table", "inet", "fault"], check=True)


def seen(node: Node, clients: Callable[[], object], least: int = 0) -> list[Failure]:
    """The failures that are seen while clients connect; there must be so many at least."""
    return asyncio.run(watched(node, clients, least))


async def watched(node: Node, clients: Callable[[], object], least: int) -> list[Failure]:
    found: list[Failure] = []
    mode = node.modes[-1]
    failures = await mode.worker.do(mode.watch_failures)

    async def follow() -> None:
        while True:
            found.extend(await failures.receive())

    following = asyncio.create_task(follow())
    try:
        await asyncio.to_thread(clients)
        await until(lambda: len(found) >= least)
        number = -1
        while number < len(found):  # what came before now
            number = len(found)
            await asyncio.sleep(0.5)
        return found
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        await failures.aclose()


def tcp(address: str) -> Backend:
    return Backend(address, 8080, Protocol.TCP)


@EVERY_WAY
@pytest.mark.parametrize("near", [True, False], ids=["near", "far"])
def test_a_silent_endpoint_is_seen_with_its_client(lab: Lab, way: Way, near: bool) -> None:
    end = way.near if near else way.far
    with firewall(lab, end, "drop"), programmed(lab, plan(end)) as node:
        outcome: list[Outcome] = []
        failures = seen(
            node,
            lambda: outcome.append(lab.probe(way.source, way.address, way.port, timeout=2.5)),
            least=1,
        )
    assert outcome[0].kind == "timeout"
    assert set(failures) == {Failure(tcp(end), SILENT, way.client)}


@EVERY_WAY
@pytest.mark.parametrize(
    ("action", "observation"),
    [
        ("reject with tcp reset", REFUSED),
        ("reject with icmpx type port-unreachable", REFUSED),
        ("reject with icmpx type host-unreachable", Observation.UNREACHABLE),
    ],
    ids=["reset", "port", "host"],
)
def test_a_refusal_is_seen_at_once(
    lab: Lab, way: Way, action: str, observation: Observation
) -> None:
    with firewall(lab, way.far, f"meta l4proto tcp {action}"), programmed(lab, plan(way.far)) as it:
        probe = lambda: lab.probe(way.source, way.address, way.port, timeout=0.9)  # noqa: E731
        failures = seen(it, probe, least=1)
    assert failures[0].backend == tcp(way.far)
    assert failures[0].observation is observation


@pytest.mark.parametrize("source", [LOOKER, NODE, CLIENT])
def test_a_datagram_is_refused_but_never_silent(lab: Lab, source: str) -> None:
    address, port = (NODE, NODE_PORT) if source == CLIENT else (VIP, 80)

    def probe() -> None:
        lab.probe(source, address, port, "UDP", timeout=1.5)

    with programmed(lab, plan(REMOTE, port=8081)) as node:
        failures = seen(node, probe, least=1)
    assert {failure.backend for failure in failures} == {Backend(REMOTE, 8081, Protocol.UDP)}
    assert {failure.observation for failure in failures} == {REFUSED}
    with firewall(lab, REMOTE, "drop"), programmed(lab, plan(REMOTE)) as node:
        assert seen(node, probe) == []


def test_a_datagram_of_the_node_to_itself_is_refused(lab: Lab) -> None:
    with programmed(lab, plan(NODE, port=8081)) as node:
        failures = seen(node, lambda: lab.probe("", VIP, 80, "UDP", timeout=1.0), least=1)
    assert Failure(Backend(NODE, 8081, Protocol.UDP), REFUSED, NODE) in failures


def test_what_succeeds_and_what_is_no_service_is_not_seen(lab: Lab) -> None:
    def clients() -> None:
        for way in (WAYS["pod"], WAYS["node"], WAYS["outside"], WAYS["pod6"]):
            for _ in range(20):
                assert lab.probe(way.source, way.address, way.port).kind == "answered"
        for source in (LOOKER, NODE):  # silent, but through no Service
            assert lab.probe(source, REMOTE, 8080, timeout=1.5).kind == "timeout"

    with programmed(lab, plan(LOCAL, LOCAL6)) as node, firewall(lab, REMOTE, "drop"):
        assert seen(node, clients) == []


def test_an_endpoint_that_answers_after_its_syn_is_no_failure(lab: Lab) -> None:
    """The answer is lost on its way to a client outside: that says nothing about the endpoint."""
    outside = ["nsenter", f"--net={lab.netns(CLIENT).path}", "nft"]
    rules = "table inet fault { chain input { type filter hook input priority -400; "
    rules += f"tcp sport {NODE_PORT} drop; }}; }}"
    subprocess.run([*outside, "-f", "-"], input=rules, text=True, check=True)
    try:
        with programmed(lab, plan(REMOTE)) as node:
            assert seen(node, lambda: lab.probe(CLIENT, NODE, NODE_PORT, timeout=2.5)) == []
    finally:
        subprocess.run([*outside, "delete", "table", "inet", "fault"], check=True)


def test_nothing_is_noted_while_nobody_watches(lab: Lab) -> None:
    with programmed(lab, plan(REMOTE)) as node:
        health = HashMap.pinned(node.pins / "maps" / "health")
        for way in (WAYS["pod"], WAYS["outside"]):
            assert lab.probe(way.source, way.address, way.port).kind == "answered"
        assert dict(health.items()) == {}
        with firewall(lab, REMOTE, "drop"):
            for way in (WAYS["pod"], WAYS["outside"]):
                lab.probe(way.source, way.address, way.port, timeout=1.5)
        assert dict(health.items()) == {}
        assert seen(node, lambda: None) == []
        health.close()


# Connections that wait


class Waiting:
    """A connection that is being opened, in a thread."""

    def __init__(self, sock: socket.socket, way: Way) -> None:
        self.answer = ""
        self.error: OSError | None = None
        self._sock, self._way = sock, way
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((way.source, 0))
        self.port: int = sock.getsockname()[1]
        self._thread = threading.Thread(target=self._open)
        self._thread.start()

    def _open(self) -> None:
        with self._sock as sock:
            try:
                sock.settimeout(LONGEST)
                sock.connect((self._way.address, self._way.port))
                self.answer = sock.recv(100).decode().split()[0]
                sock.sendall(b"more")
            except OSError as error:
                self.error = error

    def result(self) -> str | OSError | None:
        self._thread.join(2 * LONGEST)
        assert not self._thread.is_alive()
        return self.error or self.answer


@contextlib.contextmanager
def watch(node: Node) -> Iterator[EbpfFailures]:
    mode = node.modes[-1]
    found = asyncio.run(mode.worker.do(mode.watch_failures))
    try:
        yield found
    finally:
        asyncio.run(found.aclose())


def cut(node: Node, endpoint: str) -> int:
    """What the daemon does with an endpoint that is ejected."""
    with watch(node) as failures:
        return asyncio.run(failures.cut([tcp(endpoint)]))


def serve(node: Node, *ends: str) -> None:
    """Give the Services other endpoints."""
    asyncio.run(bring(node.modes[-1], plan(*ends)))


def until_silent(failures: EbpfFailures, way: Way, end: str) -> None:
    """Wait until a SYN has been sent again."""

    async def receive() -> None:
        wanted = Failure(tcp(end), SILENT, way.client)
        while wanted not in await failures.receive():
            pass

    asyncio.run(asyncio.wait_for(receive(), LONGEST))


def waiting(lab: Lab, node: Node, way: Way, end: str, number: int = 1) -> list[Waiting]:
    """Connections of which it is known that the endpoint does not answer."""
    with watch(node) as failures:
        opened = [Waiting(lab.socket(way.source, "TCP"), way) for _ in range(number)]
        until_silent(failures, way, end)
    return opened


@EVERY_WAY
def test_waiting_connections_are_moved_to_another_endpoint(lab: Lab, way: Way) -> None:
    with firewall(lab, way.far, "drop"), programmed(lab, plan(way.far)) as node:
        opened = waiting(lab, node, way, way.far, 5)
        serve(node, way.near)
        assert cut(node, way.far) == 5
        answers = {each.result() for each in opened}
    assert answers == {printed(way.near, 8080)}


@pytest.mark.parametrize("way", [WAYS["pod"], WAYS["node"]], ids=["pod", "node"])
def test_a_connection_can_be_moved_twice(lab: Lab, way: Way) -> None:
    with contextlib.ExitStack() as stack:
        for end in (REMOTE, LOCAL):
            stack.enter_context(firewall(lab, end, "drop"))
        node = stack.enter_context(programmed(lab, plan(REMOTE)))
        [opened] = waiting(lab, node, way, REMOTE)
        with watch(node) as failures:
            serve(node, LOCAL)
            assert asyncio.run(failures.cut([tcp(REMOTE)])) == 1
            until_silent(failures, way, LOCAL)
            assert asyncio.run(failures.cut([tcp(REMOTE)])) == 0
            serve(node, THIRD)
            assert asyncio.run(failures.cut([tcp(LOCAL)])) > 0
        assert opened.result() == printed(THIRD, 8080)


def test_the_next_process_leaves_a_moved_connection_where_it_is(lab: Lab) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(firewall(lab, REMOTE, "drop"))
        node = stack.enter_context(programmed(lab, plan(REMOTE)))
        [opened] = waiting(lab, node, WAYS["pod"], REMOTE)
        serve(node, LOCAL)
        with firewall(lab, LOCAL, "drop"):
            assert [cut(node, REMOTE), cut(node, REMOTE)] == [1, 1]
        assert opened.result() == printed(LOCAL, 8080)


def test_a_socket_of_the_node_that_waits_for_the_node_is_told(lab: Lab) -> None:
    with firewall(lab, NODE, "drop"), programmed(lab, plan(NODE)) as node:
        [opened] = waiting(lab, node, WAYS["node"], NODE)
        serve(node, LOCAL)
        assert cut(node, NODE) == 1
        result = opened.result()
    assert isinstance(result, OSError)
    assert result.errno == errno.ECONNABORTED


def test_complete_connections_are_not_touched(lab: Lab) -> None:
    with contextlib.ExitStack() as stack, programmed(lab, plan(REMOTE)) as node:
        socks = []
        for way in (WAYS["pod"], WAYS["node"], WAYS["outside"]):
            socks.append(stack.enter_context(lab.socket(way.source, "TCP")))
            socks[-1].settimeout(LONGEST)
            socks[-1].connect((way.address, way.port))
        serve(node, LOCAL)
        assert cut(node, REMOTE) == 0
        for sock in socks:
            assert sock.recv(100).decode().startswith(printed(REMOTE, 8080))


@pytest.mark.parametrize("ends", [(LOCAL, THIRD), (LOCAL,)], ids=["moved", "told"])
def test_a_pod_uses_no_port_twice_at_an_endpoint(lab: Lab, ends: tuple[str, ...]) -> None:
    """A moved connection keeps its port: not to an endpoint where the pod has that already."""
    way = WAYS["pod"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(firewall(lab, REMOTE, "drop"))
        node = stack.enter_context(programmed(lab, plan(REMOTE)))
        [opened] = waiting(lab, node, way, REMOTE)
        other = stack.enter_context(lab.socket(way.source, "TCP"))
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.settimeout(LONGEST)
        other.bind((way.source, opened.port))
        other.connect((LOCAL, 8080))
        serve(node, *ends)
        assert cut(node, REMOTE) == 1
        result = opened.result()
    if THIRD in ends:
        assert result == printed(THIRD, 8080)
    else:
        assert isinstance(result, OSError)
        assert result.errno == errno.ECONNABORTED


@pytest.mark.parametrize("source", [LOOKER, NODE])
def test_a_session_leaves_an_ejected_endpoint_and_stays_where_it_went(
    lab: Lab, source: str
) -> None:
    def endpoints() -> set[str]:
        return {lab.probe(source, STICKY, 80).endpoint for _ in range(8)}

    with programmed(lab, plan(LOCAL, REMOTE)) as node:
        [first] = endpoints()
        [other] = {LOCAL, REMOTE} - {first.partition(":")[0]}
        serve(node, other)
        assert endpoints() == {printed(other, 8080)}
        serve(node, LOCAL, REMOTE)
        assert endpoints() == {printed(other, 8080)}


def test_a_moved_connection_follows_the_session(lab: Lab) -> None:
    way = WAYS["pod"]._replace(address=STICKY)
    with firewall(lab, REMOTE, "drop"), programmed(lab, plan(REMOTE)) as node:
        opened = waiting(lab, node, way, REMOTE, 8)
        serve(node, LOCAL, THIRD)
        assert cut(node, REMOTE) == 8
        [answer] = {each.result() for each in opened}
        assert {lab.probe(LOOKER, STICKY, 80).endpoint for _ in range(4)} == {answer}


# The policy, and the end


def test_three_silent_connects_eject_an_endpoint_while_another_answers(lab: Lab) -> None:
    """Its own probes need not have ended: what the kernel has seen suffices."""
    policy: Policy[str] = Policy(counts_answers=True)
    policy.serve("web", {tcp(LOCAL): "here", tcp(REMOTE): "there"})
    for end in (LOCAL, REMOTE):  # each new one is tried once
        policy.probed(time.monotonic(), tcp(end), Observation.ANSWERED)
    answered: set[Backend] = set()

    async def observe(failures: EbpfFailures) -> None:
        while not policy.ejected("web"):
            for failure in await failures.receive():
                policy.observe(time.monotonic(), *failure)
                if failure.observation is Observation.ANSWERED:
                    answered.add(failure.backend)
            now = time.monotonic()
            for probe in policy.advance(now):
                if probe.backend == tcp(LOCAL):
                    policy.probed(now, probe.backend, Observation.ANSWERED)

    with contextlib.ExitStack() as stack:
        stack.enter_context(firewall(lab, REMOTE, "drop"))
        node = stack.enter_context(programmed(lab, plan(LOCAL, REMOTE)))
        with watch(node) as failures, clients(lab):
            asyncio.run(asyncio.wait_for(observe(failures), LONGEST))
    [ejection] = policy.ejected("web")
    assert (ejection.backend, ejection.confirmed) == (tcp(REMOTE), False)
    assert answered == {tcp(LOCAL)}


@contextlib.contextmanager
def clients(lab: Lab) -> Iterator[None]:
    """Clients in a pod that connect all the time, each with a patience of its own."""
    ended = threading.Event()

    def connect(patience: float) -> None:
        while not ended.is_set():
            lab.probe(LOOKER, VIP, 80, timeout=patience)

    patience = [1.1 + number / 10 for number in range(16)]
    threads = [threading.Thread(target=connect, args=(each,)) for each in patience]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        ended.set()
        for each in threads:
            each.join()


def test_an_endpoint_that_loses_some_packets_is_known_to_answer(lab: Lab) -> None:
    async def observe(failures: EbpfFailures) -> None:
        both = {Failure(tcp(LOCAL), SILENT, LOOKER), Failure(tcp(LOCAL), Observation.ANSWERED)}
        while not both <= set(await failures.receive()):
            pass

    with contextlib.ExitStack() as stack:
        stack.enter_context(firewall(lab, LOCAL, "ct state new numgen random mod 4 == 0 drop"))
        node = stack.enter_context(programmed(lab, plan(LOCAL)))
        with watch(node) as failures, clients(lab):
            asyncio.run(asyncio.wait_for(observe(failures), LONGEST))


def test_a_killed_process_leaves_no_program_and_soon_nobody_watches(lab: Lab) -> None:
    with programmed(lab, plan(REMOTE)) as node:
        pinned = sorted(node.pins.rglob("*"))
        argv = [sys.executable, "-m", __name__, str(node.pins)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout
            ids = [int(word) for word in child.stdout.readline().split()]
            assert len(ids) == 3
            assert all(map(program_exists, ids))
            child.kill()
        # The kernel frees them after a grace period.
        wait_until(lambda: not any(map(program_exists, ids)))
        assert sorted(node.pins.rglob("*")) == pinned
        watching = HashMap.pinned(node.pins / "maps" / "watching")
        until, *_ = layout.WATCHING.unpack(watching.get(layout.number_key(0)) or b"")
        watching.close()
        assert until - time.monotonic_ns() < 60 * 10**9
        # The next one has none of the old failures, and leaves nothing either.
        with firewall(lab, REMOTE, "drop"):
            lab.probe(LOOKER, VIP, 80, timeout=1.3)
        assert seen(node, lambda: None) == []


# What cannot be watched


def test_the_mode_does_not_run(tmp_path: Path) -> None:
    mode = EbpfMode(SubprocessExec(), EbpfOptions(tmp_path / "nothing"))
    with pytest.raises(BusyError, match="programs are not attached: "):
        mode.watch_failures()


def test_the_programs_are_not_installed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with programmed(lab, plan(LOCAL)) as node:
        monkeypatch.setattr(failures_of_mode, "FILE", tmp_path / "failures-el.o")
        with pytest.raises(BusyError, match=r"not installed .failures-el.o is missing"):
            node.modes[-1].watch_failures()


def test_the_maps_of_another_version(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    with programmed(lab, plan(LOCAL)) as node:
        monkeypatch.setattr(loader.Shape, "serves_as", lambda *_: False)
        with pytest.raises(BusyError, match=r"another version of steersman.*health"):
            node.modes[-1].watch_failures()


if __name__ == "__main__":  # watch for ever, and say which programs do it
    watching_failures = EbpfFailures(KernelWorker(), Path(sys.argv[1]) / "maps")
    programs = watching_failures._object.descriptors("program").values()
    print(*(Object(number).id for number in programs), flush=True)
    threading.Event().wait()
