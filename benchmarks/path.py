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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import world
from benchmarks.ebpf_place import Place
from benchmarks.figures import Figure, figure
from benchmarks.nft_world import NftFlat, endpoints, service
from benchmarks.node import Netns, Node
from steersman.modes.ebpf.bpf import TCX_EGRESS, TCX_INGRESS, Link
from steersman.modes.ebpf.probe import load, tcx

SERVER, POD, OUTSIDE = "10.0.0.1", "10.0.0.2", "192.0.2.2"
_GATEWAY, _NODE = "10.0.0.3", "192.0.2.1"
_NODE_PORT = 30080
_ROUND = 20
"""Connections that one client makes before it is another one's turn."""
_REQUEST = b"x" * 64
_LINGER = struct.pack("ii", 1, 0)  # a reset: no port of the client's is left waiting
_SCHED_CLS = 3  # BPF_PROG_TYPE_SCHED_CLS
_NEXT = bytes.fromhex("b4000000ffffffff9500000000000000")  # w0 = -1; exit
MODES = ("iptables-legacy", "iptables-nft", "nftables", "ebpf")


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
        self, plot: Plot, netns: Netns, target: tuple[str, int], place: Place | None = None
    ) -> None:
        """Make a client; of a node whose sockets are balanced where a place is given."""
        self._plot, self._netns, self._target = plot, netns, target
        self._within = place.inside if place else nullcontext
        self.times: list[float] = []

    def round(self) -> None:
        """Time some connections: connect, a request, its answer, close."""
        self._netns.enter()
        with self._within():
            for _ in range(_ROUND):
                begun = time.perf_counter()
                self._exchange()
                self.times.append(time.perf_counter() - begun)

    def _exchange(self) -> None:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
            client.connect(self._target)
            with self._plot.server.accept()[0] as peer:
                client.send(_REQUEST)
                peer.send(peer.recv(64))
                client.recv(64)

    @property
    def p50(self) -> float:
        """Median, in microseconds."""
        return statistics.median(self.times) * 1e6

    def beside(self, other: Client) -> float:
        """How many times as long as another's a connection takes, median of all rounds.

        Round by round, for the machine's own pace changes from one second to the next.
        """
        return statistics.median(a / b for a, b in zip(self.rounds, other.rounds, strict=True))

    @property
    def rounds(self) -> list[float]:
        """Median of each round, in seconds."""
        firsts = range(0, len(self.times), _ROUND)
        return [statistics.median(self.times[n : n + _ROUND]) for n in firsts]


def target_service(number: int, protocol: str = "TCP") -> tuple[bytes, bytes]:
    """A Service with a node port whose one endpoint is the server."""
    raw = json.loads(world.service(number))
    raw["spec"]["type"] = "NodePort"
    raw["spec"]["ports"][0] |= {"nodePort": _NODE_PORT, "protocol": protocol}
    ends = json.loads(world.endpoint_slice(number, [SERVER]))
    ends["ports"][0]["protocol"] = protocol
    return json.dumps(raw).encode(), json.dumps(ends).encode()


def node_with(mode: str, services: int, protocol: str = "TCP") -> tuple[Node, str]:
    """A node with Services, and the address of the one that came last."""
    node = Node(mode.removeprefix("iptables-"), services)
    raw, ends = target_service(services, protocol)
    node.event("Service", raw)
    node.event("EndpointSlice", ends)
    return node, world.cluster_ip(services)


def _upstream(services: int) -> tuple[Any, str]:
    flat = NftFlat(services)
    flat.load((*service(services, [SERVER]), *endpoints(services, [SERVER])))
    return flat, world.cluster_ip(services)


class Ways:
    """Every way to the server through one node."""

    def __init__(
        self,
        name: str,
        make: Callable[[], tuple[Any, str]],
        node_port: bool,
        client: type[Client] = Client,
    ) -> None:
        node, address = make()
        self.name, self._node, self.plot = name, node, Plot(node.netns)
        if isinstance(node, Node):
            node.look()
            node.sync()
        elif isinstance(node, Bare):
            node.netns.enter()
            node.ready()
        place = node.place if isinstance(node, Node) else None
        self.direct = client(self.plot, self.plot.pod, (SERVER, 8080), place)
        self.service = client(self.plot, self.plot.pod, (address, 80), place)
        self.from_outside = client(self.plot, self.plot.outside, (SERVER, 8080))
        self.node_port = client(self.plot, self.plot.outside, (_NODE, _NODE_PORT))
        self.clients = [self.direct, self.service]
        self.clients += [self.from_outside, self.node_port] if node_port else []

    def close(self) -> None:
        self.plot.close()
        self._node.close()


def _measure(services: int, rounds: int, modes: Sequence[str]) -> list[Figure]:
    bare = Ways("no rules", lambda: (Bare(), SERVER), node_port=False)
    flat = Ways("upstream's", functools.partial(_upstream, services), node_port=False)
    ways = [Ways(m, functools.partial(node_with, m, services), node_port=True) for m in modes]
    idle = [Ways("idle programs", lambda: (_Idle(), SERVER), node_port=False)] if tcx() else []
    everyone = [*bare.clients[:1], bare.from_outside, *flat.clients[1:]]
    everyone += [client for way in idle for client in (way.direct, way.from_outside)]
    everyone += [client for way in ways for client in way.clients]
    for _ in range(rounds):
        for client in everyone:
            client.round()
    out = _figures("nftables, upstream's", services, flat, bare)[:1]
    for way in idle:
        out += _floor(services, way, bare)
    for way in ways:
        out += _figures(way.name, services, way, bare)
    for way in (bare, flat, *idle, *ways):
        way.close()
    return out


def _compared(name: str, mode: str, services: int, ours: Client, other: Client) -> Figure:
    compared = figure(name, mode, services, (ours.p50, "us"), other.p50)
    return msgspec.structs.replace(compared, ratio=round(ours.beside(other), 3))


def _floor(services: int, idle: Ways, bare: Ways) -> list[Figure]:
    """What programs on devices cost that do nothing."""
    name = "empty programs, direct"
    return [
        _compared(f"{name}, {where}", idle.name, services, mine, other)
        for where, mine, other in (
            ("pod", idle.direct, bare.direct),
            ("outside", idle.from_outside, bare.from_outside),
        )
    ]


def _figures(mode: str, services: int, way: Ways, bare: Ways) -> list[Figure]:
    own = [_compared("ClusterIP from a pod", mode, services, way.service, bare.direct)]
    if way.direct.times:
        own += [
            _compared("  direct, same node", mode, services, way.service, way.direct),
            _compared("NodePort from outside", mode, services, way.node_port, bare.from_outside),
            _compared("  direct, same node", mode, services, way.node_port, way.from_outside),
            _compared("no Service, from a pod", mode, services, way.direct, bare.direct),
            _compared("  from outside", mode, services, way.from_outside, bare.from_outside),
        ]
    return own


class Bare:
    """A node that only forwards."""

    def __init__(self) -> None:
        self.netns = Netns()

    def ready(self) -> None:
        """Do nothing more."""

    def close(self) -> None:
        self.netns.close()


class _Idle(Bare):
    """One that has programs on its devices, too, which do nothing: less than that none can cost."""

    def __init__(self) -> None:
        super().__init__()
        self._links: list[Link] = []

    def ready(self) -> None:
        """Attach the programs."""
        program = load(_SCHED_CLS, 0, _NEXT)
        for _, name in socket.if_nameindex():
            if name != "lo":
                index = socket.if_nametoindex(name)
                self._links += [Link.attach(program, index, p) for p in (TCX_INGRESS, TCX_EGRESS)]
        os.close(program)

    def close(self) -> None:
        for link in self._links:
            link.close()
        super().close()


def run(quick: bool) -> list[Figure]:
    """Measure at 1, 1,000 and 10,000 Services (100 when quick)."""
    sizes = (100,) if quick else (1, 1_000, 10_000)
    modes = tuple(filter(None, os.environ.get("MODES", "").split(","))) or MODES
    return [each for size in sizes for each in _measure(size, 10 if quick else 100, modes)]
