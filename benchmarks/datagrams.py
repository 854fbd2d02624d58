"""Small datagrams through the node: what one core carries, in each mode and by XDP.

They cross the node from a pod, from outside or from the node itself to a server, in batches, all by
one thread: so a CPU does nothing else, and what it carries in a second is what one core can carry,
from the send to the receive of both ends, the relay of the userspace mode included. The XDP program
of the ebpf mode is compared with one that only redirects: more no device can do. What it does to
the set-up of a connection is measured beside, with the same devices.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import socket
import struct
import sys
from collections.abc import Sequence

import msgspec

from benchmarks.figures import Figure, figure
from benchmarks.node import Netns, Node
from benchmarks.path import (
    CLUSTER_IP,
    NODE_PORT,
    OUTSIDE_DIRECT,
    POD_DIRECT,
    SERVER,
    Bare,
    Rate,
    Ways,
    compared,
    measured,
    node_with,
    take_turns,
)
from steersman.host.libbpf import call, load_program
from steersman.modes.base import Mode
from steersman.modes.ebpf import bpf
from steersman.modes.ebpf.bpf import Link
from steersman.modes.ebpf.loader import FILE, LoadedObject
from steersman.modes.ebpf.mode import EbpfMode

TITLE = "datagrams, "
"""Before the name of a way."""
_SHOWN = (CLUSTER_IP, NODE_PORT, POD_DIRECT)
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


class Datagrams(Rate):
    """Sends batches of datagrams from one socket, as long as its way lives."""

    amount, unit = _BATCH * 1e3, "k/s"
    _sender: socket.socket | None = None

    def exchange(self) -> None:
        """Send a batch, and receive it."""
        if self._sender is None:
            self._sender = socket.socket(type=socket.SOCK_DGRAM)
            self._sender.connect(self._target)
            # One datagram and its answer: a flow without answers stays a new one for conntrack, so
            # that each packet meets all rules; and a relay queues only some while it dials.
            self._sender.send(_buffer)
            self.wait_for(self._plot.datagrams)
            payload, address = self._plot.datagrams.recvfrom(_PAYLOAD)
            self._plot.datagrams.sendto(payload, address)
            self.wait_for(self._sender)
            self._sender.recv(_PAYLOAD)
        if (sent := _call("sendmmsg", self._sender)) != _BATCH:
            raise RuntimeError(f"{sent} of {_BATCH} datagrams were sent")
        arrived = 0
        while arrived < _BATCH:
            self.wait_for(self._plot.datagrams)
            arrived += _call("recvmmsg", self._plot.datagrams, None)

    def close(self) -> None:
        """Close the socket."""
        if self._sender:
            self._sender.close()


def _call(name: str, end: socket.socket, *more: None) -> int:
    done: int = getattr(_libc, name)(end.fileno(), _batch, _BATCH, socket.MSG_DONTWAIT, *more)
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return done


def through_modes(modes: Sequence[str], services: int, rounds: int) -> list[Figure]:
    """Datagrams to the last Service, beside a node without rules."""
    ways = [
        Ways(mode, functools.partial(node_with, mode, services, "UDP"), _SHOWN, Datagrams)
        for mode in modes
    ]
    return measured(TITLE, services, rounds, ways, Datagrams)


_XDP_DEVICES = ("outside", "server")
_GENERIC = 2  # XDP_FLAGS_SKB_MODE
_PROG_TYPE_XDP = 6
_SIOCGIFHWADDR, _SIOCETHTOOL, _ETHTOOL_STXCSUM = 0x8927, 0x8946, 0x17


def by_xdp(services: int, rounds: int) -> list[Figure]:
    """A node port by XDP, beside a program that only redirects, and beside the programs of tc."""
    with_programs = functools.partial(node_with, "ebpf", services, "UDP")
    ours, tc = (
        Ways(name, make, (NODE_PORT,), Datagrams)
        for name, make in (
            ("ebpf, XDP", functools.partial(with_programs, make=_XdpNode)),
            ("ebpf", with_programs),
        )
    )
    redirect = Ways("redirect", lambda: (Bare(), SERVER), (OUTSIDE_DIRECT,), Datagrams)
    every = (ours, tc, redirect)
    links = [*_prepare(every), _redirect(redirect)]
    take_turns(every, rounds)
    mine, theirs, least = (next(iter(way.clients.values())) for way in every)
    out = []
    for name, other in (("datagrams, XDP; redirect", least), ("  programs of tc", theirs)):
        found = figure(name, ours.name, services, (mine.value, mine.unit), other.value)
        out.append(msgspec.structs.replace(found, ratio=round(mine.ratio(other), 3)))
    for link in links:
        link.close()
    for way in every:
        way.close()
    return out


def set_up_by_xdp(services: int, rounds: int) -> list[Figure]:
    """Connections to a node port, most of whose packets are forwarded by XDP."""
    with_programs, names = (
        functools.partial(node_with, "ebpf", services),
        (OUTSIDE_DIRECT, NODE_PORT),
    )
    ways = [
        Ways("ebpf, XDP", functools.partial(with_programs, make=_XdpNode), names),
        Ways("ebpf", with_programs, names),
    ]
    bare = Ways("no rules", lambda: (Bare(), SERVER), (OUTSIDE_DIRECT,))
    links = _prepare((bare, *ways))
    take_turns((bare, *ways), rounds)
    out = [each for way in ways for each in compared("", services, way, bare)]
    for link in links:
        link.close()
    for way in (bare, *ways):
        way.close()
    return out


def _prepare(ways: Sequence[Ways]) -> list[Link]:
    """Compute all checksums, as XDP needs it, and attach the program where a node has it."""
    for way in ways:
        for end in (way.plot.outside, way.plot.inside):
            _compute_checksums(end)
    nodes = [way.node for way in ways if isinstance(way.node, _XdpNode)]
    return [link for node in nodes for link in node.attach_generic()]


class _XdpNode(Node):
    """A node in ebpf mode that forwards packets of known connections by XDP."""

    def _make(self, variant: str) -> Mode:
        super()._make(variant)
        assert self.place
        options = msgspec.structs.replace(self.place.options, xdp_devices=_XDP_DEVICES)
        return EbpfMode(self.exec, options)

    def attach_generic(self) -> list[Link]:
        """Attach the program in generic mode: the mode took that of the driver, which veth has."""
        assert isinstance(self._mode, EbpfMode)
        pins = self._mode.datapath.pins
        loaded = LoadedObject(FILE, pins.maps)
        self.netns.enter()
        for device in _XDP_DEVICES:
            pins.detach(f"xdp_{socket.if_nametoindex(device)}")
        links = [_attach(loaded.programs["sm_xdp"], device) for device in _XDP_DEVICES]
        loaded.close()
        return links


def _attach(program: int, device: str) -> Link:
    index = socket.if_nametoindex(device)
    options = struct.pack("@NI4x", 16, _GENERIC)  # struct bpf_link_create_opts
    return Link(call("bpf_link_create", program, index, bpf.XDP, options))


def _redirect(way: Ways) -> Link:
    """Give packets from outside the addresses of Ethernet that they need, and send them on."""
    header = _hardware_address(way.plot.inside, "eth0")
    header += _hardware_address(way.node.netns, "server")

    def step(code: int, to: int = 0, of: int = 0, offset: int = 0, value: int = 0) -> bytes:
        registers = to | of << 4 if sys.byteorder == "little" else of | to << 4
        return struct.pack("=BBhi", code, registers, offset, value)

    code = (
        *(step(0x61, 2, 1, 0), step(0x61, 3, 1, 4)),  # r2 = data, r3 = data_end
        *(step(0xBF, 4, 2), step(0x07, 4, value=14), step(0x2D, 4, 3, 9)),  # r2 + 14 > r3: pass
        *(step(0x69, 5, 2, 12), step(0x55, 5, 0, 7, socket.htons(0x0800))),  # no IPv4: pass
        *(step(0x62, 2, 0, 4 * n, word) for n, word in enumerate(struct.unpack("=3i", header))),
        *(step(0xB7, 1, value=socket.if_nametoindex("server")), step(0xB7, 2)),
        *(step(0x85, value=23), step(0x95)),  # bpf_redirect(); exit
        *(step(0xB7, value=2), step(0x95)),  # XDP_PASS
    )
    program = load_program(_PROG_TYPE_XDP, bpf.XDP, b"".join(code))
    link = _attach(program, "outside")
    os.close(program)
    return link


def _hardware_address(netns: Netns, device: str) -> bytes:
    netns.enter()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return fcntl.ioctl(sock, _SIOCGIFHWADDR, struct.pack("40s", device.encode()))[18:24]


def _compute_checksums(netns: Netns) -> None:
    """Leave no checksum to the device: XDP sees packets as they are on a wire."""
    netns.enter()
    value = ctypes.create_string_buffer(struct.pack("=II", _ETHTOOL_STXCSUM, 0))
    request = struct.pack("16sP16x", b"eth0", ctypes.addressof(value))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCETHTOOL, request)
