"""Accept connections for the process's own servers, within bounds.

Whoever reaches a health port could otherwise open connections until no descriptor is left for
iptables-restore or for the API server. So each server has a limit, all servers together have one,
and some descriptors are never used for connections. At a limit the client that has been idle for
longest makes room: a new probe is always answered, however many idle clients there are.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from steersman.host.process import descriptor_limit
from steersman.run.quick import Newcomer, Pages, answer

log = logging.getLogger(__name__)

_BACKLOG = 128
_PAUSE = 1.0  # seconds without accepting after the kernel refused a descriptor
_QUIET = 60.0  # seconds between two log lines about that
_SWEEP = 1.0  # seconds between two looks at who is overdue
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Bounds(NamedTuple):
    """How many clients there may be, and for how long (seconds)."""

    per_server: int = 256
    total: int = 1024
    """In all servers; never more than a quarter of the descriptors."""
    reserve: int = 128
    """Descriptors that no connection and no listening socket takes (at most half of all)."""
    header: float = 10.0
    """Until a new client has sent its first request."""
    idle: float = 75.0
    """Until it has sent the next one."""
    busy: float = 330.0
    """Until it has taken the answer; a profile takes up to 300 s."""


BOUNDS = Bounds()


class Pool:
    """The clients of all servers of this process."""

    def __init__(
        self, bounds: Bounds = BOUNDS, limit: Callable[[], int] = descriptor_limit
    ) -> None:
        self.bounds = bounds
        self._limit = limit
        self._servers: dict[Clients, None] = {}  # those that have clients

    @property
    def count(self) -> int:
        """How many clients there are."""
        return sum(len(clients) for clients in self._servers)

    @property
    def is_full(self) -> bool:
        """Whether a client must go before another one comes."""
        return self.count >= min(self.bounds.total, self._limit() // 4)

    def spares(self, sock: socket.socket) -> bool:
        """Whether a new socket leaves the reserve alone: the kernel gives the lowest number."""
        limit = self._limit()
        return sock.fileno() < limit - min(self.bounds.reserve, limit // 2)

    def make_room(self) -> bool:
        """Drop a client of the server that has most; return whether there was one."""
        fullest = max(self._servers, key=len, default=None)
        return fullest is not None and fullest.drop_one()

    def forget(self) -> None:
        """Forget clients that are gone."""
        for clients in self._servers:
            clients.forget()

    def joined(self, clients: Clients) -> None:
        """Note that a server has clients."""
        if not self._servers:
            asyncio.get_running_loop().call_later(_SWEEP, self._sweep)
        self._servers[clients] = None

    def _sweep(self) -> None:
        """Drop who is overdue, forget who is gone; again in a second, while there are clients."""
        loop = asyncio.get_running_loop()
        for clients in list(self._servers):
            clients.sweep(loop.time())
            if not len(clients):
                del self._servers[clients]
        if self._servers:
            loop.call_later(_SWEEP, self._sweep)


POOL = Pool()
"""That of this process: descriptors are shared by all of it."""


class _Client(Protocol):
    """A client's connection: a transport, or a Newcomer."""

    def is_closing(self) -> bool: ...


class Clients:
    """The clients of one server, in the order of their last use."""

    def __init__(self, pool: Pool = POOL, pages: Pages | None = None) -> None:
        """Serve nobody yet.

        Args:
            pool: of all servers.
            pages: answers simple requests.
        """
        self._pool = pool
        self._pages = pages
        self._idle: dict[_Client, float] = {}  # until when
        self._busy: dict[_Client, float] = {}
        self._handovers: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    @contextmanager
    def request(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Note that a client's request is being answered while the block runs."""
        known = transport is not None and self._idle.pop(transport, None) is not None
        if transport is None or not known:  # it is gone already
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
            sock: it listens.
            protocol: serves a client.
            what: name of the server, for messages.
        """
        loop = asyncio.get_running_loop()
        silent_until = 0.0
        while True:
            try:
                accepted, _ = await loop.sock_accept(sock)
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    if loop.time() >= silent_until:
                        log.warning("%s: cannot accept connections: %s", what, error.strerror)
                        silent_until = loop.time() + _QUIET
                    self._pool.make_room()
                    await asyncio.sleep(_PAUSE)
                else:  # the client is gone already
                    await asyncio.sleep(0)
                continue
            if not self._admits(accepted):
                accepted.close()
                await asyncio.sleep(0)
                continue
            if not self._answered(accepted, protocol):
                await self._serve(accepted, protocol)

    def _answered(self, sock: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> bool:
        """Answer a simple request, or wait for it; return whether nothing more is to be done."""
        if self._pages is None:
            return False
        try:
            if not answer(sock, self._pages):
                return False
        except BlockingIOError:
            self._joined(Newcomer(sock, lambda client: self._came(client, sock, protocol)))
            return True
        except OSError:
            pass
        sock.close()
        return True

    def _came(
        self, client: Newcomer, sock: socket.socket, protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        """Serve a client that was waited for."""
        self._idle.pop(client, None)
        if not self._answered(sock, protocol):
            task = asyncio.get_running_loop().create_task(self._serve(sock, protocol))
            self._handovers.add(task)
            task.add_done_callback(self._handovers.discard)

    async def _serve(self, sock: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.connect_accepted_socket(protocol, sock)
        except OSError:
            sock.close()
        else:
            self._joined(transport)

    def _joined(self, client: _Client) -> None:
        now = asyncio.get_running_loop().time()
        self._idle[client] = now + self._pool.bounds.header
        self._pool.joined(self)

    def _admits(self, sock: socket.socket) -> bool:
        """Make room for a new client; return whether there is room."""
        pool = self._pool
        if len(self) >= pool.bounds.per_server:
            self.forget()
        if len(self) >= pool.bounds.per_server:
            self.drop_one()
        if pool.is_full:
            pool.forget()
        if pool.is_full:
            pool.make_room()
        return pool.spares(sock) or pool.make_room()

    def drop_one(self) -> bool:
        """Drop who has been idle for longest, else who waits for longest; False if nobody."""
        self.forget()
        for clients in (self._idle, self._busy):
            if clients:
                _abort(clients, next(iter(clients)))
                return True
        return False

    def sweep(self, now: float) -> None:
        """Drop those whose time is over."""
        self.forget()
        for clients in (self._idle, self._busy):
            for transport in [each for each, until in clients.items() if until <= now]:
                _abort(clients, transport)

    def drop_all(self) -> None:
        """Drop everybody."""
        self.sweep(float("inf"))

    def forget(self) -> None:
        """Forget those that are gone: nothing tells when they go."""
        for clients in (self._idle, self._busy):
            for transport in [each for each in clients if each.is_closing()]:
                del clients[transport]


def listening_socket(host: str, port: int, pool: Pool = POOL) -> socket.socket:
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
    """Close a connection at once: to flush what a client does not take could last for ever."""
    del clients[client]
    if isinstance(client, asyncio.WriteTransport | Newcomer):
        client.abort()
