"""The ebpf mode seen by real sockets: the peers they see, affinity, and what survives a restart."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import errno
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from steersman.model.errors import BusyError
from steersman.model.names import Family, Protocol
from steersman.model.plan import Action, Endpoint, NodePlan, Verdict
from steersman.model.ruleset import Diff, diff
from steersman.modes.base import release
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.bpf import ArrayMap, HashMap, Link
from steersman.modes.ebpf.devices import describe, list_devices
from steersman.modes.ebpf.dump import DUMPS, dump
from steersman.modes.ebpf.flows import EGRESS, TO_ENDPOINT
from tests.support.builders.ebpf_node_plan import (
    CLIENT,
    ENDPOINTS,
    LAYOUT,
    LOOKER,
    NODE,
    NODE6,
    NODE_PORT,
    OTHER,
    PLAIN,
    POD,
    POD6,
    STICKY,
    VIP,
    VIP6,
    bring,
    node_plan,
    ruleset,
    service,
)
from tests.support.lab.cluster import Lab, ip
from tests.support.lab.ebpf_node import (
    MARKS,
    WAIT,
    Node,
    compute_checksums,
    programmed,
    replace_programs,
    serving,
)
from tests.support.lab.sockets import Netns
from tests.support.waiting import until

pytestmark = MARKS
SO_COOKIE = 57


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with serving("TCP", "UDP") as made:
        yield made


@pytest.fixture
def node(lab: Lab) -> Iterator[Node]:
    with programmed(lab, node_plan()) as made:
        yield made


def ask(sock: socket.socket) -> str:
    """The name of the endpoint behind a connected socket of UDP."""
    sock.send(b"?")
    return sock.recv(100).decode().split()[0]


def greeting(sock: socket.socket) -> str:
    return sock.recv(100).decode().split()[0]


@pytest.mark.parametrize(("address", "at"), [(VIP, LOOKER), (VIP, NODE), (VIP6, NODE)])
@pytest.mark.parametrize("kind", ["TCP", "UDP"])
def test_the_peer_is_the_service(node: Node, kind: str, address: str, at: str) -> None:
    with node.socket(address, kind, at) as sock:
        sock.connect((address, 80))
        assert sock.getpeername()[:2] == (address, 80)
        if kind == "UDP":
            sock.send(b"?")
            _, sender = sock.recvfrom(100)
            assert sender[:2] == (address, 80)


def cookie(sock: socket.socket) -> int:
    return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), layout.BYTE_ORDER)


@pytest.mark.parametrize("kind", ["TCP", "UDP"])
def test_sockets_that_are_closed_are_forgotten(node: Node, kind: str) -> None:
    seats = ArrayMap.pinned(node.pins / "maps/seats")
    with node.socket(VIP, kind) as sock:
        sock.connect((VIP, 80))
        number, seat = cookie(sock), cookie(sock) % seats.capacity
        assert seats.read(seat)[:8] == number.to_bytes(8, layout.BYTE_ORDER)
        reverses = HashMap.pinned(node.pins / "maps/reverses")
        known = {layout.REVERSE_KEY.unpack(key)[0] for key, _ in reverses.items()}
        assert (number in known) is (kind == "UDP")
    assert seats.read(seat)[:8] == bytes(8)
    assert not any(layout.REVERSE_KEY.unpack(key)[0] == number for key, _ in reverses.items())
    reverses.close()
    seats.close()


def test_sockets_whose_seat_is_taken(node: Node) -> None:
    seats = ArrayMap.pinned(node.pins / "maps/seats")
    crowded = HashMap.pinned(node.pins / "maps/crowded")
    with node.socket(VIP) as sock:
        other = cookie(sock) + seats.capacity
        seats.store(cookie(sock) % seats.capacity, 0, other.to_bytes(8, layout.BYTE_ORDER))
        sock.connect((VIP, 80))
        assert sock.getpeername() == (VIP, 80)
        assert len(list(crowded.items())) == 1
    assert not list(crowded.items())
    crowded.close()
    seats.close()


def test_a_socket_that_is_not_connected_stays_with_one_endpoint(node: Node) -> None:
    said = set()
    with node.socket(VIP, "UDP") as sock:
        for _ in range(30):
            sock.sendto(b"?", (VIP, 80))
            answer, sender = sock.recvfrom(100)
            said.add(answer)
            assert sender == (VIP, 80)
    assert len(said) == 1


def test_sockets_that_are_not_connected_spread(node: Node) -> None:
    said = set()
    for _ in range(60):
        with node.socket(VIP, "UDP") as sock:
            sock.sendto(b"?", (VIP, 80))
            said.add(sock.recv(100))
    assert len(said) == len(ENDPOINTS)


@pytest.mark.parametrize("kind", ["TCP", "UDP"])
def test_an_ipv6_socket_may_speak_ipv4(node: Node, kind: str) -> None:
    with node.socket("::", kind) as sock:
        sock.connect((f"::ffff:{VIP}", 80))
        assert (ask if kind == "UDP" else greeting)(sock).endswith(":8080")
        assert sock.getpeername()[:2] == (f"::ffff:{VIP}", 80)


@pytest.mark.parametrize("kind", ["TCP", "UDP"])
@pytest.mark.parametrize("bound", ["", "127.0.0.1", "127.0.0.5"])
def test_localhost_has_node_ports(node: Node, bound: str, kind: str) -> None:
    node.lab.sysctl("ipv4/conf/all/route_localnet", "1")
    seen = set()
    for _ in range(60):  # each of three is missed by twenty now and then
        with node.socket(VIP, kind, at=NODE) as sock:
            sock.bind((bound, 0))
            sock.connect(("127.0.0.1", NODE_PORT))
            if kind == "UDP":
                sock.send(b"?")
            name, source = sock.recv(100).decode().split()
            assert sock.getpeername() == ("127.0.0.1", NODE_PORT)
            assert source == NODE
            seen.add(name)
    assert seen == {str(end) for end in ENDPOINTS}


@pytest.mark.parametrize("kind", ["TCP", "UDP"])
def test_localhost_has_node_ports_with_endpoints_behind_a_bridge(kind: str) -> None:
    """Answers come in twice: by the port of the bridge, and by the bridge."""
    with Lab(dataclasses.replace(LAYOUT, bridge="br0")) as lab:
        lab.serve(POD, 8080, kind)
        lab.sysctl("ipv4/conf/all/route_localnet", "1")
        with (
            programmed(lab, node_plan(ENDPOINTS[:1])) as node,
            node.socket(VIP, kind, at=NODE) as sock,
        ):
            sock.connect(("127.0.0.1", NODE_PORT))
            if kind == "UDP":
                sock.send(b"?")
            assert sock.recv(100).decode() == f"{ENDPOINTS[0]} {NODE}"


def test_a_datagram_from_localhost_needs_no_connection(node: Node) -> None:
    node.lab.sysctl("ipv4/conf/all/route_localnet", "1")
    with node.socket(VIP, "UDP", at=NODE) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.sendto(b"?", ("127.0.0.1", NODE_PORT))
        answer, sender = sock.recvfrom(100)
        assert answer.endswith(f" {NODE}".encode())
        assert sender == ("127.0.0.1", NODE_PORT)


def for_pods(plan: NodePlan, action: Action) -> NodePlan:
    """The same, with another action for pods at every destination."""
    changed = {
        key: msgspec.structs.replace(
            each, frontends=tuple(msgspec.structs.replace(f, pod=action) for f in each.frontends)
        )
        for key, each in plan.services.items()
    }
    return NodePlan(plan.settings, changed)


@pytest.mark.parametrize("action", [PLAIN, Action(Verdict.REJECT)])
@pytest.mark.parametrize("kind", ["TCP", "UDP"])
def test_localhost_of_a_pod_is_the_pods_own(node: Node, kind: str, action: Action) -> None:
    asyncio.run(bring(node.modes[0], for_pods(node_plan(), action)))
    for own in ("127.0.0.1", "::1"):
        node.lab.servers.listen(node.lab.netns(LOOKER), own, NODE_PORT, kind, "itself")
    try:
        for address in ("127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1", "::ffff:0.0.0.0", "::1", "::"):
            with node.socket(address, kind) as sock:
                sock.connect((address, NODE_PORT))
                assert (ask if kind == "UDP" else greeting)(sock) == "itself", address
    finally:
        for own in ("127.0.0.1", "::1"):
            node.lab.servers.silence(own)


def test_the_node_is_also_nobody(node: Node) -> None:
    """Linux takes 0.0.0.0 for 127.0.0.1."""
    with node.socket(VIP, at=NODE) as sock:
        sock.connect(("0.0.0.0", NODE_PORT))
        assert greeting(sock).endswith(":8080")


@pytest.mark.parametrize("kind", ["TCP", "UDP"])
@pytest.mark.parametrize("address", [VIP, f"::ffff:{VIP}"])
def test_source_ranges_let_the_node_in(node: Node, address: str, kind: str) -> None:
    plan, ranges = node_plan(), (f"{NODE}/32",)
    changed = {
        key: msgspec.structs.replace(
            each,
            frontends=tuple(
                msgspec.structs.replace(f, source_ranges=ranges) for f in each.frontends
            ),
        )
        for key, each in plan.services.items()
        if key.family is Family.IPV4
    }
    asyncio.run(bring(node.modes[0], NodePlan(plan.settings, changed)))
    with node.socket(address, kind, at=NODE) as sock:
        sock.connect((address, 80))
        assert (ask if kind == "UDP" else greeting)(sock).endswith(":8080")
        assert sock.getpeername()[:2] == (address, 80)


def test_a_node_port_in_use_cannot_be_bound(node: Node) -> None:
    for at, address, number in (
        (NODE, "0.0.0.0", errno.EADDRINUSE),
        (NODE, NODE, errno.EADDRINUSE),
        (LOOKER, "0.0.0.0", 0),
    ):
        with node.socket(VIP, at=at) as sock:
            if not number:
                sock.bind((address, NODE_PORT))
                continue
            with pytest.raises(OSError, match="in use") as error:
                sock.bind((address, NODE_PORT))
            assert error.value.errno == number
            sock.bind((address, NODE_PORT + 1))


def test_who_listens_for_both_families_needs_the_port_in_both(node: Node) -> None:
    plan = node_plan()
    only = {key: each for key, each in plan.services.items() if key.family is Family.IPV4}
    asyncio.run(bring(node.modes[0], NodePlan(plan.settings, only)))
    for address in ("::", "::ffff:0.0.0.0", f"::ffff:{NODE}"):
        with node.socket("::", at=NODE) as sock:
            with pytest.raises(OSError, match="in use"):
                sock.bind((address, NODE_PORT))
            sock.bind((address, NODE_PORT + 1))
    for at, address in ((NODE, NODE6), (NODE, "::1"), (LOOKER, "::")):
        with node.socket("::", at=at) as sock:
            sock.bind((address, NODE_PORT))


def test_the_guard_of_node_ports_can_be_switched_off(node: Node) -> None:
    asyncio.run(release(node.modes[0]))
    node.options = msgspec.structs.replace(node.options, guard_node_ports=False)
    asyncio.run(bring(node.mode(), node_plan()))
    with node.socket(VIP, at=NODE) as sock:
        sock.bind((NODE, NODE_PORT))


def test_an_unknown_port_is_refused_at_once(node: Node) -> None:
    with node.socket(VIP) as sock, pytest.raises(ConnectionRefusedError):
        sock.connect((VIP, 81))


@pytest.mark.parametrize("kind", ["TCP", "UDP"])
def test_a_client_outside_is_refused_whoever_computes_checksums(node: Node, kind: str) -> None:
    """It leaves them to its device; the reply may leave by one that computes none."""
    for on in (False, True):
        node.lab.node.call(functools.partial(compute_checksums, "eth0", on=on))
        assert node.lab.probe(CLIENT, VIP, 81, kind).kind == "refused"


@pytest.mark.parametrize("kind", ["TCP", "UDP"])
def test_affinity_holds_until_its_endpoint_goes(node: Node, kind: str) -> None:
    def reached() -> str:
        return node.lab.probe(LOOKER, STICKY, 80, kind).endpoint

    first = reached()
    assert {reached() for _ in range(12)} == {first}
    rest = tuple(end for end in ENDPOINTS if str(end) != first)
    asyncio.run(bring(node.modes[0], node_plan(rest)))
    second = reached()
    assert second in {str(end) for end in rest}
    assert {reached() for _ in range(12)} == {second}


def test_affinity_ends(node: Node) -> None:
    asyncio.run(bring(node.modes[0], node_plan(seconds=1)))
    first = node.lab.probe(LOOKER, STICKY, 80).endpoint
    asyncio.run(until(lambda: _after_a_pause(node) != first))


def _after_a_pause(node: Node) -> str:
    """The endpoint that is reached when the pause before it was longer than the affinity."""
    with node.lab.netns(LOOKER).socket(VIP, "UDP") as sock:
        sock.settimeout(1.1)
        with pytest.raises(TimeoutError):
            sock.recv(1)
    return node.lab.probe(LOOKER, STICKY, 80).endpoint


@pytest.fixture
def after_a_kill() -> Iterator[Node]:
    """A lab of its own, programmed by a process that was killed right after."""
    with Lab(LAYOUT) as lab:
        made = Node(lab)
        command = ["-m", "tests.support.builders.ebpf_node_plan", str(made.pins), str(made.cgroup)]
        died = subprocess.run(
            ["nsenter", f"--net={lab.node.path}", sys.executable, *command],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=False,
        )
        assert died.returncode == -signal.SIGKILL, died.stderr
        yield made
        made.close()


@pytest.mark.parametrize(
    ("at", "target"), [(LOOKER, (VIP, 80)), (CLIENT, (NODE, NODE_PORT))], ids=["socket", "packets"]
)
def test_connections_outlive_the_process(
    after_a_kill: Node, at: str, target: tuple[str, int]
) -> None:
    node = after_a_kill
    asyncio.run(bring(node.mode(), node_plan(ENDPOINTS[:1])))
    cgroup = node.cgroup if at == LOOKER else None
    with (
        node.lab.netns(POD).socket(POD, "TCP") as server,
        node.lab.netns(at).socket(VIP, "TCP", cgroup) as client,
    ):
        server.bind((POD, 8080))
        server.listen()
        client.settimeout(WAIT)
        client.connect(target)
        accepted, _ = server.accept()
        with accepted:
            accepted.settimeout(WAIT)
            for change in (replace_programs, _forget_and_return, _other_endpoints):
                change(node)
                client.sendall(b"ping")
                assert accepted.recv(4) == b"ping"
                accepted.sendall(b"pong")
                assert client.recv(4) == b"pong"


def test_a_killed_process_leaves_a_service_working(after_a_kill: Node) -> None:
    for pod in LAYOUT.pods:
        after_a_kill.lab.serve(pod.address, 8080, "TCP")
    names = {str(end) for end in ENDPOINTS}
    assert after_a_kill.lab.probe(LOOKER, VIP, 80).endpoint in names
    assert after_a_kill.lab.probe(CLIENT, NODE, NODE_PORT).endpoint in names


def _forget_and_return(node: Node) -> None:
    asyncio.run(release(node.modes[-1]))
    asyncio.run(bring(node.mode(), node_plan(ENDPOINTS[:1])))


def _other_endpoints(node: Node) -> None:
    asyncio.run(bring(node.modes[-1], node_plan(ENDPOINTS[1:])))


def test_a_restart_finds_what_is_in_force(node: Node) -> None:
    asyncio.run(release(node.modes[0]))
    mode = node.mode()
    want = ruleset(node_plan(), mode)
    assert not diff(asyncio.run(mode.worker.do(mode.read)), want)
    asyncio.run(bring(mode, node_plan(ENDPOINTS[:1])))
    for _ in range(5):
        assert node.lab.probe(LOOKER, VIP, 80).endpoint == f"{POD}:8080"


def test_only_one_process_has_the_pins(node: Node) -> None:
    with pytest.raises(BusyError, match=f"is held by pid {os.getpid()}"):
        node.mode().read()


def test_the_maps_are_printed_in_the_words_of_kubernetes(node: Node) -> None:
    asyncio.run(bring(node.modes[0], node_plan(ENDPOINTS[:1])))
    for address in (VIP, STICKY):
        assert node.lab.probe(LOOKER, address, 80).kind == "answered"
    assert node.lab.probe(CLIENT, NODE, NODE_PORT).kind == "answered"
    said = {what: list(dump(what, node.pins)) for what in DUMPS}
    assert f"service shop/web TCP IPv4: all [{POD}:8080], local []" in said["services"]
    assert any(
        line.startswith(f"shop/web TCP IPv4 > {POD}:8080: 2 connections, ")
        for line in said["endpoints"]
    )
    assert any(line.endswith(f"> {POD}:8080, 0 s ago") for line in said["affinity"])
    assert any(
        line.startswith(f"TCP {CLIENT}:") and f"ingress, to endpoint {POD}:8080" in line
        for line in said["conntrack"]
    )
    assert {"socket_forwarded 2", "packet_forwarded 1"} <= set(said["counters"])


def test_nothing_is_left(node: Node) -> None:
    for _ in range(2):  # once more, and there is nothing to do
        asyncio.run(bring(node.modes[0], None))
        assert not node.pins.exists()
        mode = node.modes[0]
        assert asyncio.run(mode.worker.do(mode.read)) == {}
    with node.socket(VIP) as sock:
        sock.settimeout(0.3)
        with pytest.raises(OSError, match=r"timed out|route"):
            sock.connect((VIP, 80))


def test_programs_that_are_taken_off_are_missed(node: Node) -> None:
    mode = node.modes[0]
    before = asyncio.run(mode.worker.do(mode.fingerprint))
    (node.pins / "links/sm_connect4").unlink()
    missing = asyncio.run(mode.worker.do(mode.fingerprint))
    assert missing != before
    assert b"A" not in asyncio.run(mode.worker.do(mode.read))
    asyncio.run(bring(mode, node_plan()))
    assert asyncio.run(mode.worker.do(mode.fingerprint)) == missing


def test_devices_that_come_are_followed(node: Node) -> None:
    async def scenario() -> None:
        mode = node.modes[0]
        await bring(mode, node_plan(ENDPOINTS[:1]))  # the keeper runs on this loop now
        links = node.pins / "links"
        have = len(list(links.iterdir()))
        ip(Path(node.lab.node.path).name, ["link add new0 type veth peer name new1"])
        await until(lambda: len(list(links.iterdir())) == have + 4)
        ip(Path(node.lab.node.path).name, ["link del new0"])
        await until(lambda: len(list(links.iterdir())) == have)

    asyncio.run(scenario())


def test_syncs_do_not_wait_for_programs_on_new_devices(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for a grace period of RCU."""
    attaching, possible = threading.Event(), threading.Event()
    attach = Link.attach.__func__  # type: ignore[attr-defined]

    def slow(cls: type[Link], program: int, target: int, place: int) -> Link:
        attaching.set()
        assert possible.wait(60)
        found: Link = attach(cls, program, target, place)
        return found

    async def scenario() -> None:
        mode = node.modes[0]
        await bring(mode, node_plan(ENDPOINTS[:1]))
        links = node.pins / "links"
        have = len(list(links.iterdir()))
        monkeypatch.setattr(Link, "attach", classmethod(slow))
        ip(Path(node.lab.node.path).name, ["link add new0 type veth peer name new1"])
        await until(attaching.is_set)
        await bring(mode, node_plan(ENDPOINTS[:2]))
        assert len(list(links.iterdir())) == have
        possible.set()
        await until(lambda: len(list(links.iterdir())) == have + 4)
        ip(Path(node.lab.node.path).name, ["link del new0"])

    try:
        asyncio.run(scenario())
    finally:
        possible.set()


def test_a_new_device_leaves_the_programs_of_others_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To put a program in its own place waits for all that run: every pod would hold up syncs."""
    made: list[int] = []
    attach = Link.attach.__func__  # type: ignore[attr-defined]

    def counted(cls: type[Link], program: int, target: int, place: int) -> Link:
        made.append(target)
        found: Link = attach(cls, program, target, place)
        return found

    monkeypatch.setattr(Link, "attach", classmethod(counted))
    monkeypatch.setattr(Link, "replace", lambda *_: pytest.fail("a program was replaced"))
    mode, name = node.modes[0], Path(node.lab.node.path).name
    datapath, do = mode.datapath, mode.worker.do
    ip(name, ["link add new0 type veth peer name new1"])
    before = asyncio.run(do(datapath.fingerprint))
    try:
        fresh = asyncio.run(do(datapath.write_devices))
        asyncio.run(mode.worker.do_slowly(datapath.attach_devices(fresh)))
        assert asyncio.run(do(datapath.fingerprint)) == before, "pods that come are no drift"
        new = [node.lab.node.call(lambda n=n: socket.if_nametoindex(n)) for n in ("new0", "new1")]  # type: ignore[misc]
        assert sorted(made) == sorted([*new, *new])
    finally:
        ip(name, ["link del new0"])


def test_a_device_may_go_while_its_programs_are_replaced(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = Path(node.lab.node.path).name
    ip(name, ["link add new0 type veth peer name new1"])
    number = node.lab.node.call(lambda: socket.if_nametoindex("new0"))
    mode = node.modes[0]
    asyncio.run(mode.worker.do(mode.apply, Diff(added={b"A": bytes(15) + b"1"})))
    replace, gone = Link.replace, []

    def too_late(link: Link, program: int) -> None:
        if link.target == number:
            subprocess.run(["ip", "-n", name, "link", "del", "new0"], check=True)
            gone.append(number)
        replace(link, program)

    monkeypatch.setattr(Link, "replace", too_late)
    replace_programs(node)
    assert gone
    assert node.lab.probe(CLIENT, NODE, NODE_PORT).kind == "answered"


def test_other_endpoint_is_used(node: Node) -> None:
    asyncio.run(bring(node.modes[0], node_plan(ENDPOINTS[1:2])))
    assert node.lab.probe(CLIENT, NODE, NODE_PORT).endpoint == f"{OTHER}:8080"


def test_no_address_that_may_go_elsewhere_is_a_source(node: Node) -> None:
    """Keepalived marks virtual addresses so; the kernel lists the newest of IPv6 first."""
    name, device = Path(node.lab.node.path).name, "eth0"
    inside = Netns(node.lab.node.path).call
    ip(name, [f"addr add 2001:db8::77/64 dev {device} nodad preferred_lft 0"])
    try:
        found = inside(list_devices)
        number = next(each.number for each in found.devices if each.name == device)
        sources = layout.DEVICE.unpack(describe(found, "", "")[number])[:2]
        assert [layout.print_address(each) for each in sources] == [NODE, NODE6]
        ip(name, [f"addr del {NODE6}/64 dev {device}"])
        found = inside(list_devices)
        source = layout.DEVICE.unpack(describe(found, "", "")[number])[1]
        assert layout.print_address(source) == "2001:db8::77", "where there is no other"
        ip(name, ["addr add 2001:db8::99/128 dev lo nodad"])  # as routers have theirs
        found = inside(list_devices)
        source = layout.DEVICE.unpack(describe(found, "", "")[number])[1]
        assert layout.print_address(source) == "2001:db8::99"
        ip(name, ["addr del 2001:db8::99/128 dev lo"])
    finally:
        ip(name, [f"addr replace {NODE6}/64 dev {device} nodad"])
        ip(name, [f"addr del 2001:db8::77/64 dev {device}"])


@pytest.mark.parametrize("kind", ["TCP", "UDP"])
@pytest.mark.parametrize("address", [VIP, VIP6])
def test_a_process_of_the_node_outside_the_cgroup_is_served_by_its_packets(
    node: Node, address: str, kind: str
) -> None:
    """Programs of sockets never see it: the daemon may be given a part of the hierarchy only."""
    with node.lab.netns(NODE).socket(address, kind) as sock:
        sock.settimeout(WAIT)
        sock.connect((address, 80))
        for _ in range(3):
            assert (ask if kind == "UDP" else greeting)(sock).endswith(":8080")
            if kind == "TCP":
                break


@pytest.mark.parametrize(("address", "pod"), [("10.96.0.20", POD), ("fd00:10:96::20", POD6)])
def test_errors_reach_a_process_outside_the_cgroup_and_its_endpoint(
    node: Node, address: str, pod: str
) -> None:
    added = service("added", address, Protocol.UDP, (Endpoint(pod, 8081, True),))
    plan = node_plan()
    services = {**plan.services, added.key: added}
    asyncio.run(bring(node.modes[0], NodePlan(plan.settings, services)))
    with node.lab.netns(pod).socket(pod, "UDP") as end:
        end.settimeout(WAIT)
        with node.lab.netns(NODE).socket(address, "UDP") as client:
            client.settimeout(WAIT)
            client.connect((address, 80))
            client.send(b"nobody listens")
            with pytest.raises(ConnectionRefusedError):
                client.recv(100)
            end.bind((pod, 8081))
            client.send(b"?")
            end.connect(end.recvfrom(100)[1])
        end.send(b"the client has gone")
        with pytest.raises(ConnectionRefusedError):
            end.recv(100)


def test_a_datagram_that_a_socket_program_has_sent_somewhere_stays_there(node: Node) -> None:
    """An endpoint may have another Service's address and port; nobody is translated twice."""
    chained = service("chained", "10.96.0.20", Protocol.UDP, (Endpoint(VIP, 80, False),))
    plan = node_plan()
    services = {**plan.services, chained.key: chained}
    asyncio.run(bring(node.modes[0], NodePlan(plan.settings, services)))
    with node.socket("10.96.0.20", "UDP", NODE) as sock:
        sock.connect(("10.96.0.20", 80))
        sock.send(b"?")  # passes the programs at once
    flows = HashMap.pinned(node.pins / "maps/flows")
    hook, kind = layout.OFFSETS["flow_key"]["hook"], layout.OFFSETS["flow"]["kind"]
    found = [key[hook] for key, value in flows.items() if value[kind] == TO_ENDPOINT]
    flows.close()
    assert EGRESS not in found  # the lab's router may send it back


ODD = [
    *[(VIP, 0), ("255.255.255.255", 80), ("224.0.0.1", 80), ("0.0.0.0", 0), ("127.0.0.1", 0)],
    *[("::", 0), ("ff02::1", 80), ("fe80::1", 80), (f"::ffff:{VIP}", 0), ("::ffff:0.0.0.0", 1)],
]


def outcome(sock: socket.socket, action: Callable[[], object]) -> str:
    """How a system call ends."""
    sock.settimeout(0)
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


@pytest.mark.parametrize(("address", "port"), ODD)
@pytest.mark.parametrize("kind", ["TCP", "UDP"])
def test_what_is_for_no_service_ends_as_without_programs(
    node: Node, kind: str, address: str, port: int
) -> None:
    ways: list[Callable[[socket.socket], object]] = [lambda s: s.connect((address, port))]
    if kind == "UDP":
        ways.append(lambda s: s.sendto(b"?", (address, port)))
    for way in ways:
        found = []
        for make in (node.socket, node.lab.netns(LOOKER).socket):
            with make(address, kind) as sock:
                found.append(outcome(sock, functools.partial(way, sock)))
        if not (address.endswith(VIP) and port == 0):
            assert found[0] == found[1]
        else:  # an address of a Service refuses ports that it does not serve
            assert found[0] in ("ECONNREFUSED", found[1])


def test_a_socket_whose_connection_has_failed_may_go_elsewhere(node: Node) -> None:
    refusing = service("refusing", "10.96.0.20", Protocol.TCP, (Endpoint(POD, 8099, True),))
    plan = node_plan()
    services = {**plan.services, refusing.key: refusing}
    asyncio.run(bring(node.modes[0], NodePlan(plan.settings, services)))
    with node.socket("10.96.0.20") as sock:
        sock.settimeout(None)  # with one, Linux would say ECONNABORTED to the next attempt
        with pytest.raises(ConnectionRefusedError):
            sock.connect(("10.96.0.20", 80))
        node.lab.serve(POD, 8099, "TCP")
        sock.connect((POD, 8099))
        assert sock.getpeername() == (POD, 8099)


def test_a_socket_may_change_its_mind_again_and_again(node: Node) -> None:
    """Connected to a Service, to an endpoint, to nobody (AF_UNSPEC), and to a Service."""
    unspecified = ctypes.create_string_buffer(16)
    libc = ctypes.CDLL(None, use_errno=True)
    with node.socket(VIP, "UDP") as sock:
        for _ in range(50):
            sock.connect((VIP, 80))
            assert sock.getpeername() == (VIP, 80)
            assert ask(sock).endswith(":8080")
            sock.connect((POD, 8080))
            assert sock.getpeername() == (POD, 8080)
            assert libc.connect(sock.fileno(), unspecified, 16) == 0
            with pytest.raises(OSError, match="not connected"):
                sock.getpeername()
