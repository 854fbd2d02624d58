"""Packets: the first one of a connection, which the list of rules delays, and small datagrams."""

from __future__ import annotations

import socket
import statistics
import struct
import subprocess
import time

from benchmarks import datagrams, world
from benchmarks.figures import Figure, chosen, chosen_sizes, figure
from benchmarks.node import Flat, Netns, Node
from benchmarks.path import MODES, NAMED, SERVER

_SERVER = SERVER  # an address on lo; connections come from the node itself
_ROUND = 100
_IP_BIND_ADDRESS_NO_PORT = 24  # connect() chooses the port, as without bind()


def _addresses(source: str) -> list[str]:
    return [f"addr add {address}/32 dev lo" for address in dict.fromkeys((_SERVER, source))]


class _Client:
    """Connects to an address in a namespace, where a server listens on an endpoint's."""

    def __init__(self, netns: Netns, address: str, port: int, source: str = _SERVER) -> None:
        """Make a client; without a source of its own it is the endpoint that calls itself."""
        self._netns = netns
        self._source = source
        self._target = (address, port)
        netns.enter()
        for command in (*_addresses(source), "route add default dev lo"):
            subprocess.run(["ip", *command.split()], check=True)
        self._server = socket.create_server((_SERVER, 8080), backlog=1024)
        self.times: list[float] = []

    def connect(self) -> None:
        """Time some connections."""
        self._netns.enter()
        for _ in range(_ROUND):
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
                client.bind((self._source, 0))
                begun = time.perf_counter()
                client.connect(self._target)
                self.times.append(time.perf_counter() - begun)
                self._server.accept()[0].close()

    def close(self) -> None:
        self._server.close()

    @property
    def p50(self) -> float:
        """Median, in microseconds."""
        return statistics.median(self.times) * 1e6


def _through_node(variant: str, services: int) -> tuple[Node, _Client]:
    node = Node(variant, services)
    last = services - 1
    node.event("EndpointSlice", world.endpoint_slice(last, [_SERVER]))
    node.sync()
    return node, _Client(node.netns, world.cluster_ip(last), 80)


def _through_flat(variant: str, services: int) -> tuple[Flat, _Client]:
    flat = Flat(variant)
    flat.fill(services)
    last = services - 1
    lines = [*world.service_rules(last, [_SERVER])]
    lines.sort(key=lambda line: not line.startswith(":"))
    flat.restore("\n".join(("*nat", *lines, "COMMIT", "")))
    return flat, _Client(flat.netns, world.cluster_ip(last), 80)


def run(quick: bool) -> list[Figure]:
    """Measure at 10,000 Services (1,000 when quick); PARTS, MODES and SIZES choose."""
    parts, modes = chosen("PARTS", ("first", "datagrams", "xdp")), chosen("MODES", MODES, NAMED)
    out, rounds = [], 5 if quick else 20
    for services in chosen_sizes((1_000,) if quick else (10_000,)):
        if "first" in parts:
            variants = [mode for mode in modes if mode.startswith("iptables-")]
            out += [each for mode in variants for each in _first(mode, services, rounds)]
        out += datagrams.through_modes(modes, services, 10 * rounds) if "datagrams" in parts else []
        if "xdp" in parts:
            out += datagrams.by_xdp(services, 10 * rounds)
            out += datagrams.set_up_by_xdp(services, 5 * rounds)
    return out


def _first(mode: str, services: int, rounds: int) -> list[Figure]:
    variant = mode.removeprefix("iptables-")
    empty = Node(variant, 0)  # with connection tracking, as every node has it
    empty.sync()
    direct = _Client(empty.netns, _SERVER, 8080)
    node, ours = _through_node(variant, services)
    flat, upstream = _through_flat(variant, services)
    clients = (direct, ours, upstream)
    for _ in range(rounds):
        for client in clients:
            client.connect()
    for client in clients:
        client.close()
    for each in (empty, node, flat):
        each.close()
    return [
        figure("first packet, beside direct", mode, services, (ours.p50, "us"), direct.p50),
        figure("  upstream's shape", mode, services, (upstream.p50, "us"), direct.p50),
    ]
