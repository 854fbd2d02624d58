"""ICMP echo requests that must not be fragmented: does a packet of this size come back?"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from contextlib import suppress
from functools import partial
from pathlib import Path

from steersman.host.netns import call_inside

_ECHO_REQUEST = {4: 8, 6: 128}
_ECHO_REPLY = {4: 0, 6: 129}
_SOCKET = {
    4: (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
    6: (socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6),
}
_MTU_DISCOVER = {4: (socket.IPPROTO_IP, 10), 6: (socket.IPPROTO_IPV6, 23)}
_MTU = {4: (socket.IPPROTO_IP, 14), 6: (socket.IPPROTO_IPV6, 24)}  # IP_MTU, IPV6_MTU
_PROBE = 3  # IP_PMTUDISC_PROBE: set DF, and ignore the path MTU that the kernel has learned
_HEADER = struct.Struct("!BBHHH")  # type, code, checksum, identifier, sequence number


class EchoRefusedError(Exception):
    """The packet was not sent; the message says why."""


async def answers_echo(
    address: str,
    size: int,
    *,
    netns: Path | None = None,
    tries: int = 2,
    seconds: float = 1.0,
) -> bool:
    """Whether an address answers an echo request with this many bytes of data.

    Args:
        address: the address.
        size: bytes after the ICMP header.
        netns: the network namespace to send from; None for that of this thread.
        tries: requests before it counts as silent.
        seconds: time to wait for each answer.

    Raises:
        EchoRefusedError: the packet is too large for this machine's interface.
        PermissionError: no raw socket can be opened.
    """
    family = 6 if ":" in address else 4
    with call_inside(netns, partial(socket.socket, *_SOCKET[family])) as sock:
        sock.setblocking(False)
        sock.setsockopt(*_MTU_DISCOVER[family], _PROBE)
        sock.connect((address, 0))
        identifier = int.from_bytes(os.urandom(2), "big")
        loop = asyncio.get_running_loop()
        for number in range(tries):
            try:
                await loop.sock_sendall(sock, echo_request(family, identifier, number, size))
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    raise EchoRefusedError("this machine cannot send them") from error
                return False
            with suppress(TimeoutError, OSError):  # OSError: an ICMP error came back
                async with asyncio.timeout(seconds):
                    while not is_echo_reply(family, await loop.sock_recv(sock, 65536), identifier):
                        pass
                    return True
    return False


def known_mtu(address: str, netns: Path | None = None) -> int:
    """Return the largest packet to an address as the kernel knows it, also from ICMP errors.

    Args:
        address: the address.
        netns: the network namespace to send from; None for that of this thread.

    Raises:
        OSError: there is no route.
    """
    family = 6 if ":" in address else 4

    def ask() -> int:
        with socket.socket(_SOCKET[family][0], socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))  # nothing is sent
            return sock.getsockopt(*_MTU[family])

    return call_inside(netns, ask)


def echo_request(family: int, identifier: int, number: int, size: int) -> bytes:
    """Return an echo request with `size` zeros as data.

    Args:
        family: 4 or 6.
        identifier: distinguishes our answers from those to other programs.
        number: sequence number.
        size: bytes of data.
    """
    kind, checksum = _ECHO_REQUEST[family], 0
    if family == 4:  # the kernel computes that of ICMPv6
        total = (kind << 8) + identifier + number  # zeros add nothing
        total = (total & 0xFFFF) + (total >> 16)
        checksum = ~(total + (total >> 16)) & 0xFFFF
    return _HEADER.pack(kind, 0, checksum, identifier, number) + bytes(size)


def is_echo_reply(family: int, packet: bytes, identifier: int) -> bool:
    """Whether a packet answers our request; over IPv4 it begins with the IP header."""
    start = (packet[0] & 15) * 4 if family == 4 else 0
    if len(packet) < start + _HEADER.size:
        return False
    kind, _, _, found, _ = _HEADER.unpack_from(packet, start)
    return bool(kind == _ECHO_REPLY[family] and found == identifier)
