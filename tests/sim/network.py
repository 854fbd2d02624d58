"""TCP between simulated processes and the world: latency, refusals, silence, resets; no sockets.

A `Peer` is the world's end of a connection, a `SimTransport` that of a process. Bytes arrive in
order, each after a latency that the dice decide.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from tests.support.transports import SimulatedTransport

if TYPE_CHECKING:
    from tests.sim.universe import SimLoop, Universe

Address: TypeAlias = tuple[str, int]

_BACKLOG = 128
"""Connections that a listening socket keeps until they are accepted."""
_ACCEPT_SECONDS = 120e-6
"""What accepting a connection and answering a short request costs, about what was measured."""


class Peer:
    """The world's end of a connection."""

    def __init__(self, universe: Universe, sent: bytes = b"") -> None:
        """Begin a connection.

        Args:
            universe: where it is.
            sent: what comes with it.
        """
        self._universe = universe
        self._transport: SimTransport | Accepted | None = None
        self._arrives = 0.0
        self.credentials = (1, 0)
        """Pid and user, where the kernel tells them."""
        self._early = [(0.0, sent)] if sent else []
        """What was sent before anybody accepted the connection, and when it arrives."""
        self.closed = False
        self.on_data: Callable[[bytes], None] = lambda _data: None
        self.on_close: Callable[[], None] = lambda: None

    def attach(self, transport: SimTransport | Accepted) -> None:
        self._transport = transport
        early, self._early = self._early, []
        for at, data in early:
            if at <= self._universe.now:  # it has waited in the backlog
                transport.arrived(data)
            else:
                self.send(data, at - self._universe.now)

    def send(self, data: bytes, delay: float = 0.0) -> None:
        """Have bytes arrive at the process."""
        if self._transport is None:
            latency = self._universe.dice.uniform(1e-4, 2e-3)
            self._early.append((self._universe.now + delay + latency, data))
        elif not self.closed:
            self._later(delay, lambda: self._arrived(data))

    def close(self, *, reset: bool = False, delay: float = 0.0) -> None:
        """End the connection, in order or by a reset."""
        if self._transport is None or self.closed:
            return
        self.closed = True
        error = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        self._later(delay, lambda: self._ended(error if reset else None))

    def _arrived(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.arrived(data)

    def _ended(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._transport.ended(error)

    def _later(self, delay: float, call: Callable[[], None]) -> None:
        universe = self._universe
        latency = universe.dice.uniform(1e-4, 2e-3)
        self._arrives = max(self._arrives, universe.now + delay + latency)
        universe.after(self._arrives - universe.now, call)


class SimTransport(SimulatedTransport):
    """A process's end of a connection."""

    def __init__(self, loop: SimLoop, protocol: asyncio.BaseProtocol, peer: Peer) -> None:
        super().__init__(protocol)
        self._loop = loop
        self._peer = peer
        self._leaves = 0.0
        peer.attach(self)
        loop.universe.network.open.setdefault(loop, {})[self] = None
        self.made: asyncio.Future[None] = loop.create_future()
        loop.call_soon(protocol.connection_made, self)
        loop.call_soon(_done, self.made)

    # What the process does

    def write(self, data: Any) -> None:
        if not self._closing:
            sent = bytes(data)
            self._leave(lambda: self._peer.on_data(sent))

    def _leave(self, call: Callable[[], None]) -> None:
        """Have something arrive at the other end, after all that was sent before."""
        universe = self._loop.universe
        self._leaves = max(self._leaves, universe.now + universe.dice.uniform(1e-4, 2e-3))
        universe.after(self._leaves - universe.now, call)

    def close(self) -> None:
        if not self._closing:
            self._shut()
            self._loop.call_soon(self._protocol.connection_lost, None)

    abort = close

    def _shut(self) -> None:
        self._closing = True
        self._loop.universe.network.open.get(self._loop, {}).pop(self, None)
        if not self._peer.closed:
            self._peer.closed = True
            self._leave(self._peer.on_close)

    # What the world does

    def arrived(self, data: bytes) -> None:
        self._give(lambda: self._loop.call_soon(self._protocol.data_received, data))

    def ended(self, error: Exception | None) -> None:
        def end() -> None:
            if not self._closing:
                self._shut()
                if error is None:
                    self._loop.call_soon(self._protocol.eof_received)
                self._loop.call_soon(self._protocol.connection_lost, error)

        self._give(end)

    def _give(self, call: Callable[[], object]) -> None:
        if self._closing or self._loop._closed:
            return
        if not self._when_reading(call):
            self._loop.universe.inside(self._loop, call)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Listener:
    """A listening socket of a process."""

    def __init__(self, network: Network, loop: SimLoop, at: Address) -> None:
        self.loop = loop
        self.at = at
        self.refill: Callable[[], Peer | None] = lambda: None
        """Somebody who connects as soon as there is room; None for nobody."""
        self._network = network
        self._peers: deque[Peer] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def connect(self, peer: Peer) -> None:
        """Have somebody of the world connect; if the backlog is full, the kernel says nothing."""
        if len(self._peers) >= _BACKLOG:
            return
        self._peers.append(peer)
        waiting = self._waiting
        if waiting is not None and not waiting.done():
            self.loop.universe.inside(self.loop, lambda: waiting.set_result(None))

    async def accept(self) -> Accepted:
        if self._network.no_descriptors:
            await asyncio.sleep(0)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        while not self._peers:
            self._waiting = self.loop.create_future()
            await self._waiting
        self.loop.universe.charge(_ACCEPT_SECONDS)
        peer = self._peers.popleft()
        if (another := self.refill()) is not None:
            self._peers.append(another)
        return Accepted(self.loop, peer)

    def close(self) -> None:
        self._network.listening.pop(self.at, None)

    def fileno(self) -> int:
        return 9

    def getsockname(self) -> Address:
        return self.at


class Accepted:
    """A connection that was accepted, before it has a transport; as much of a socket as is used."""

    def __init__(self, loop: SimLoop, peer: Peer) -> None:
        self.peer = peer
        self._loop = loop
        self._received = bytearray()
        self._ended = False
        self._leaves = 0.0
        self.reader: Callable[[], object] | None = None
        """Called when something has come."""
        peer.attach(self)

    def setblocking(self, on: bool) -> None:
        pass

    def recv(self, size: int, flags: int = 0) -> bytes:
        if not self._received and not self._ended:
            raise BlockingIOError(errno.EAGAIN, "nothing has come")
        data = bytes(self._received[:size])
        if not flags & socket.MSG_PEEK:
            del self._received[:size]
        return data

    def send(self, data: bytes) -> int:
        if self._ended:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        self._leave(lambda: self.peer.on_data(data))
        return len(data)

    def close(self) -> None:
        if not self.peer.closed:
            self.peer.closed = True
            self._leave(self.peer.on_close)

    def fileno(self) -> int:
        return 10

    def _leave(self, call: Callable[[], None]) -> None:
        universe = self._loop.universe
        self._leaves = max(self._leaves, universe.now + universe.dice.uniform(1e-4, 2e-3))
        universe.after(self._leaves - universe.now, call)

    def arrived(self, data: bytes) -> None:
        self._received.extend(data)
        self._readable()

    def ended(self, _error: Exception | None) -> None:
        self._ended = True
        self._readable()

    def _readable(self) -> None:
        if self.reader is not None and not self._loop._closed:
            self._loop.call_soon(self.reader)

    def transport(self, protocol: asyncio.BaseProtocol) -> SimTransport:
        """Hand the connection to a protocol."""
        made = SimTransport(self._loop, protocol, self.peer)
        if self._received:
            self._loop.call_soon(made.arrived, bytes(self._received))
        if self._ended:
            self._loop.call_soon(made.ended, None)
        return made


class Network:
    """Who listens where, and the connections."""

    def __init__(self, universe: Universe) -> None:
        self._universe = universe
        self.listening: dict[Address, Listener] = {}
        self.hosts: dict[Address, Callable[[Peer], None]] = {}
        """Servers of the world, by address: called with each new connection."""
        self.silent: set[Address] = set()
        """Addresses whose packets are dropped."""
        self.connecting: dict[int, Address] = {}
        self.open: dict[SimLoop, dict[SimTransport, None]] = {}
        self.refuse_binding = False
        self.no_descriptors = False

    def listen(self, host: str, port: int, *_: Any, **__: Any) -> Any:
        """Stand in for `steersman.run.serve.http.listening_socket`."""
        if self.no_descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if self.refuse_binding or (host, port) in self.listening:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        loop: Any = asyncio.get_running_loop()
        made = self.listening[host, port] = Listener(self, loop, (host, port))
        return made

    async def reachable(self, loop: SimLoop, address: Address) -> None:
        """Wait for a handshake.

        Raises:
            OSError: nobody listens there.
        """
        if self.no_descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if address in self.silent:
            await loop.create_future()
        await asyncio.sleep(self._universe.dice.uniform(1e-4, 2e-3))
        if address not in self.hosts:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))

    def connect(
        self, loop: SimLoop, protocol: asyncio.BaseProtocol, address: Address
    ) -> SimTransport:
        """Connect a process to a server of the world."""
        peer = Peer(self._universe)
        transport = SimTransport(loop, protocol, peer)
        accept = self.hosts.get(address)
        if accept is None:
            peer.close(reset=True)
        else:
            accept(peer)
        return transport

    def ask(
        self, address: Address, path: str, told: Callable[[int, bytes], None], patience: float = 5.0
    ) -> None:
        """Ask a process a page; `told` the status and body: 0 for no answer in time."""
        server = self.listening.get(address)
        if server is None:
            told(0, b"")
            return
        peer, heard = Peer(self._universe), bytearray()
        done = [False]

        def finish() -> None:
            if not done[0]:
                done[0] = True
                head, _, body = bytes(heard).partition(b"\r\n\r\n")
                status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/") else 0
                chunked = b"ransfer-Encoding: chunked" in head
                told(status, _unchunked(body) if chunked else body)
                peer.close()

        peer.on_data = heard.extend
        peer.on_close = finish
        server.connect(peer)
        peer.send(request_of(address, path))
        self._universe.after(patience, finish)

    def close_all(self, loop: SimLoop) -> None:
        """Close what a dead process had open."""
        for at, server in tuple(self.listening.items()):
            if server.loop is loop:
                del self.listening[at]
        for transport in tuple(self.open.pop(loop, ())):
            if not transport._peer.closed:
                transport._closing = True
                transport._peer.closed = True
                self._universe.after(1e-4, transport._peer.on_close)


def request_of(address: Address, path: str) -> bytes:
    """Return a request after whose answer the connection is closed."""
    host = f"{address[0]}:{address[1]}"
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()


def _unchunked(body: bytes) -> bytes:
    out = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size or b"0", 16)
        out, body = out + body[:length], body[length + 2 :]
        if not length:
            break
    return out
