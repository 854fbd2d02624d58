"""The proxy's sockets: make them, set their options, ask how clients came in."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from steersman.host.limits import raise_descriptor_limit
from steersman.model.addresses import canonical_ip, join_host_port
from steersman.model.names import Protocol

SocketAddress: TypeAlias = tuple[Any, ...]
"""An address of the socket module: host, port and, for IPv6, more."""

_LINUX = sys.platform == "linux"
_KINDS: dict[str, socket.SocketKind] = {
    Protocol.TCP: socket.SOCK_STREAM,
    Protocol.UDP: socket.SOCK_DGRAM,
}
BACKLOG = 4096
"""Clients that may wait to be accepted."""
_FOR_OTHERS = 256
"""Descriptors that connections may not take. The health servers need some; they in turn leave the
last 128 to the rest of the process."""
_DEFAULT_LIMIT = 8192
_TUNING = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 120), ("TCP_KEEPINTVL", 30), ("TCP_KEEPCNT", 5))
        if hasattr(socket, name)
    ),
)
"""Options of a TCP connection: level, option, value."""
_UNKNOWN_OPTION = {errno.ENOPROTOOPT, getattr(errno, "WSAENOPROTOOPT", errno.ENOPROTOOPT)}
"""Windows before 1709 knows the names of options only."""
_FREE_BIND = {socket.AF_INET: (0, 15), socket.AF_INET6: (socket.IPPROTO_IPV6, 78)}
"""IP_FREEBIND and IPV6_FREEBIND of linux/in.h and linux/in6.h."""
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""Value of SO_LINGER."""

# What Linux tells about arrivals (linux/in.h, linux/in6.h, linux/sockios.h)
_IP_PKTINFO = 8
_IP_PKTOPTIONS = 9
_IPV6_2292PKTOPTIONS = 6
_IPV6_RECVPKTINFO = 49
_IPV6_PKTINFO = 50
_SIOCGIFNAME = 0x8910
_CMSG = struct.Struct("@NiI")  # length, level, type: struct cmsghdr
_IN_PKTINFO = struct.Struct("@i4s4s")  # interface, our address, the packet's
_IN6_PKTINFO = struct.Struct("@16si")
Ancillary: TypeAlias = tuple[int, int, bytes]


class ListenerKey(NamedTuple):
    """Identifies a listening socket when it is handed to the next process."""

    key: str
    """The FrontendKey, as it is printed."""
    address: str
    """The address that it is bound to."""


Sockets: TypeAlias = Mapping[ListenerKey, socket.socket]


def open_socket(address: str, protocol: str) -> socket.socket:
    """Make a socket of the family of an address, in the network namespace of this thread."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.socket(family, _KINDS[protocol])


def wildcard(ipv6: bool) -> str:
    """Return the address that binds every address."""
    return "::" if ipv6 else "0.0.0.0"


def prepare(sock: socket.socket, *, shared: bool) -> None:
    """Set the options of a listening socket before it is bound.

    Args:
        sock: the socket.
        shared: let the next process bind the same port while this one still drains.
    """
    sock.setblocking(False)
    if hasattr(socket, "SO_REUSEPORT"):
        # With SO_REUSEADDR two UDP sockets (on Windows two TCP sockets, too) could get one port.
        if sock.type is socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if sock.family == socket.AF_INET6:  # another listener has the IPv4 address
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    if _LINUX:  # a new IPv6 address cannot be bound while duplicate address detection runs
        with contextlib.suppress(OSError):
            sock.setsockopt(*_FREE_BIND[sock.family], 1)


def tune(sock: socket.socket) -> None:
    """Set the options of a TCP connection: send at once, and notice a peer that vanished."""
    sock.setblocking(False)
    for option in _TUNING:
        try:
            sock.setsockopt(*option)
        except OSError as error:
            if error.errno not in _UNKNOWN_OPTION:
                raise


def tune_accepted(sock: socket.socket) -> None:
    """Do the same for a connection that was accepted from a socket that is tuned."""
    if _LINUX:  # it has inherited the options (tcp(7))
        sock.setblocking(False)
    else:
        tune(sock)


def print_address(address: SocketAddress) -> str:
    """Return a socket's address as address and port, the address canonical."""
    return join_host_port(canonical_ip(address[0]) or address[0], address[1])


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


class Arrival(NamedTuple):
    """How a datagram came in."""

    interface: int = 0
    """Index of the interface; 0 if unknown."""
    address: bytes = b""
    """The address of ours that it was sent to, packed; b"" if unknown."""


def request_arrivals(sock: socket.socket) -> bool:
    """Have the kernel note how connections and datagrams come in; False if it cannot."""
    if not _LINUX:
        return False
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVPKTINFO, 1)
    else:
        sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
    return True


def arrival_of(ancillary: Iterable[Ancillary]) -> Arrival:
    """Read the ancillary data of a datagram from recvmsg(2)."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO):
            index, address, _ = _IN_PKTINFO.unpack(data[: _IN_PKTINFO.size])
            return Arrival(index, address)
        if (level, kind) == (socket.IPPROTO_IPV6, _IPV6_PKTINFO):
            address, index = _IN6_PKTINFO.unpack(data[: _IN6_PKTINFO.size])
            return Arrival(index, address)
    return Arrival()


def reply_options(arrival: Arrival) -> list[Ancillary]:
    """Return ancillary data for sendmsg(2), so that a reply comes from the address asked."""
    if len(arrival.address) == 4:
        data = _IN_PKTINFO.pack(0, arrival.address, bytes(4))
        return [(socket.IPPROTO_IP, _IP_PKTINFO, data)]
    if len(arrival.address) == 16:
        data = _IN6_PKTINFO.pack(arrival.address, 0)
        return [(socket.IPPROTO_IPV6, _IPV6_PKTINFO, data)]
    return []


def interface_of(sock: socket.socket) -> str:
    """Return the name of the interface that an accepted connection came in by; "" if unknown.

    Linux keeps the index with the socket. The option IP_PKTOPTIONS returns it, which ip(7) does
    not mention (net/ipv4/ip_sockglue.c, net/ipv6/ipv6_sockglue.c).
    """
    if not _LINUX:
        return ""
    ipv6 = sock.family == socket.AF_INET6
    level = socket.IPPROTO_IPV6 if ipv6 else socket.IPPROTO_IP
    option = _IPV6_2292PKTOPTIONS if ipv6 else _IP_PKTOPTIONS
    with contextlib.suppress(OSError, struct.error):
        data = sock.getsockopt(level, option, 256)
        offset = _CMSG.size + (16 if ipv6 else 0)  # in6_pktinfo starts with the address
        (index,) = struct.unpack_from("@i", data, offset)
        return interface_name(sock, index)
    return ""


def interface_name(sock: socket.socket, index: int) -> str:
    """Return the name of an interface in the network namespace of a socket; "" if it is gone."""
    if index <= 0:
        return ""
    from fcntl import ioctl  # noqa: PLC0415  # Linux only

    with contextlib.suppress(OSError):
        answer = ioctl(sock, _SIOCGIFNAME, struct.pack("16si20x", b"", index))  # netdevice(7)
        return bytes(answer[:16]).split(b"\0", 1)[0].decode()
    return ""
