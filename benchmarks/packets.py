"""Packets: the first one of a connection, which the list of rules delays, and small datagrams.

Datagrams cross the node from a pod or from outside to a server, in batches, all by one thread: so a
CPU does nothing else, and what it carries in a second is what one core can carry, from the send
to the receive of both ends.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import statistics
import struct
import subprocess
import time

import msgspec

from benchmarks import world
from benchmarks.figures import Figure, figure
from benchmarks.node import Flat, Netns, Node
from benchmarks.path import MODES, SERVER, Bare, Client, Ways, node_with

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


_BATCH = 64
_PAYLOAD = 18  # with its headers, the smallest Ethernet frame
_libc = ctypes.CDLL(None, use_errno=True)


class _Vector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Message(ctypes.Structure):
    """struct mmsghdr, without address and control data."""

    _fields_ = (
        *(("name", ctypes.c_void_p), ("name_length", ctypes.c_uint32)),
        *(("vectors", ctypes.POINTER(_Vector)), ("count", ctypes.c_size_t)),
        *(("control", ctypes.c_void_p), ("control_length", ctypes.c_size_t)),
        *(("flags", ctypes.c_long), ("length", ctypes.c_uint)),  # c_long: with padding
    )


_buffer = ctypes.create_string_buffer(_PAYLOAD)
_vector = _Vector(ctypes.addressof(_buffer), _PAYLOAD)
_batch = (_Message * _BATCH)()
for _message in _batch:
    _message.vectors, _message.count = ctypes.pointer(_vector), 1


class _Datagrams(Client):
    """Sends batches of datagrams; its times are those of one datagram."""

    _sender: socket.socket | None = None

    def _exchange(self) -> None:
        if self._sender is None:  # it lives as long as its way: a conversation, not a first packet
            self._sender = socket.socket(type=socket.SOCK_DGRAM)
            self._sender.connect(self._target)
        for function, end in (("sendmmsg", self._sender), ("recvmmsg", self._plot.datagrams)):
            arguments = (end.fileno(), _batch, _BATCH, socket.MSG_DONTWAIT)
            done = getattr(_libc, function)(*arguments, *([None] * (function == "recvmmsg")))
            if done != _BATCH:
                raise OSError(ctypes.get_errno(), f"{function}: {done} of {_BATCH} datagrams")

    def rate(self) -> float:
        """Thousands of datagrams in a second."""
        return _BATCH / self.p50 * 1e3

    def close(self) -> None:
        if self._sender:
            self._sender.close()


def _datagrams(services: int, rounds: int) -> list[Figure]:
    modes = tuple(filter(None, os.environ.get("MODES", "").split(","))) or MODES
    bare = Ways("no rules", lambda: (Bare(), SERVER), node_port=False, client=_Datagrams)
    ways = [
        Ways(m, functools.partial(node_with, m, services, "UDP"), True, _Datagrams) for m in modes
    ]
    clients = [bare.direct, bare.from_outside, *(each for way in ways for each in way.clients)]
    for _ in range(rounds):
        for client in clients:
            client.round()
    out = []
    for way in ways:
        for name, ours, direct in (
            ("ClusterIP from a pod", way.service, bare.direct),
            ("NodePort from outside", way.node_port, bare.from_outside),
            ("no Service, from a pod", way.direct, bare.direct),
        ):
            assert isinstance(ours, _Datagrams)
            assert isinstance(direct, _Datagrams)
            rate = (ours.rate(), "k/s")
            each = figure(f"datagrams, {name}", way.name, services, rate, direct.rate())
            out.append(msgspec.structs.replace(each, ratio=round(direct.beside(ours), 3)))
    for client in clients:
        assert isinstance(client, _Datagrams)
        client.close()
    for way in (bare, *ways):
        way.close()
    return out


def run(quick: bool) -> list[Figure]:
    """Measure the last of 10,000 Services (1,000 when quick) beside a node without Services."""
    services, rounds = (1000, 5) if quick else (10000, 20)
    return [*_first(services, rounds), *_datagrams(services, 10 * rounds)]


def _first(services: int, rounds: int) -> list[Figure]:
    figures = []
    for variant in ("nft", "legacy"):
        empty = Node(variant, 0)  # with connection tracking, as every node has it
        empty.sync()
        direct = _Client(empty.netns, _SERVER, 8080)
        node, ours = _through_node(variant, services)
        flat, upstream = _through_flat(variant, services)
        clients = (direct, ours, upstream)
        for _ in range(rounds):
            for client in clients:
                client.connect()
        mode = f"iptables-{variant}"
        figures += [
            figure("first packet, beside direct", mode, services, (ours.p50, "us"), direct.p50),
            figure("  upstream's shape", mode, services, (upstream.p50, "us"), direct.p50),
        ]
        for client in clients:
            client.close()
        for each in (empty, node, flat):
            each.close()
    return figures
