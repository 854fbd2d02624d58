"""Sockets of the proxy: how they are made and bound, proxy ports, how many there may be."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from steersman.host.process import raise_descriptor_limit
from steersman.model.names import Protocol

OpenSocket: TypeAlias = Callable[[str, str], socket.socket]
"""From an address (for its family) and a protocol to a new socket."""

_KINDS = {Protocol.TCP: socket.SOCK_STREAM, Protocol.UDP: socket.SOCK_DGRAM}
_COOL_DOWN = 0.5  # seconds until a freed proxy port is given out again
BACKLOG = 4096
"""Clients that may wait to be accepted."""
_FOR_OTHERS = 256
"""Descriptors that are not for connections: the health servers must not run out of them, who leave
the last 128 to the rest of the process."""
_DEFAULT_LIMIT = 8192
_KEEPALIVE = {"TCP_KEEPIDLE": 120, "TCP_KEEPINTVL": 30, "TCP_KEEPCNT": 5}
_FREE_BIND = {socket.AF_INET: (0, 15), socket.AF_INET6: (socket.IPPROTO_IPV6, 78)}
"""IP_FREEBIND and IPV6_FREEBIND of linux/in.h and linux/in6.h."""
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class ListenerKey(NamedTuple):
    """Which of all listening sockets it is."""

    key: str
    """What clients use, as it is printed."""
    address: str
    """That it is bound to."""


Sockets: TypeAlias = Mapping[ListenerKey, socket.socket]


class PortError(OSError):
    """No proxy port is free."""


def open_socket(address: str, protocol: str) -> socket.socket:
    """Make a socket of the family of an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.socket(family, _KINDS[Protocol(protocol)])


def wildcard(ipv6: bool) -> str:
    """The address that means all."""
    return "::" if ipv6 else "0.0.0.0"


class PortAllocator:
    """Gives out proxy ports: any free one, or those of a range in turn."""

    def __init__(
        self,
        chosen: tuple[int, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the first and last port of the range; None leaves the choice to the kernel."""
        self._range = range(chosen[0], chosen[1] + 1) if chosen else range(1)
        self._next = -1  # the first is chosen when it is needed
        self._freed: dict[int, float] = {}
        self._clock = clock

    def bind(self, sock: socket.socket, address: str) -> int:
        """Bind a socket to a proxy port and return it.

        Raises:
            PortError: all ports of the range are in use.
            OSError: the address cannot be bound.
        """
        if self._next < 0:
            self._next = random.randrange(len(self._range))
        for _ in self._range:
            port = self._range[self._next]
            self._next = (self._next + 1) % len(self._range)
            if port and self._freed.get(port, 0.0) > self._clock():
                continue
            try:
                sock.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            self._freed.pop(port, None)
            return int(sock.getsockname()[1])
        words = f"{self._range[0]}-{self._range[-1]}"
        raise PortError(errno.EADDRINUSE, f"no proxy port of {words} is free; widen the range")

    def allows(self, port: int) -> bool:
        """Whether a port is one that it could have given out."""
        return self._range == range(1) or port in self._range

    def free(self, port: int) -> None:
        """Take a port back: it cools down before it is given out again."""
        if port in self._range:
            self._freed[port] = self._clock() + _COOL_DOWN


def prepare(sock: socket.socket, *, shared: bool) -> None:
    """Set what a listening socket needs before it is bound.

    Args:
        sock: the socket.
        shared: let the next process bind the same port while this one still drains.
    """
    sock.setblocking(False)
    if hasattr(socket, "SO_REUSEPORT"):
        # Two sockets of UDP (on Windows of TCP too) could have one port with SO_REUSEADDR.
        if sock.type is socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    if sys.platform == "linux":  # a new address of IPv6 cannot be bound before it was probed
        with contextlib.suppress(OSError):
            sock.setsockopt(*_FREE_BIND[sock.family], 1)


def listen(sock: socket.socket) -> None:
    """Let a bound TCP socket accept."""
    sock.listen(BACKLOG)


def tune(sock: socket.socket) -> None:
    """Send at once, and notice a peer that vanished."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def reset(sock: socket.socket) -> None:
    """Close a TCP connection with a reset."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    sock.close()


def descriptor_limit() -> int:
    """Raise the limit of descriptors; return how many of them connections may take."""
    if sys.platform == "win32":
        return _DEFAULT_LIMIT
    limit = raise_descriptor_limit()
    return limit - min(limit // 4, _FOR_OTHERS)
