"""The way of a packet: connections through a Service beside direct ones, in every mode.

A pod (or a machine outside) and a server in network namespaces of their own, with the node between
them, which holds so many Services; the one that is measured came last. All sockets belong to one
thread, so that nothing is measured but the kernel's work. Modes take turns in one run.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import statistics
import struct
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import world
from benchmarks.ebpf_place import Place
from benchmarks.figures import Figure, chosen, chosen_sizes, figure
from benchmarks.nft_world import NftFlat, endpoints, service
from benchmarks.node import Netns, Node
from steersman.host.libbpf import load_program
from steersman.modes.ebpf.bpf import CGROUP_ATTACH_TYPES, TCX_EGRESS, TCX_INGRESS, Link
from steersman.modes.ebpf.probe import tcx

SERVER, POD, OUTSIDE = "10.0.0.1", "10.0.0.2", "192.0.2.2"
_GATEWAY, _NODE = "10.0.0.3", "192.0.2.1"
_NODE_PORT = 30080
_ROUND = 20
"""Connections that one client makes before it is another one's turn."""
_REQUEST = b"x" * 64
_CHUNK = memoryview(bytes(1 << 18))
_arrived = bytearray(len(_CHUNK))
_LINGER = struct.pack("ii", 1, 0)  # a reset: no port of the client's is left waiting
_SCHED_CLS, _CGROUP_SOCK, _CGROUP_SOCK_ADDR = 3, 9, 18  # BPF_PROG_TYPE_*
_NEXT = bytes.fromhex("b4000000ffffffff9500000000000000")  # w0 = -1; exit
_ALLOW = bytes.fromhex("b4000000010000009500000000000000")  # w0 = 1; exit
MODES = ("iptables-legacy", "iptables-nft", "nftables", "ebpf", "userspace")
NAMED = ("userspace-nft", "ebpf-fast")
"""Measured if MODES names them: at 10,000 Services one process has no descriptors for all."""
_POLICY = """
table ip filter {
    chain forward {
        type filter hook forward priority 0; policy accept;
        ct state established,related accept
        ct state invalid drop
        ip saddr 10.0.0.0/8 accept
    }
}
"""
"""What a node's firewall has at least: it makes conntrack see every packet."""
POD_DIRECT, OUTSIDE_DIRECT, NODE_DIRECT = (
    f"no Service, from {where}" for where in ("a pod", "outside", "the node")
)
CLUSTER_IP, NODE_PORT, NODE_CLUSTER_IP = (
    "ClusterIP from a pod",
    "NodePort from outside",
    "ClusterIP from the node",
)
DIRECT = {CLUSTER_IP: POD_DIRECT, NODE_PORT: OUTSIDE_DIRECT, NODE_CLUSTER_IP: NODE_DIRECT}
"""The way to the same server without a Service."""


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def _linked(node: Netns, device: str, address: str, gateway: str) -> Netns:
    """A namespace with one address, behind a device of the node's."""
    node.enter()
    other = Netns()
    _ip(f"link add eth0 type veth peer name {device} netns {node.path}")
    _ip(f"addr add {address}/32 dev eth0", "link set eth0 up")
    _ip(f"route add {gateway}/32 dev eth0", f"route add default via {gateway}")
    node.enter()
    _ip(f"addr add {gateway}/32 dev {device}", f"link set {device} up")
    _ip(f"route add {address}/32 dev {device}")
    return other


class Plot:
    """The namespaces around one node, and the server."""

    def __init__(self, node: Netns) -> None:
        node.enter()
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        self.pod = _linked(node, "pod", POD, _GATEWAY)
        self.outside = _linked(node, "outside", OUTSIDE, _NODE)
        self.inside = _linked(node, "server", SERVER, _GATEWAY)
        node.enter()
        _ip(f"route add default via {OUTSIDE}")  # addresses of Services have a route, as anywhere
        self.inside.enter()
        self.server = socket.create_server((SERVER, 8080), backlog=1024)
        self.datagrams = socket.socket(type=socket.SOCK_DGRAM)
        self.datagrams.bind((SERVER, 8080))

    def close(self) -> None:
        self.server.close()
        self.datagrams.close()
        for each in (self.pod, self.outside, self.inside):
            each.close()


class Client:
    """Connects to an address from one of the namespaces."""

    def __init__(
        self,
        plot: Plot,
        netns: Netns,
        target: tuple[str, int],
        place: Place | None = None,
        relay: Node | None = None,
    ) -> None:
        """Make a client, whose sockets are balanced at a place, or whose bytes a node relays."""
        self._plot, self._netns, self._target = plot, netns, target
        self._within = place.inside if place else nullcontext
        self._relay = relay
        self.times: list[float] = []

    def round(self) -> None:
        """Time some exchanges."""
        self._netns.enter()
        with self._within():
            for _ in range(_ROUND):
                if self._relay:  # which works in the node's
                    self._netns.enter()
                begun = time.perf_counter()
                self.exchange()
                self.times.append(time.perf_counter() - begun)

    def exchange(self) -> None:
        """Connect, send a request, get its answer, close."""
        with self.connected() as client, self.accepted() as peer:
            client.send(_REQUEST)
            self.wait_for(peer)
            peer.send(peer.recv(64))
            self.wait_for(client)
            client.recv(64)

    def connected(self) -> socket.socket:
        """Open a connection."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
        client.connect(self._target)
        return client

    def accepted(self) -> socket.socket:
        """Return the server's end of it."""
        self.wait_for(self._plot.server)
        return self._plot.server.accept()[0]

    def wait_for(self, sock: socket.socket) -> None:
        """Let a relay work until something can be read; elsewhere the kernel has done all."""
        if self._relay:
            self._relay.serve_until(sock)

    def close(self) -> None:
        """Close sockets that stay open between two rounds; here there are none."""

    unit = "us"

    @property
    def value(self) -> float:
        """The measured value, in `unit`."""
        return self.p50

    def ratio(self, other: Client) -> float:
        """Compare the values, round by round: the machine's pace changes within a second."""
        return statistics.median(a / b for a, b in zip(self.rounds, other.rounds, strict=True))

    @property
    def p50(self) -> float:
        """Median, in microseconds."""
        return statistics.median(self.times) * 1e6

    @property
    def rounds(self) -> list[float]:
        """Median of each round, in seconds."""
        firsts = range(0, len(self.times), _ROUND)
        return [statistics.median(self.times[n : n + _ROUND]) for n in firsts]


class Rate(Client):
    """One whose exchanges are small parts of a stream: the value is how much goes in a second."""

    amount: float
    """Of an exchange; in a microsecond that is one `unit`."""

    @property
    def value(self) -> float:
        """What goes in a second."""
        return self.amount / self.p50

    def ratio(self, other: Client) -> float:
        """Compare the values, round by round."""
        return statistics.median(b / a for a, b in zip(self.rounds, other.rounds, strict=True))


class Stream(Rate):
    """Sends through one long connection, a quarter of a megabyte in an exchange."""

    amount, unit = float(len(_CHUNK)), "MB/s"
    _ends: tuple[socket.socket, socket.socket] | None = None

    def exchange(self) -> None:
        """Send until all has arrived."""
        if self._ends is None:
            client = self.connected()
            self._ends = client, self.accepted()
            client.setblocking(False)
        client, peer = self._ends
        unsent = left = len(_CHUNK)
        while left:
            with suppress(BlockingIOError):
                unsent -= client.send(_CHUNK[:unsent])
            self.wait_for(peer)
            left -= peer.recv_into(_arrived)

    def close(self) -> None:
        """Close both ends."""
        for end in self._ends or ():
            end.close()


def target_service(number: int, protocol: str = "TCP") -> tuple[bytes, bytes]:
    """A Service with a node port whose one endpoint is the server."""
    raw = json.loads(world.service(number))
    raw["spec"]["type"] = "NodePort"
    raw["spec"]["ports"][0] |= {"nodePort": _NODE_PORT, "protocol": protocol}
    ends = json.loads(world.endpoint_slice(number, [SERVER]))
    ends["ports"][0]["protocol"] = protocol
    return json.dumps(raw).encode(), json.dumps(ends).encode()


def node_with(
    mode: str, services: int, protocol: str = "TCP", make: type[Node] = Node
) -> tuple[Node, str]:
    """A node with Services, and the address of the one that came last."""
    node = make(mode.removeprefix("iptables-"), services)
    raw, ends = target_service(services, protocol)
    node.event("Service", raw)
    node.event("EndpointSlice", ends)
    return node, world.cluster_ip(services)


def _upstream(services: int) -> tuple[Any, str]:
    flat = NftFlat(services)
    flat.load((*service(services, [SERVER]), *endpoints(services, [SERVER])))
    return flat, world.cluster_ip(services)


class Ways:
    """Ways to the server through one node."""

    def __init__(
        self,
        name: str,
        make: Callable[[], tuple[Any, str]],
        names: Collection[str] = (*DIRECT, *DIRECT.values()),
        client: type[Client] = Client,
        *,
        policy: bool = False,
    ) -> None:
        """Make a node, the namespaces around it, and a client for each of the named ways."""
        self.name = name
        self.node, address = make()
        netns = self.node.netns
        self.plot = Plot(netns)
        if policy:
            netns.enter()
            subprocess.run(["nft", "-f", "-"], input=_POLICY, text=True, check=True)
        node = self.node if isinstance(self.node, Node) else None
        if node:
            node.look()
            node.sync()
        elif isinstance(self.node, Bare):
            netns.enter()
            self.node.ready()
        plot, service = self.plot, (address, 80)
        ways = {
            POD_DIRECT: (plot.pod, (SERVER, 8080)),
            CLUSTER_IP: (plot.pod, service),
            OUTSIDE_DIRECT: (plot.outside, (SERVER, 8080)),
            NODE_PORT: (plot.outside, (_NODE, _NODE_PORT)),
            NODE_DIRECT: (netns, (SERVER, 8080)),
            NODE_CLUSTER_IP: (netns, service),
        }
        relay, place = node if node and node.relays else None, getattr(self.node, "place", None)
        self.clients = {
            way: client(
                *(plot, source, target),
                None if source is plot.outside else place,  # also where no Service is meant
                relay if way in DIRECT else None,
            )
            for way, (source, target) in ways.items()
            if way in names
        }

    def close(self) -> None:
        for each in self.clients.values():
            each.close()
        self.plot.close()
        self.node.close()


def take_turns(ways: Sequence[Ways], rounds: int) -> None:
    """Let every client have its rounds, one after the other: the machine's pace changes for all."""
    for _ in range(rounds):
        for way in ways:
            for each in way.clients.values():
                each.round()


def compared(title: str, services: int, way: Ways, bare: Ways) -> list[Figure]:
    """Each way beside the direct one of a node without rules, and beside that of its own node."""
    out = []
    for name, ours in way.clients.items():
        direct = DIRECT.get(name, name)
        pairs = [(title + name, bare.clients[direct])]
        if name != direct and direct in way.clients:
            pairs.append(("  direct, same node", way.clients[direct]))
        for text, other in pairs:
            found = figure(text, way.name, services, (ours.value, ours.unit), other.value)
            out.append(msgspec.structs.replace(found, ratio=round(ours.ratio(other), 3)))
    return out


def measured(
    title: str,
    services: int,
    rounds: int,
    ways: Sequence[Ways],
    client: type[Client] = Client,
) -> list[Figure]:
    """Compare ways with a node without rules, in turn; close them."""
    bare = Ways("no rules", lambda: (Bare(), SERVER), tuple(DIRECT.values()), client)
    for _ in range(rounds):
        for way in (bare, *ways):
            for each in way.clients.values():
                each.round()
    out = [each for way in ways for each in compared(title, services, way, bare)]
    for way in (bare, *ways):
        way.close()
    return out


def _set_up(services: int, rounds: int, modes: Sequence[str]) -> list[Figure]:
    """Connections, through upstream's rules and programs that do nothing, too."""
    upstream, shown = functools.partial(_upstream, services), (CLUSTER_IP, NODE_CLUSTER_IP)
    ways = [Ways("nftables, upstream's", upstream, shown)]
    if tcx():
        ways.append(Ways("empty programs", lambda: (_Idle(), SERVER), tuple(DIRECT.values())))
    ways += [Ways(mode, functools.partial(node_with, mode, services)) for mode in modes]
    return measured("", services, rounds, ways)


def _long(services: int, rounds: int, modes: Sequence[str]) -> list[Figure]:
    """One long connection from a pod."""
    ways = [
        Ways(mode, functools.partial(node_with, mode, services), (CLUSTER_IP, POD_DIRECT), Stream)
        for mode in modes
    ]
    return measured("long connection, ", services, rounds, ways, Stream)


def _with_policy(services: int, rounds: int, modes: Sequence[str]) -> list[Figure]:
    """Connections, and long ones, through nodes with a firewall; beside direct, same node."""
    ways = (POD_DIRECT, CLUSTER_IP, OUTSIDE_DIRECT, NODE_PORT)
    out = []
    for title, client in (("firewall, ", Client), ("firewall, long, ", Stream)):
        nodes = [
            Ways(mode, functools.partial(node_with, mode, services), ways, client, policy=True)
            for mode in modes
        ]
        take_turns(nodes, rounds)
        for each in nodes:
            for way in (CLUSTER_IP, NODE_PORT):
                ours, direct = each.clients[way], each.clients[DIRECT[way]]
                values = (ours.value, ours.unit), direct.value
                found = figure(title + way, each.name, services, *values)
                ratio = round(ours.ratio(direct), 3)
                out.append(msgspec.structs.replace(found, ratio=ratio))
            each.close()
    return out


class Bare:
    """A node that only forwards."""

    def __init__(self) -> None:
        self.netns = Netns()

    def ready(self) -> None:
        """Do nothing more."""

    def close(self) -> None:
        self.netns.close()


class _Idle(Bare):
    """One with programs that do nothing on its devices and at sockets: less than none can cost."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Place()
        self._links: list[Link] = []

    def ready(self) -> None:
        """Attach programs, to devices and to the two hooks of a socket that connects."""
        program = load_program(_SCHED_CLS, 0, _NEXT)
        for _, name in socket.if_nameindex():
            if name != "lo":
                index = socket.if_nametoindex(name)
                self._links += [Link.attach(program, index, p) for p in (TCX_INGRESS, TCX_EGRESS)]
        os.close(program)
        cgroup = os.open(self.place.cgroup, os.O_RDONLY)
        for kind, hook in ((_CGROUP_SOCK_ADDR, "sm_connect4"), (_CGROUP_SOCK, "sm_release")):
            program = load_program(kind, CGROUP_ATTACH_TYPES[hook], _ALLOW)
            self._links.append(Link.attach(program, cgroup, CGROUP_ATTACH_TYPES[hook]))
            os.close(program)
        os.close(cgroup)

    def close(self) -> None:
        for link in self._links:
            link.close()
        self.place.close()
        super().close()


def run(quick: bool) -> list[Figure]:
    """Measure at 1, 1,000 and 10,000 Services (100 when quick); PARTS, MODES and SIZES choose."""
    sizes, rounds = chosen_sizes((100,) if quick else (1, 1_000, 10_000)), 10 if quick else 100
    modes, parts = chosen("MODES", MODES, NAMED), chosen("PARTS", ("setup", "long"), ("policy",))
    out = []
    for size in sizes:
        out += _set_up(size, rounds, modes) if "setup" in parts else []
        out += _long(size, rounds, modes) if "long" in parts else []
        out += _with_policy(size, rounds, modes) if "policy" in parts else []
    return out
