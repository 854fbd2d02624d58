"""How connections and datagrams came in: asked of the kernel, where it can be."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

_IP_PKTINFO = 8  # linux/in.h
_IP_PKTOPTIONS = 9
_IPV6_2292PKTOPTIONS = 6  # linux/in6.h
_IPV6_RECVPKTINFO = 49
_IPV6_PKTINFO = 50
_SIOCGIFNAME = 0x8910  # linux/sockios.h
_CMSG = struct.Struct("@NiI")  # length, level, type: struct cmsghdr
_IN_PKTINFO = struct.Struct("@i4s4s")  # interface, our address, the packet's
_IN6_PKTINFO = struct.Struct("@16si")
_LINUX = sys.platform == "linux"
Ancillary: TypeAlias = tuple[int, int, bytes]


class Arrival(NamedTuple):
    """By which interface a datagram came, and at which of our addresses."""

    interface: int = 0
    """Index; 0 where it is not known."""
    address: bytes = b""
    """Packed; b"" where it is not known."""


def note_interfaces(sock: socket.socket) -> bool:
    """Have the kernel tell it of what a socket accepts or receives from now on, if it can."""
    if not _LINUX:
        return False
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVPKTINFO, 1)
    else:
        sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
    return True


def arrival_of(ancillary: Iterable[Ancillary]) -> Arrival:
    """Read what recvmsg(2) gave beside a datagram."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO):
            index, address, _ = _IN_PKTINFO.unpack(data[: _IN_PKTINFO.size])
            return Arrival(index, address)
        if (level, kind) == (socket.IPPROTO_IPV6, _IPV6_PKTINFO):
            address, index = _IN6_PKTINFO.unpack(data[: _IN6_PKTINFO.size])
            return Arrival(index, address)
    return Arrival()


def answering(arrival: Arrival) -> list[Ancillary]:
    """What to give sendmsg(2), for an answer to come from the address that was asked."""
    if len(arrival.address) == 4:
        data = _IN_PKTINFO.pack(0, arrival.address, bytes(4))
        return [(socket.IPPROTO_IP, _IP_PKTINFO, data)]
    if len(arrival.address) == 16:
        data = _IN6_PKTINFO.pack(arrival.address, 0)
        return [(socket.IPPROTO_IPV6, _IPV6_PKTINFO, data)]
    return []


def interface_of(sock: socket.socket) -> str:
    """Name of the interface that an accepted connection came in by; "" where it is not known.

    Linux keeps the index with the socket and gives it in what IP_PKTOPTIONS returns (ip(7) does
    not mention it; net/ipv4/ip_sockglue.c, net/ipv6/ipv6_sockglue.c).
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
    """Name of an interface in the network namespace of a socket (netdevice(7)); "" for none."""
    if index <= 0:
        return ""
    from fcntl import ioctl  # noqa: PLC0415  # Linux only

    with contextlib.suppress(OSError):  # it is gone
        answer = ioctl(sock, _SIOCGIFNAME, struct.pack("16si20x", b"", index))
        return bytes(answer[:16]).split(b"\0", 1)[0].decode()
    return ""
