"""Sockets of UDP on this node: those that are connected to an endpoint which is gone are told.

The kernel lists and destroys sockets per network namespace (sock_diag(7); SOCK_DESTROY since Linux
4.9, with CONFIG_INET_DIAG_DESTROY). Only connected ones are touched: whoever uses a socket without
connecting it would not expect an error, and chooses anew with the next datagram anyway.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from steersman.host.netlink import Netlink, NetlinkError, Request

NETLINK_SOCK_DIAG = 4
_BY_FAMILY, _DESTROY = 20, 21
_CLONE_NEWNET = 0x40000000
_REQUEST = struct.Struct("=BBxxI")
"""`struct inet_diag_req_v2` before its `id`: family, protocol, states."""
_ID = struct.Struct("=4s16s16sIQ")
"""`struct inet_diag_sockid`: ports, source, destination, interface, cookie."""
_CONNECTED = 1 << 1  # TCP_ESTABLISHED: so a connected socket of UDP is called, too
_UDP = 17
_PLACES = (Path("/run/netns"), Path("/proc"))
_MAPPED = bytes(10) + b"\xff\xff"
log = logging.getLogger("steersman.ebpf")

_libc = ctypes.CDLL(None, use_errno=True)


class Socket(NamedTuple):
    """A connected socket of UDP."""

    cookie: int
    peer: bytes
    """Packed address, IPv4 mapped, and port."""
    family: int
    identity: bytes
    """By which the kernel knows it."""


def destroy(doomed: Collection[tuple[int, bytes]]) -> int:
    """Destroy connected sockets of UDP; their owners see an error, as if a port were unreachable.

    Args:
        doomed: cookie and peer of each.

    Returns:
        How many there were.
    """
    if not doomed:
        return 0
    with ThreadPoolExecutor(1, thread_name_prefix="ebpf sockets") as pool:  # it never comes back
        return pool.submit(_visit, frozenset(doomed)).result()


def _visit(doomed: frozenset[tuple[int, bytes]]) -> int:
    gone = 0
    for path in namespaces(_PLACES):
        try:
            _enter(path)
            gone += _destroy_here(doomed)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL):  # ended meanwhile; no namespace
                log.warning("ebpf: sockets in %s are not told that endpoints went: %s", path, error)
    return gone


def namespaces(places: Iterable[Path]) -> Iterator[Path]:
    """A path to each network namespace of this node: those of processes, and those with names."""
    seen = set()
    for path in _candidates(places):
        with suppress(OSError):
            found = path.stat()
            if (found.st_dev, found.st_ino) not in seen:
                seen.add((found.st_dev, found.st_ino))
                yield path


def _candidates(places: Iterable[Path]) -> Iterator[Path]:
    for place in places:
        with suppress(OSError):
            for name in os.listdir(place):
                if place.name != "proc":
                    yield place / name
                elif name.isdigit():
                    yield place / name / "ns/net"


def _enter(path: Path) -> None:
    """Move this thread into a network namespace (os.setns exists from Python 3.12)."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(opened, _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(opened)


def _destroy_here(doomed: frozenset[tuple[int, bytes]]) -> int:
    gone = 0
    with Netlink(NETLINK_SOCK_DIAG, buffer=1 << 20) as netlink:
        found = [sock for sock in connected(netlink) if (sock.cookie, sock.peer) in doomed]
        for sock in found:
            head = _REQUEST.pack(sock.family, _UDP, _CONNECTED)
            try:
                netlink.request(Request(_DESTROY, head + sock.identity))
                gone += 1
            except NetlinkError as error:
                if error.errno != errno.ENOENT:  # closed meanwhile
                    raise
    return gone


def connected(netlink: Netlink) -> Iterator[Socket]:
    """Connected sockets of UDP, of both families."""
    for family in (socket.AF_INET, socket.AF_INET6):
        request = Request(_BY_FAMILY, _REQUEST.pack(family, _UDP, _CONNECTED) + bytes(_ID.size))
        for reply in netlink.dump(request):
            yield _socket(reply.payload)


def _socket(payload: bytes) -> Socket:
    """Take a `struct inet_diag_msg` apart: family, state, two timers, then its `id`."""
    identity = payload[4 : 4 + _ID.size]
    ports, _, destination, _, cookie = _ID.unpack(identity)
    if payload[0] == socket.AF_INET:
        destination = _MAPPED + destination[:4]
    return Socket(cookie, destination + ports[2:], payload[0], identity)
