"""Check whether something listens: by TCP, HTTP or UDP.

That is a connection that is reset at once, a request, or an empty datagram.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import struct
from collections.abc import Awaitable
from contextlib import suppress
from typing import Literal, TypeAlias

from steersman.host.connect import socket_address

Outcome: TypeAlias = Literal["answered", "silent", "refused", "unreachable", "unhealthy"]

_SUCCESS = re.compile(rb"HTTP/1\.[01] [23][0-9][0-9][ \r\n]")
_RESET = struct.pack("ii", 1, 0)  # struct linger: close() sends a reset, and leaves no TIME_WAIT
_OUTCOMES: dict[int, Outcome] = {
    errno.ETIMEDOUT: "silent",
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "unreachable",
    errno.ENETDOWN: "unreachable",
    errno.EHOSTDOWN: "unreachable",
    # ICMP errors of a firewall: EACCES for `administratively prohibited` of IPv6, ENOPROTOOPT for
    # `protocol unreachable`.
    errno.EACCES: "unreachable",
    errno.ENOPROTOOPT: "unreachable",
}
_WINDOWS = {
    121: errno.ETIMEDOUT,
    1225: errno.ECONNREFUSED,
    1231: errno.ENETUNREACH,
    1232: errno.EHOSTUNREACH,
    1234: errno.ECONNREFUSED,
}
"""Errors of Windows' Proactor loop, whose errno is EINVAL (winerror.h): ERROR_SEM_TIMEOUT,
ERROR_CONNECTION_REFUSED, ERROR_NETWORK_UNREACHABLE, ERROR_HOST_UNREACHABLE,
ERROR_PORT_UNREACHABLE."""
_LONGEST_LINE = 4096
_UDP_SECONDS = 0.3  # for the ICMP error; silence is the good answer


def error_number(error: OSError) -> int:
    """Return the errno of a socket's error; ECONNABORTED if it has none."""
    number = _WINDOWS.get(getattr(error, "winerror", None) or 0)
    return number or error.errno or errno.ECONNABORTED


def outcome_of(error: OSError) -> Outcome | None:
    """Return what an error of connect(), send() or recv() says about the other side.

    None if it says nothing: this machine has no descriptor or port left, say.
    """
    if isinstance(error, TimeoutError):
        return "silent"
    # Windows reports "reset" for a datagram that nothing received.
    if isinstance(error, ConnectionRefusedError | ConnectionResetError):
        return "refused"
    return _OUTCOMES.get(error_number(error))


async def try_tcp(address: str, port: int, timeout: float) -> Outcome:
    """Open a connection, and close it at once.

    Args:
        address: the address.
        port: the port.
        timeout: seconds until the other side counts as silent.

    Raises:
        OSError: this machine cannot open the connection (descriptors, ports).
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        outcome = await _outcome(
            asyncio.get_running_loop().sock_connect(sock, socket_address(address, port)),
            timeout,
            "silent",
        )
        if outcome == "silent":
            # If this process was late, the answer may have come in time.
            with suppress(OSError):
                sock.getpeername()
                return "answered"
        return outcome


async def try_http(address: str, port: int, path: str, timeout: float) -> Outcome:
    """Ask for a path by HTTP/1.1; only the status line is read, and no redirect is followed.

    Args:
        address: the address.
        port: the port.
        path: the path, without spaces.
        timeout: seconds until the other side counts as silent, from connecting to the status.

    Returns:
        "answered" with a status from 200 to 399, "unhealthy" with any other or something else.

    Raises:
        OSError: this machine cannot open the connection (descriptors, ports).
    """
    host = f"[{address}]" if ":" in address else address
    request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUser-Agent: steersman\r\n"
    statuses: list[bytes] = []

    async def ask() -> None:
        reader, writer = await asyncio.open_connection(address, port, limit=_LONGEST_LINE)
        try:
            connected = writer.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.write(f"{request}Connection: close\r\n\r\n".encode())
            with suppress(ConnectionError, ValueError):  # a reset, or a longer line
                statuses.append(await reader.readline())
        finally:
            writer.transport.abort()

    outcome = await _outcome(ask(), timeout, "silent")
    if outcome != "answered":
        return outcome
    return "answered" if statuses and _SUCCESS.match(statuses[0]) else "unhealthy"


async def try_udp(address: str, port: int) -> Outcome:
    """Send an empty datagram; it counts as answered if no ICMP error comes back.

    Raises:
        OSError: this machine cannot send it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        sock.connect((address, port))
        sock.send(b"")
        answer = asyncio.get_running_loop().sock_recv(sock, 1)
        return await _outcome(answer, _UDP_SECONDS, "answered")


async def _outcome(work: Awaitable[object], timeout: float, in_time: Outcome) -> Outcome:
    """Wait for a socket; `in_time` is the outcome if nothing happens."""
    try:
        async with asyncio.timeout(timeout):
            await work
    except TimeoutError:
        return in_time
    except OSError as error:
        if (outcome := outcome_of(error)) is None:
            raise
        return outcome
    return "answered"
