"""UDP when endpoints go: which clients get an error, which stay, and which are balanced again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from steersman.host.netns import namespaces
from steersman.model.conntrack import Stale, pack_socket
from steersman.model.names import Family, Protocol
from steersman.model.plan import Endpoint, NodePlan
from steersman.modes.ebpf.bpf import HashMap
from steersman.modes.ebpf.mode import EbpfMode
from steersman.modes.ebpf.sockets import destroy
from tests.support.builders.ebpf_node_plan import (
    CLIENT,
    ENDPOINTS,
    LAYOUT,
    LOOKER,
    NODE,
    NODE6,
    NODE_PORT,
    POD6,
    VIP,
    VIP6,
    bring,
    node_plan,
    service,
)
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.ebpf_node import MARKS, Node, programmed, serving

pytestmark = MARKS
UDP = bytes((17,))
OTHER6, LOOKER6, CLIENT6 = "fd00:10:244:1::6", "fd00:10:244:1::100", "2001:db8:9::9"
BOTH = Layout(
    LAYOUT.interfaces,
    (*LAYOUT.outside, CLIENT6),
    (*LAYOUT.pods, Pod(OTHER6), Pod(LOOKER6)),
)
"""The lab with clients and a second endpoint in IPv6."""
ENDPOINTS6 = tuple(Endpoint(ip, 8080, local=True) for ip in (POD6, OTHER6))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with serving("UDP") as made:
        made.extend(BOTH)
        made.serve(OTHER6, 8080, "UDP")
        yield made


@pytest.fixture
def node(lab: Lab) -> Iterator[Node]:
    with programmed(lab, node_plan()) as made:
        yield made


@pytest.fixture
def dual_stack(node: Node) -> Node:
    """The node whose Service has two endpoints in IPv6 as well."""
    asyncio.run(bring(node.modes[0], with_both(node_plan())))
    return node


def with_both(plan: NodePlan) -> NodePlan:
    web6 = service("web", VIP6, Protocol.UDP, ENDPOINTS6)
    return NodePlan(plan.settings, {**plan.services, web6.key: web6})


def remove(node: Node, name: str, plan: Callable[[NodePlan], NodePlan] = lambda plan: plan) -> int:
    """Take one endpoint away, and forget what led there; how much that was."""
    rest = tuple(end for end in ENDPOINTS if str(end) != name)
    mode = node.modes[0]
    asyncio.run(bring(mode, plan(node_plan(rest))))
    sources = frozenset(pack_socket(end.ip, end.port) for end in rest)
    stale = Stale(
        Family.IPV4,
        {UDP + pack_socket(VIP, 80): sources},
        {UDP + NODE_PORT.to_bytes(2, "big"): sources},
    )
    return forget(mode, stale, stale)


def forget(mode: EbpfMode, stale: Stale, confirmed: Stale) -> int:
    """Forget stale connections that are `confirmed` to be stale; return their number."""

    async def forget() -> int:
        table = mode.connection_table
        assert table is not None
        found = await mode.worker.do_slowly(table.find_stale(stale))
        return await mode.worker.do(table.delete_stale, found, confirmed) if found else 0

    return asyncio.run(forget())


def ask(sock: socket.socket) -> str:
    sock.send(b"?")
    return sock.recv(100).decode().split()[0]


def ask_from(sock: socket.socket, target: tuple[str, int]) -> str:
    sock.sendto(b"?", target)
    return sock.recv(100).decode().split()[0]


@pytest.mark.parametrize("at", [LOOKER, NODE])
def test_only_who_is_connected_to_what_is_gone_is_told(node: Node, at: str) -> None:
    with (
        node.socket(VIP, "UDP", at) as connected,
        node.socket("::", "UDP", at) as mapped,
        node.socket(VIP, "UDP", at) as direct,
        node.socket(VIP, "UDP", at) as loose,
    ):
        connected.connect((VIP, 80))
        mapped.connect((f"::ffff:{VIP}", 80))
        names = [ask(connected), ask(mapped)]
        direct.connect((names[0].rpartition(":")[0], 8080))
        assert ask(direct) == names[0]
        assert ask_from(loose, (VIP, 80))
        for name in dict.fromkeys(names):
            assert remove(node, name) == names.count(name)
        for sock in (connected, mapped):
            with pytest.raises(OSError, match=r"abort|required|not connected"):
                ask(sock)
        assert ask(direct) == names[0], "who never asked for the Service is left alone"
        assert ask_from(loose, (VIP, 80)) not in names[-1:]
        for sock in (connected, mapped):  # and both can be used again
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            sock.connect((VIP if sock is connected else f"::ffff:{VIP}", 80))
            assert ask(sock) not in names[-1:]


def test_who_is_silent_for_long_is_told_too(node: Node) -> None:
    """Datagrams of others evict an entry of a socket and its endpoint (LRU)."""
    with node.socket(VIP, "UDP") as sock:
        sock.connect((VIP, 80))
        name = ask(sock)
        reverses = HashMap.pinned(node.pins / "maps/reverses")
        assert reverses.delete_all([key for key, _ in reverses.items()])
        assert remove(node, name) == 1
        with pytest.raises(OSError, match=r"abort|required|not connected"):
            ask(sock)


def test_an_unconnected_socket_stays_where_it_was_while_others_go(node: Node) -> None:
    with node.socket(VIP, "UDP") as sock:
        first = ask_from(sock, (VIP, 80))
        others = [str(end) for end in ENDPOINTS if str(end) != first]
        for name in others:
            assert remove(node, name) == 0
            assert ask_from(sock, (VIP, 80)) == first
        asyncio.run(bring(node.modes[0], node_plan()))
        assert ask_from(sock, (VIP, 80)) == first
        remove(node, first)
        assert ask_from(sock, (VIP, 80)) in others


def test_clients_outside_begin_anew(node: Node) -> None:
    with node.lab.netns(CLIENT).socket(CLIENT, "UDP") as sock:
        sock.settimeout(60)
        sock.connect((NODE, NODE_PORT))
        first = ask(sock)
        other = next(str(end) for end in ENDPOINTS if str(end) != first)
        assert remove(node, other) == 0
        assert ask(sock) == first
        assert remove(node, first) == 1
        assert ask(sock) != first


@pytest.mark.parametrize(("at", "at6"), [(CLIENT, CLIENT6), (LOOKER, LOOKER6)])
def test_clients_of_the_other_family_keep_their_endpoint(
    dual_stack: Node, at: str, at6: str
) -> None:
    """Node ports have the same number in both families; the table holds flows of both."""
    node = dual_stack
    with ExitStack() as stack:

        def clients(source: str, target: str) -> list[tuple[socket.socket, str]]:
            made = []
            for _ in range(8):
                cgroup = None if source in (CLIENT, CLIENT6) else node.cgroup
                sock = node.lab.netns(source).socket(target, "UDP", cgroup)
                stack.enter_context(sock).settimeout(60)
                sock.connect((target, NODE_PORT))
                made.append((sock, ask(sock)))
            return made

        ipv4, ipv6 = clients(at, NODE), clients(at6, NODE6)
        gone = ipv4[0][1]
        moved = [name for _, name in ipv4 if name == gone]
        assert remove(node, gone, with_both) == len(moved)
        staying = [*ipv6, *((sock, name) for sock, name in ipv4 if name != gone)]
        for sock, name in staying:
            assert ask(sock) == name


def test_what_is_no_longer_stale_after_the_look_is_kept(node: Node) -> None:
    """An endpoint that came meanwhile may have its first clients already."""
    with node.lab.netns(CLIENT).socket(CLIENT, "UDP") as sock, node.socket(VIP, "UDP") as inside:
        sock.settimeout(60)
        sock.connect((NODE, NODE_PORT))
        inside.connect((VIP, 80))
        names = ask(sock), ask(inside)
        everything = Stale(
            Family.IPV4,
            {UDP + pack_socket(VIP, 80): frozenset()},
            {UDP + NODE_PORT.to_bytes(2, "big"): frozenset()},
        )
        mode = node.modes[0]
        nothing = Stale(Family.IPV4, {}, {})
        assert forget(mode, everything, nothing) == 0
        assert (ask(sock), ask(inside)) == names
        assert forget(mode, nothing, everything) == 0
        assert forget(mode, everything, everything) == 2


def test_each_namespace_is_visited_once(tmp_path: Path) -> None:
    for name in ("1", "2", "self"):
        (tmp_path / "proc" / name / "ns").mkdir(parents=True)
    (tmp_path / "proc/1/ns/net").touch()
    (tmp_path / "proc/2/ns/net").hardlink_to(tmp_path / "proc/1/ns/net")
    (tmp_path / "names").mkdir()
    (tmp_path / "names/pod").touch()
    found = list(namespaces((tmp_path / "names", tmp_path / "proc", tmp_path / "none")))
    assert found[0] == tmp_path / "names/pod"
    assert len(found) == 2
    assert destroy(()) == 0
