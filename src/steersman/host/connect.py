"""Which way to connect to a server, and connect; check whether something listens.

The check is a TCP connection that is reset at once, a request by HTTP, or an empty datagram.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import re
import socket
import ssl
import struct
from collections import deque
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

from steersman.host.process import in_thread
from steersman.model.addresses import canonical_ip, join_host_port, without_password

Headers: TypeAlias = Sequence[tuple[str, str]]
"""Names and values."""
Outcome: TypeAlias = Literal["answered", "silent", "refused", "unreachable", "unhealthy"]

_SUCCESS = re.compile(rb"HTTP/1\.[01] [23][0-9][0-9][ \r\n]")
_RESET = struct.pack("ii", 1, 0)  # struct linger: close() sends a reset, and leaves no TIME_WAIT
_UNREACHABLE = {
    *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN),
    # ICMP errors of a firewall: EACCES for `administratively prohibited` of IPv6, ENOPROTOOPT for
    # `protocol unreachable`.
    *(errno.EACCES, errno.ENOPROTOOPT),
}
_WINDOWS: dict[int, Outcome] = {
    121: "silent",
    1231: "unreachable",
    1232: "unreachable",
    1234: "refused",
}
"""Errors of Windows' Proactor loop that have no errno (winerror.h): ERROR_SEM_TIMEOUT,
ERROR_NETWORK_UNREACHABLE, ERROR_HOST_UNREACHABLE, ERROR_PORT_UNREACHABLE."""
_LONGEST_LINE = 4096
_UDP_SECONDS = 0.3  # for the ICMP error; silence is the good answer
_HEAD_START = 0.25  # seconds that an address has before the next one is tried as well (RFC 8305)


class Hop(NamedTuple):
    """A server or a proxy."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    name: str
    """That its certificate must have."""

    @classmethod
    def of(cls, url: str, tls: ssl.SSLContext | None, name: str = "") -> Hop:
        """Return the hop of a URL; `tls` and `name` are for https only.

        Raises:
            ValueError: it is not a URL of http or https.
        """
        try:
            parts = urlsplit(url)
            # This also refuses what cannot be a name; getaddrinfo(3) would raise something else.
            host = unquote(parts.hostname or "").encode("idna").decode()
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        except (ValueError, KeyError):
            host, port = "", 0
        if not host:
            shown = repr(without_password(url))
            raise ValueError(f"{shown} is not a URL such as https://10.0.0.1:6443")
        if parts.scheme == "http":
            return cls(host, port, None, "")
        assert tls is not None
        return cls(host, port, tls, name or host.rstrip("."))

    def __str__(self) -> str:
        return join_host_port(self.host, self.port)

    @property
    def header(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host.partition('%')[0]}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


class Route(NamedTuple):
    """How to connect to a server; requests with equal ones may share connections.

    A TLS context with other credentials makes another Route, so no request uses a connection that
    was opened with earlier ones.
    """

    server: Hop
    proxy: Hop | None = None
    proxy_headers: Headers = ()
    """The proxy's user and password."""

    @classmethod
    def of(cls, url: str, tls: ssl.SSLContext | None, name: str, proxy: str) -> Route:
        """Return the route to a URL, through a proxy unless that is ""; raises as `Hop.of`."""
        server = Hop.of(url, tls, name)
        if not proxy:
            return cls(server)
        hop, parts = Hop.of(proxy, tls), urlsplit(proxy)
        if parts.username is None:
            return cls(server, hop)
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        basic = f"Basic {base64.b64encode(pair).decode()}"
        return cls(server, hop, (("Proxy-Authorization", basic),))


async def connect_tcp(host: str, port: int) -> socket.socket:
    """Connect to the address of a host that answers first, giving earlier ones a head start.

    Raises:
        OSError: the name has no address, or none of them answers; the first failure.
    """
    waiting = deque(await _addresses(host, port))
    if len(waiting) == 1:
        return await _connected(waiting[0])
    started: list[asyncio.Task[socket.socket]] = []
    chosen = None
    try:
        while chosen is None:
            if waiting:
                started.append(asyncio.create_task(_connected(waiting.popleft())))
            trying = [task for task in started if not task.done()]
            if not trying and not waiting:
                return started[0].result()  # raises: all have failed
            if trying:
                patience = _HEAD_START if waiting else None
                await asyncio.wait(trying, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            chosen = next(filter(_succeeded, started), None)
        return chosen.result()
    finally:
        for task in started:
            task.cancel()  # no effect on those that have ended
            if task is not chosen and _succeeded(task):
                task.result().close()


def _succeeded(task: asyncio.Task[socket.socket]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def _addresses(host: str, port: int) -> Sequence[Any]:
    """Return the addresses of a host, as getaddrinfo(3) sorts them, with families in turn."""
    if ":" in host or canonical_ip(host):  # an address, perhaps with a zone (fe80::1%eth0)
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM, 0, numeric)
    # In a thread that does not delay the end of the process.
    kind, flags = socket.SOCK_STREAM, socket.AI_ADDRCONFIG
    found = await in_thread(socket.getaddrinfo, host, port, 0, kind, 0, flags)
    first = [each for each in found if each[0] == found[0][0]]
    others = [each for each in found if each[0] != found[0][0]]
    return [each for each in chain(*zip_longest(first, others)) if each]


async def _connected(address: Any) -> socket.socket:
    """Connect a socket that notices within about half a minute that its peer is gone."""
    family, kind, protocol, _, where = address
    made = socket.socket(family, kind, protocol)
    try:
        # A silent peer: 15 s, then 3 probes 5 s apart. A peer that does not acknowledge data: 30 s.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", 15),
            ("TCP_KEEPINTVL", 5),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 30_000),  # milliseconds; Linux
        ):
            if hasattr(socket, name):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, where)
    except BaseException:
        made.close()
        raise
    return made


def outcome_of(error: OSError) -> Outcome | None:
    """Return what an error of connect(), send() or recv() says about the other side.

    None if it says nothing: this machine has no descriptor or port left, say.
    """
    if isinstance(error, TimeoutError):
        return "silent"
    # Windows reports "reset" for a datagram that nothing received.
    if isinstance(error, ConnectionRefusedError | ConnectionResetError):
        return "refused"
    if error.errno in _UNREACHABLE:
        return "unreachable"
    return _WINDOWS.get(getattr(error, "winerror", None) or 0)


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
            asyncio.get_running_loop().sock_connect(sock, (address, port)), timeout, "silent"
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
            with contextlib.suppress(ConnectionError, ValueError):  # a reset, or a longer line
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
