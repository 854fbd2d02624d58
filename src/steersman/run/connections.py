"""Connections to the process's own servers: within bounds, and short requests answered at once.

Anyone who reaches a health port could otherwise open connections until no descriptor is left for
iptables-restore or for the API server. So each server has a limit, all servers together have one,
and some descriptors are never used for connections. At a limit the client that has been idle for
longest is dropped: a new probe is always answered, however many idle clients there are.

    accept --> admitted? --no--> close
                  |
                  v
       a whole simple GET has come? --yes--> answer, close       kubelet and load balancers ask
                  |        |                                      many times a minute for one short
                  |        no, something else --> aiohttp         page: no protocol object, task or
                  v                                               parser is made for that
       nothing has come yet: wait as a Newcomer, then look again
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from steersman.host.process import descriptor_limit

log = logging.getLogger(__name__)

_BACKLOG = 128
_PAUSE = 1.0  # seconds without accepting after the kernel refused a descriptor
_QUIET = 60.0  # seconds between two log lines about that
_SWEEP = 1.0  # seconds between two looks for overdue clients
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_LONGEST = 4096
"""Bytes of a request that are examined."""
_REQUEST = re.compile(
    rb"GET (/[\w./~-]*) HTTP/1\.1\r\n"
    rb"(?:(?!(?i:content-length|transfer-encoding|upgrade|expect):)[\w-]+:[ \t]?[ -~]*\r\n)*\r\n",
    re.ASCII,
)
_CLOSE = re.compile(rb"\r\nconnection:[ \t]?close\r\n", re.IGNORECASE)


class ListenError(OSError):
    """A server's address cannot be bound."""


class Bounds(NamedTuple):
    """Limits for the number of clients and their time (seconds)."""

    per_server: int = 256
    total: int = 1024
    """In all servers; never more than a quarter of the descriptors."""
    reserve: int = 128
    """Descriptors that no connection and no listening socket uses (at most half of all)."""
    header: float = 10.0
    """Until a new client has sent its first request."""
    idle: float = 75.0
    """Until it has sent the next one."""
    busy: float = 330.0
    """Until it has read the answer; a profile takes up to 300 s."""


BOUNDS = Bounds()


# Simple requests


class Reply(msgspec.Struct, frozen=True):
    """A short answer."""

    body: bytes
    status: int
    headers: dict[str, str]

    def encode(self) -> bytes:
        """Encode it as the last answer of a connection."""
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
            f"Content-Length: {len(self.body)}",
            f"Date: {formatdate(usegmt=True)}",
            "Connection: close",
        ]
        return "\r\n".join((*lines, "", "")).encode("latin-1") + self.body


ReplyTo: TypeAlias = Callable[[str], Reply]
"""Returns the reply to a GET for a path; it neither waits nor raises."""


def simple_path(head: bytes) -> str | None:
    """Return the path of a whole GET after which the client closes; None for anything else."""
    found = _REQUEST.fullmatch(head)
    return found[1].decode() if found and _CLOSE.search(head) else None


class Newcomer:
    """A client that has not sent anything yet; it can be dropped like a transport."""

    def __init__(self, sock: socket.socket, on_data: Callable[[Newcomer], None]) -> None:
        """Wait for data; `on_data` is called once, and the socket is the caller's again."""
        self._sock: socket.socket | None = sock
        self._loop = asyncio.get_running_loop()
        self._on_data = on_data
        self._loop.add_reader(sock, self._on_readable)

    def is_closing(self) -> bool:
        """Return whether the client is closed, or no longer a newcomer."""
        return self._sock is None

    def abort(self) -> None:
        """Close the connection."""
        sock = self._release()
        if sock is not None:
            sock.close()

    def _on_readable(self) -> None:
        self._release()
        self._on_data(self)

    def _release(self) -> socket.socket | None:
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.remove_reader(sock)
        return sock


# Clients within bounds


class ClientPool:
    """The clients of all servers of this process."""

    def __init__(
        self, bounds: Bounds = BOUNDS, limit: Callable[[], int] = descriptor_limit
    ) -> None:
        """Create a pool without clients.

        Args:
            bounds: the limits.
            limit: returns how many descriptors the process may have.
        """
        self.bounds = bounds
        self._limit = limit
        self._servers: dict[Clients, None] = {}  # those that have clients

    @property
    def count(self) -> int:
        """Number of clients."""
        return sum(len(clients) for clients in self._servers)

    @property
    def is_full(self) -> bool:
        """Whether a client must be dropped before another one is accepted."""
        return self.count >= min(self.bounds.total, self._limit() // 4)

    def spares(self, sock: socket.socket) -> bool:
        """Return whether a new socket keeps the reserve: the kernel gives the lowest number."""
        limit = self._limit()
        return sock.fileno() < limit - min(self.bounds.reserve, limit // 2)

    def make_room(self) -> bool:
        """Drop a client of the server with the most; return whether there was one."""
        fullest = max(self._servers, key=len, default=None)
        return fullest is not None and fullest.drop_one()

    def forget_closed(self) -> None:
        """Forget clients whose connection is closed."""
        for clients in self._servers:
            clients.forget_closed()

    def joined(self, clients: Clients) -> None:
        """Record that a server has clients."""
        if not self._servers:
            asyncio.get_running_loop().call_later(_SWEEP, self._sweep)
        self._servers[clients] = None

    def _sweep(self) -> None:
        """Drop overdue clients and forget closed ones, once a second while there are clients."""
        loop = asyncio.get_running_loop()
        for clients in list(self._servers):
            clients.sweep(loop.time())
            if not len(clients):
                del self._servers[clients]
        if self._servers:
            loop.call_later(_SWEEP, self._sweep)


POOL = ClientPool()
"""The pool of this process: all of it shares the descriptors."""


class _Client(Protocol):
    """A client's connection: a transport, or a Newcomer."""

    def is_closing(self) -> bool: ...


class Clients:
    """The clients of one server, in the order of their last use."""

    def __init__(
        self,
        pool: ClientPool = POOL,
        reply_to: ReplyTo | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Start without clients.

        Args:
            pool: the pool of all servers.
            reply_to: answers simple requests; None leaves them to the protocol.
            tls: the context of HTTPS; None for HTTP.
        """
        self._tls = tls
        self._pool = pool
        self._reply_to = reply_to
        self._idle: dict[_Client, float] = {}  # their deadlines
        self._busy: dict[_Client, float] = {}
        self._starting: dict[asyncio.Task[None], None] = {}
        """Those that become a transport, the oldest first; with TLS, after a handshake."""

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    @contextmanager
    def request(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Count a client as busy while its request is answered."""
        known = transport is not None and self._idle.pop(transport, None) is not None
        if transport is None or not known:  # it is closed already
            yield
            return
        now = asyncio.get_running_loop().time
        self._busy[transport] = now() + self._pool.bounds.busy
        try:
            yield
        finally:
            if self._busy.pop(transport, None) is not None:
                self._idle[transport] = now() + self._pool.bounds.idle

    async def accept(
        self, sock: socket.socket, protocol: Callable[[], asyncio.Protocol], what: str
    ) -> None:
        """Accept clients until cancelled.

        Args:
            sock: a listening socket.
            protocol: makes the protocol for a client.
            what: name of the server, for messages.
        """
        loop = asyncio.get_running_loop()
        silent_until = 0.0
        while True:
            try:
                accepted, _ = await loop.sock_accept(sock)
            except OSError as error:
                # Out of descriptors: drop the idlest client of all servers, and wait for a moment.
                if error.errno in _EXHAUSTED:
                    if loop.time() >= silent_until:
                        log.warning("%s: cannot accept connections: %s", what, error.strerror)
                        silent_until = loop.time() + _QUIET
                    self._pool.make_room()
                    await asyncio.sleep(_PAUSE)
                else:  # the client has closed it already
                    await asyncio.sleep(0)
                continue
            if not self._admits(accepted):
                accepted.close()
                await asyncio.sleep(0)
                continue
            if not self._answered(accepted, protocol):
                if self._tls is None:
                    await self._serve(accepted, protocol)
                else:  # a silent client must not keep the others waiting
                    self._start(accepted, protocol)

    def _admits(self, sock: socket.socket) -> bool:
        """Make room for a new client; return whether there is room."""
        # Closed clients are forgotten first: nothing reports that a transport is closed.
        pool = self._pool
        if len(self) >= pool.bounds.per_server:
            self.forget_closed()
        if len(self) >= pool.bounds.per_server:
            self.drop_one()
        if pool.is_full:
            pool.forget_closed()
        if pool.is_full:
            pool.make_room()
        return pool.spares(sock) or pool.make_room()

    def _answered(self, sock: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> bool:
        """Answer a simple request, or wait for it; return False if the protocol has to serve."""
        if self._reply_to is None:
            return False
        try:
            head = sock.recv(_LONGEST, socket.MSG_PEEK)
            path = simple_path(head)
            if path is None:
                return False
            sock.recv(len(head))  # unread data would turn the close into a reset
            sock.send(self._reply_to(path).encode())  # it fits into an empty buffer
        except BlockingIOError:

            def look_again(client: Newcomer) -> None:
                self._idle.pop(client, None)
                if not self._answered(sock, protocol):
                    self._start(sock, protocol)

            self._joined(Newcomer(sock, look_again))
            return True
        except OSError:  # the client has closed it
            pass
        sock.close()
        return True

    def _start(self, sock: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Serve a client by the protocol, beside accepting others."""
        if len(self._starting) >= self._pool.bounds.per_server:
            next(iter(self._starting)).cancel()
        task = asyncio.get_running_loop().create_task(self._serve(sock, protocol))
        self._starting[task] = None
        task.add_done_callback(lambda ended: self._starting.pop(ended, None))

    async def _serve(self, sock: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        try:
            limit = None if self._tls is None else self._pool.bounds.header
            transport, _ = await loop.connect_accepted_socket(
                protocol, sock, ssl=self._tls, ssl_handshake_timeout=limit
            )
        except OSError:  # it has gone, or does not speak TLS
            sock.close()
        else:
            self._joined(transport)

    def _joined(self, client: _Client) -> None:
        now = asyncio.get_running_loop().time()
        self._idle[client] = now + self._pool.bounds.header
        self._pool.joined(self)

    def drop_one(self) -> bool:
        """Drop the client that has been idle, or else busy, for longest; False if there is none."""
        self.forget_closed()
        for clients in (self._idle, self._busy):
            if clients:
                _abort(clients, next(iter(clients)))
                return True
        return False

    def sweep(self, now: float) -> None:
        """Drop overdue clients."""
        self.forget_closed()
        for clients in (self._idle, self._busy):
            for transport in [each for each, until in clients.items() if until <= now]:
                _abort(clients, transport)

    def drop_all(self) -> None:
        """Drop every client."""
        for task in self._starting:
            task.cancel()
        self.sweep(float("inf"))

    def forget_closed(self) -> None:
        """Forget clients whose connection is closed: nothing reports that."""
        for clients in (self._idle, self._busy):
            for transport in [each for each in clients if each.is_closing()]:
                del clients[transport]


def listening_socket(host: str, port: int, pool: ClientPool = POOL) -> socket.socket:
    """Return a socket that listens on an address, of one family.

    Raises:
        OSError: the address cannot be bound, or too few descriptors are left.
    """
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICHOST
    )[0]
    sock = socket.create_server(address, family=family, backlog=_BACKLOG)
    sock.setblocking(False)
    if not pool.spares(sock):
        sock.close()
        raise OSError(
            errno.EMFILE, "too few file descriptors are left; raise the limit (ulimit -n)"
        )
    return sock


def _abort(clients: dict[_Client, float], client: _Client) -> None:
    """Close a connection at once: to flush unread data could last for ever."""
    del clients[client]
    if isinstance(client, asyncio.WriteTransport | Newcomer):
        client.abort()
