"""By which interface a connection came in: asked of the kernel, where it can be."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

_IP_PKTINFO = 8  # linux/in.h
_IP_PKTOPTIONS = 9
_IPV6_2292PKTOPTIONS = 6  # linux/in6.h
_IPV6_RECVPKTINFO = 49
_SIOCGIFNAME = 0x8910  # linux/sockios.h
_CMSG = struct.Struct("@NiI")  # length, level, type: struct cmsghdr
_LINUX = sys.platform == "linux"


def note_interfaces(sock: socket.socket) -> None:
    """Have the kernel remember it for what a listening TCP socket accepts from now on."""
    if _LINUX:
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVPKTINFO, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)


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
        return _name(sock, index) if index > 0 else ""
    return ""


def _name(sock: socket.socket, index: int) -> str:
    """Name of an interface in the network namespace of a socket (netdevice(7))."""
    from fcntl import ioctl  # noqa: PLC0415  # Linux only

    answer = ioctl(sock, _SIOCGIFNAME, struct.pack("16si20x", b"", index))
    return bytes(answer[:16]).split(b"\0", 1)[0].decode()
