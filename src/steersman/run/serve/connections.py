"""Connections to the process's own servers, within bounds.

Anyone who reaches a health port could otherwise open connections until no descriptor is left for
iptables-restore or for the API server. So each server has a limit, all servers together have one,
and some descriptors are never used for connections. At a limit the client that has been idle for
longest is dropped: a new probe is always answered, however many idle clients there are.

Clients could also take all of the event loop's time. So they wait for their turn (`next_turn`): an
iteration of the loop accepts a client and reads something of another one, and then everybody else
has the loop.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import NamedTuple
from weakref import WeakKeyDictionary

from steersman.host.limits import descriptor_limit

log = logging.getLogger(__name__)

_BACKLOG = 128
_UNSPECIFIED = ("0.0.0.0", "::")
_PAUSE = 1.0  # seconds without accepting after the kernel refused a descriptor
_QUIET = 60.0  # seconds between two log lines about that
_SWEEP = 1.0  # seconds between two looks for overdue clients
_LAST = 0.4  # seconds for answers that are being made when a server ends
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_HANDSHAKES = 16
"""TLS handshakes of a server at a time; each takes up to a millisecond."""
_STEPS = 2
"""Steps of all clients in an iteration of the event loop, at times twice as many; each takes up to
8 ms, mostly 0.1.
"""


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


class _Turns:
    """Shares out an event loop: an iteration has time for few steps of work for clients."""

    def __init__(self) -> None:
        self._left = _STEPS
        self._newcomers: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()

    async def next(self, newcomer: bool) -> None:
        """Wait until a step may be done; newcomers have every second one, if they want it."""
        loop = asyncio.get_running_loop()
        if not self._left:
            turn = loop.create_future()
            (self._newcomers if newcomer else self._others).append(turn)
            await turn
            return
        if self._left == _STEPS:
            loop.call_soon(self._renew)
        self._left -= 1

    def _renew(self) -> None:
        """Begin another iteration of the loop."""
        self._left = _STEPS
        while self._left and (self._newcomers or self._others):
            for queue in (self._newcomers, self._others):
                turn = queue.popleft() if queue and self._left else None
                if turn is not None and not turn.done():  # the client may have gone
                    turn.set_result(None)
                    self._left -= 1
        if self._left < _STEPS:
            asyncio.get_running_loop().call_soon(self._renew)


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()


async def next_turn(newcomer: bool = False) -> None:
    """Wait until the event loop has time for a step of work for a client of any server.

    Args:
        newcomer: whether the client is accepted now, or read for the first time: probes need no
            more, and must not wait behind clients that send for ever.
    """
    loop = asyncio.get_running_loop()
    if loop not in _turns:
        _turns[loop] = _Turns()
    await _turns[loop].next(newcomer)


class ClientPool:
    """The clients of all servers of this process."""

    def __init__(
        self, bounds: Bounds = BOUNDS, limit: Callable[[], int] = descriptor_limit
    ) -> None:
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

    def joined(self, clients: Clients) -> None:
        """Record that a server has clients."""
        if not self._servers:
            asyncio.get_running_loop().call_later(_SWEEP, self._sweep)
        self._servers[clients] = None

    def _sweep(self) -> None:
        """Drop overdue clients, once a second while there are clients."""
        loop = asyncio.get_running_loop()
        for clients in list(self._servers):
            clients.sweep(loop.time())
            if not len(clients):
                del self._servers[clients]
        if self._servers:
            loop.call_later(_SWEEP, self._sweep)


POOL = ClientPool()
"""The pool of this process: all of it shares the descriptors."""


class Clients:
    """The clients of one server, in the order of their last use."""

    def __init__(self, pool: ClientPool = POOL, tls: ssl.SSLContext | None = None) -> None:
        """Start without clients.

        Args:
            tls: the context of HTTPS; None for HTTP.
        """
        self._tls = tls
        self._pool = pool
        self._idle: dict[asyncio.BaseTransport, float] = {}  # their deadlines
        self._busy: dict[asyncio.BaseTransport, float] = {}
        self._starting: dict[asyncio.Task[None], None] = {}
        """Those that become a transport, the oldest first; with TLS, after a handshake."""
        self._working: set[asyncio.Task[None]] = set()
        self.ending = False
        """No client may ask again."""

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    @property
    def busy(self) -> int:
        """Number of clients whose request is being answered."""
        return len(self._busy)

    def add_task(self, task: asyncio.Task[None]) -> None:
        """Take the task that answers a client, for the end."""
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    @contextmanager
    def request(self, transport: asyncio.BaseTransport) -> Iterator[None]:
        """Count a client as busy while its request is answered."""
        if self._idle.pop(transport, None) is None:  # it is closed already
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
        self,
        sock: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        what: str,
        welcome: Callable[[socket.socket], bool] = lambda _: True,
    ) -> None:
        """Accept clients until cancelled.

        Args:
            what: name of the server, for messages.
            welcome: returns whether a new client is served at all.
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
                    await next_turn(newcomer=True)
                continue
            try:
                # sock_accept does not yield as long as clients wait.
                await next_turn(newcomer=True)
            except asyncio.CancelledError:
                accepted.close()
                raise
            if not (welcome(accepted) and self._admits(accepted)):
                accepted.close()
            elif self._tls is None:
                await self._serve(accepted, protocol)
            else:  # a silent client must not keep the others waiting
                self._start(accepted, protocol)

    def _admits(self, sock: socket.socket) -> bool:
        """Make room for a new client; return whether there is room."""
        pool = self._pool
        if len(self) >= pool.bounds.per_server:
            self.drop_one()
        if pool.is_full:
            pool.make_room()
        return pool.spares(sock) or pool.make_room()

    def _start(self, sock: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Serve a client by the protocol, beside accepting others."""
        if len(self._starting) >= min(_HANDSHAKES, self._pool.bounds.per_server):
            oldest = next(iter(self._starting))
            del self._starting[oldest]
            oldest.cancel()
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
            return
        if not transport.is_closing():  # it may have come only to leave
            self._idle[transport] = loop.time() + self._pool.bounds.header
            self._pool.joined(self)

    def forget(self, transport: asyncio.BaseTransport) -> None:
        """Take note that the connection of a client is lost; its protocol calls this."""
        self._idle.pop(transport, None)
        self._busy.pop(transport, None)

    def drop_one(self) -> bool:
        """Drop the client that has been idle, or else busy, for longest; False if there is none."""
        for clients in (self._idle, self._busy):
            if clients:
                _abort(clients, next(iter(clients)))
                return True
        return False

    def sweep(self, now: float) -> None:
        """Drop overdue clients."""
        for clients in (self._idle, self._busy):
            for transport in [each for each, until in clients.items() if until <= now]:
                _abort(clients, transport)

    async def end(self) -> None:
        """Drop every client; those that are being answered have a moment."""
        self.ending = True
        for task in self._starting:
            task.cancel()
        for client in tuple(self._idle):
            _abort(self._idle, client)
        if self._working:
            _, late = await asyncio.wait(self._working, timeout=_LAST)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self.sweep(inf)


def listening_socket(
    host: str, port: int, pool: ClientPool = POOL, *, both_families: bool = False
) -> socket.socket:
    """Return a socket that listens on an address.

    Args:
        both_families: 0.0.0.0 and :: stand for every address of both families, as in Go's servers.

    Raises:
        OSError: the address cannot be bound, or too few descriptors are left.
    """
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICHOST
    )[0]
    dual = both_families and address[0] in _UNSPECIFIED and socket.has_dualstack_ipv6()
    if dual:
        family, address = socket.AF_INET6, ("::", port)
    sock = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
    sock.setblocking(False)
    if not pool.spares(sock):
        sock.close()
        raise OSError(
            errno.EMFILE, "too few file descriptors are left; raise the limit (ulimit -n)"
        )
    return sock


def _abort(clients: dict[asyncio.BaseTransport, float], client: asyncio.BaseTransport) -> None:
    """Close a connection at once: to flush unread data could last for ever."""
    del clients[client]
    if isinstance(client, asyncio.WriteTransport):
        client.abort()
