"""The fast path of the ebpf mode: who takes it, and which packets the network stack keeps."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

from steersman.model.plan import Endpoint
from steersman.modes.ebpf.dump import dump
from tests.support.builders.ebpf_node_plan import (
    CLIENT,
    ENDPOINTS,
    LAYOUT,
    LOOKER,
    NODE,
    NODE6,
    NODE_PORT,
    OTHER,
    POD,
    POD6,
    REMOTE,
    VIP,
    VIP6,
    bring,
    node_plan,
)
from tests.support.lab.cluster import Lab, Pod
from tests.support.lab.ebpf_node import MARKS, WAIT, Node
from tests.support.lab.frames import UDP, packet
from tests.support.lab.namespace import sh

pytestmark = MARKS
HERE, ELSEWHERE = ENDPOINTS[:1], ENDPOINTS[2:]
CLIENT6, LOOKER6 = "2001:db8:99::9", "fd00:10:244:1::100"
HELD_OPEN = 8095
"""Port of a server that ends no connection."""
TICK = 0.05
"""Longer than a looked up route is used, in seconds."""
IP_RECVERR, IP_RECVTTL, IP_MTU_DISCOVER, IP_PMTUDISC_DO = 11, 12, 10, 2
DROP_FORWARDED = """
table inet filter {
    chain forward {
        type filter hook forward priority 0; policy accept;
        meta l4proto { tcp, udp } drop
    }
}
"""
STRICT = """
table inet filter {
    chain forward {
        type filter hook forward priority 0; policy accept;
        ct state invalid drop
    }
}
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    pods = (*LAYOUT.pods, Pod(LOOKER6))
    layout = dataclasses.replace(LAYOUT, outside=(CLIENT, CLIENT6), pods=pods)
    with Lab(layout) as made:
        for pod in pods:
            for protocol in ("TCP", "UDP"):
                made.serve(pod.address, 8080, protocol)
        yield made


@contextmanager
def node_with(lab: Lab, ends: tuple[Endpoint, ...], *, fast: bool = True) -> Iterator[Node]:
    made = Node(lab)
    made.options = msgspec.structs.replace(made.options, fast_path=fast)
    asyncio.run(bring(made.mode(), node_plan(ends)))
    try:
        yield made
    finally:
        asyncio.run(bring(made.modes[-1], None))
        made.close()


@pytest.fixture(params=[POD, REMOTE], ids=["here", "elsewhere"])
def endpoint(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def node(lab: Lab, endpoint: str) -> Iterator[Node]:
    with node_with(lab, HERE if endpoint == POD else ELSEWHERE) as made:
        yield made


@pytest.fixture
def near(lab: Lab) -> Iterator[Node]:
    with node_with(lab, HERE) as made:
        yield made


def sent_on(node: Node) -> int:
    """Count the packets that took the fast path."""
    return int(dict(line.split() for line in dump("counters", node.pins))["packet_fast"])


@contextmanager
def rules(lab: Lab, text: str) -> Iterator[None]:
    lab.run("nft", "-f", "-", stdin=text)
    try:
        yield
    finally:
        lab.run("nft", "delete", "table", "inet", "filter")


@contextmanager
def datagrams(node: Node) -> Iterator[socket.socket]:
    """A client outside that has had an answer through the node port."""
    with node.lab.netns(CLIENT).socket(CLIENT, "UDP") as client:
        client.settimeout(WAIT)
        client.connect((NODE, NODE_PORT))
        client.send(b"?")
        client.recv(100)
        yield client


# Who takes it


def test_a_pod_that_connects_to_a_cluster_ip(node: Node, endpoint: str) -> None:
    before = sent_on(node)
    answer = node.lab.probe(LOOKER, VIP, 80)
    assert answer.endpoint == f"{endpoint}:8080"
    assert answer.source == LOOKER
    assert sent_on(node) - before >= 6  # both directions, from the first packet on


@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_a_client_outside_that_connects_to_a_node_port(
    node: Node, endpoint: str, protocol: str
) -> None:
    before = sent_on(node)
    answer = node.lab.probe(CLIENT, NODE, NODE_PORT, protocol)
    assert answer.endpoint == f"{endpoint}:8080"
    assert answer.source in node.lab.node_addresses
    assert sent_on(node) - before >= (6 if protocol == "TCP" else 2)


@pytest.mark.parametrize(
    ("client", "address", "port", "protocol", "packets"),
    [
        (LOOKER6, VIP6, 80, "TCP", 6),
        (CLIENT6, NODE6, NODE_PORT, "TCP", 6),
        (CLIENT6, NODE6, NODE_PORT, "UDP", 2),
        (POD6, VIP6, 80, "UDP", 2),  # to itself
    ],
)
def test_ipv6(
    near: Node, client: str, address: str, port: int, protocol: str, packets: int
) -> None:
    before = sent_on(near)
    assert near.lab.probe(client, address, port, protocol).endpoint == f"[{POD6}]:8080"
    assert sent_on(near) - before >= packets


def test_what_goes_to_no_service_is_left_alone(near: Node) -> None:
    before = sent_on(near)
    for protocol in ("TCP", "UDP"):
        assert near.lab.probe(LOOKER, POD, 8080, protocol).endpoint == f"{POD}:8080"
        assert near.lab.probe(CLIENT, POD, 8080, protocol).endpoint == f"{POD}:8080"
    assert sent_on(near) == before


def test_ends_of_a_balanced_connection_that_come_again(near: Node) -> None:
    """From the same port, first through the Service, then to the endpoint itself."""
    for target, fast in (((VIP, 80), True), ((POD, 8080), False)):
        before = sent_on(near)
        with near.socket(LOOKER) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            near.lab.netns(LOOKER).call(partial(client.bind, (LOOKER, 4321)))
            client.connect(target)
            assert client.recv(100)
        assert (sent_on(near) > before) is fast


def test_without_the_option_nobody_takes_it(lab: Lab) -> None:
    with node_with(lab, HERE, fast=False) as node:
        assert lab.probe(LOOKER, VIP, 80).kind == "answered"
        assert lab.probe(CLIENT, NODE, NODE_PORT).kind == "answered"
        assert sent_on(node) == 0


# What it bypasses


@pytest.mark.parametrize("fast", [False, True])
def test_filters_of_forwarded_packets(lab: Lab, fast: bool) -> None:
    with node_with(lab, HERE, fast=fast), rules(lab, DROP_FORWARDED):
        expected = "answered" if fast else "timeout"
        wait = WAIT if fast else 0.5
        assert lab.probe(LOOKER, VIP, 80, timeout=wait).kind == expected
        assert lab.probe(CLIENT, NODE, NODE_PORT, "UDP", timeout=wait).kind == expected
        assert lab.probe(LOOKER, POD, 8080, timeout=0.5).kind == "timeout"


def test_rules_that_drop_what_conntrack_calls_invalid(node: Node) -> None:
    with rules(node.lab, STRICT):
        for _ in range(30):
            assert node.lab.probe(LOOKER, VIP, 80).kind == "answered"
            assert node.lab.probe(CLIENT, NODE, NODE_PORT).kind == "answered"


# Packets that the network stack keeps


def test_the_time_to_live(node: Node, endpoint: str) -> None:
    with datagrams(node) as client:
        client.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)
        client.setsockopt(socket.IPPROTO_IP, IP_RECVTTL, 1)
        before = sent_on(node)
        client.send(b"?")
        _, [(_, _, ttl)], _, _ = client.recvmsg(100, 100)
        assert sent_on(node) == before + 2
        assert int.from_bytes(ttl[:4], sys.byteorder) == (63 if endpoint == POD else 62)

        client.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 1)
        client.send(b"?")
        with pytest.raises(OSError, match="No route to host"):  # ICMP: time exceeded
            client.recv(100)
        assert sent_on(node) == before + 2


def test_fragments(node: Node) -> None:
    with datagrams(node) as client:
        before = sent_on(node)
        client.send(b"x" * 4000)
        assert client.recv(100)
        assert sent_on(node) == before + 1  # the answer


def test_a_packet_with_a_vlan_tag(near: Node) -> None:
    """That of a flow, as a device of the VLAN would get it: this node has none."""
    with datagrams(near) as client:
        port = client.getsockname()[1]
        plain = packet((CLIENT, port), (NODE, NODE_PORT), UDP, payload=b"?")
        plain = hardware_address(near.lab) + plain[6:]
        tagged = plain[:12] + b"\x81\x00\x00\x14" + plain[12:]
        for frame, packets in ((tagged, 0), (plain, 2)):
            before = sent_on(near)
            near.lab.netns(CLIENT).call(partial(send_frame, frame))
            if packets:
                assert client.recv(100)
            else:
                time.sleep(TICK)
            assert sent_on(near) - before == packets


def hardware_address(lab: Lab) -> bytes:
    text = lab.run("ip", "-o", "link", "show", "eth0").split("link/ether ")[1].split()[0]
    return bytes.fromhex(text.replace(":", ""))


def send_frame(frame: bytes) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind(("eth0", 0))
        sock.send(frame)


def test_an_icmp_error(lab: Lab) -> None:
    with (
        node_with(lab, (Endpoint(POD, 8099, True),)),
        lab.netns(CLIENT).socket(CLIENT, "UDP") as client,
    ):
        client.settimeout(WAIT)
        client.connect((NODE, NODE_PORT))
        client.send(b"?")
        with pytest.raises(ConnectionRefusedError):
            client.recv(100)


@contextmanager
def routed(lab: Lab, address: str, *otherwise: str) -> Iterator[None]:
    """Replace the node's route to an address for a while."""
    before = lab.run("ip", "route", "show", f"{address}/32").split()
    assert before
    lab.run("ip", "route", "replace", *otherwise)
    time.sleep(TICK)
    try:
        yield
    finally:
        lab.run("ip", "route", "replace", *before)


def test_a_packet_that_is_too_large(node: Node, endpoint: str) -> None:
    route = node.lab.run("ip", "route", "show", f"{endpoint}/32").split()
    sh(f"nsenter --net={node.lab.netns(CLIENT).path} ip route flush cache")
    with datagrams(node) as client, routed(node.lab, endpoint, *route, "mtu", "lock", "1200"):
        client.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
        client.send(b"x" * 1300)
        with pytest.raises(OSError, match="Message too long"):  # ICMP: fragmentation needed
            client.recv(100)


def test_large_packets_of_a_stream(node: Node, endpoint: str) -> None:
    """Those that devices divide are as large as their parts."""
    with stream(node, endpoint) as (client, server):
        before = forwarded(node.lab)
        for _ in range(20):
            client.sendall(bytes(50_000))
            left = 50_000
            while left:
                left -= len(server.recv(left))
        assert forwarded(node.lab) == before


def forwarded(lab: Lab) -> int:
    """Count the packets that the stack of the node has forwarded."""
    return int(lab.run("nstat", "-asz", "IpForwDatagrams").split()[-2])


# What changes while a connection is open


@contextmanager
def stream(node: Node, endpoint: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection that a pod has opened to an endpoint by the cluster IP."""
    plan = node_plan((Endpoint(endpoint, HELD_OPEN, endpoint == POD),))
    asyncio.run(bring(node.modes[-1], plan))
    with (
        node.lab.netns(endpoint).socket(endpoint, "TCP") as listening,
        node.socket(LOOKER) as client,
    ):
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((endpoint, HELD_OPEN))
        listening.listen()
        client.connect((VIP, 80))
        listening.settimeout(WAIT)
        with listening.accept()[0] as server:
            server.settimeout(WAIT)
            yield client, server


def arrives(ends: tuple[socket.socket, socket.socket], data: bytes) -> bool:
    client, server = ends
    client.sendall(data)
    server.settimeout(0.5)
    try:
        return server.recv(100) == data
    except TimeoutError:
        server.settimeout(WAIT)
        return False


def test_a_route_that_goes_and_comes_back(node: Node, endpoint: str) -> None:
    with stream(node, endpoint) as ends:
        assert arrives(ends, b"one")
        with routed(node.lab, endpoint, "blackhole", f"{endpoint}/32"):
            assert not arrives(ends, b"two")
            node.lab.run("ip", "route", "del", "blackhole", f"{endpoint}/32")
        assert ends[1].recv(100) == b"two"


@pytest.fixture
def bridged(lab: Lab) -> Iterator[str]:
    """A bridge as the way to REMOTE; yields the Ethernet address of its far end."""
    node, remote = (f"nsenter --net={each.path} ip" for each in (lab.node, lab.netns("remote")))
    name = Path(lab.netns("remote").path).name
    far = "02:00:00:00:99:02"
    for command in (
        f"{node} link add br9 up type bridge",
        f"{node} link add up9 up master br9 type veth peer name eth9 address {far} netns {name}",
        f"{remote} link set eth9 up",
        f"{node} neigh add 169.254.1.1 lladdr {far} dev br9 nud permanent",
    ):
        sh(command)
    with routed(lab, REMOTE, f"{REMOTE}/32", "via", "169.254.1.1", "dev", "br9", "onlink"):
        yield far
    sh(f"{node} link del up9")
    sh(f"{node} link del br9")


def test_a_neighbour_that_changes(lab: Lab, bridged: str) -> None:
    neighbour = ("ip", "neigh", "replace", "169.254.1.1", "dev", "br9", "nud", "permanent")
    with node_with(lab, ELSEWHERE) as node, stream(node, REMOTE) as ends:
        before = sent_on(node)
        assert arrives(ends, b"one")
        assert sent_on(node) > before
        lab.run(*neighbour, "lladdr", "02:00:00:00:77:77")
        assert not arrives(ends, b"two")
        lab.run(*neighbour, "lladdr", bridged)
        assert ends[1].recv(100) == b"two"


def test_an_endpoint_that_is_removed(near: Node) -> None:
    with stream(near, POD) as ends:
        asyncio.run(bring(near.modes[-1], node_plan(ENDPOINTS[1:2])))
        assert arrives(ends, b"the connection stays")
        assert near.lab.probe(LOOKER, VIP, 80).endpoint == f"{OTHER}:8080"
