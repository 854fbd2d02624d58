"""Virtual time and TCP in memory, for many real clients and servers in one process.

    run(main)        as asyncio.run, but nothing waits: the clock jumps to the next timer
    Network          who listens where; `loop.create_connection` finds servers there

Neither threads nor real sockets take part. Callbacks take no time.
"""

from __future__ import annotations

import asyncio
import errno
import os
import selectors
import socket
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.support.transports import SimulatedTransport

Result = TypeVar("Result")
Factory = Callable[[], asyncio.BaseProtocol]

_LATENCY = 0.0005
"""Seconds for each way."""


class _Clock(selectors.SelectSelector):
    """A selector that waits by setting the clock forward."""

    now = 1_000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("all tasks wait, and nothing will ever happen")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, whose connections are made in memory."""

    def __init__(self) -> None:
        self.clock = _Clock()
        super().__init__(self.clock)
        self.network = Network()
        self._connecting: dict[int, tuple[str, int]] = {}

    def time(self) -> float:
        return self.clock.now

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        where = (address[0], address[1])
        if where in self.network.silent:
            await self.create_future()  # until the client's timeout
        await asyncio.sleep(2 * _LATENCY)
        if where not in self.network.hosts:
            self.network.refused.append(self.time())
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        self._connecting[sock.fileno()] = where

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Factory, *_: Any, sock: socket.socket, **_more: Any
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        where = self._connecting.pop(sock.fileno())
        sock.close()
        server = self.network.hosts.get(where)
        if server is None:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        self.network.connections += 1
        here = MemoryTransport(self, protocol_factory())
        there = MemoryTransport(self, server(), serves=True)
        here.peer, there.peer = there, here
        there.get_protocol().connection_made(there)
        here.get_protocol().connection_made(here)
        return here, here.get_protocol()


class MemoryTransport(SimulatedTransport):
    """One end of a connection; bytes arrive at the other end in order, after a latency."""

    def __init__(self, loop: VirtualLoop, protocol: Any, *, serves: bool = False) -> None:
        super().__init__(protocol)
        self._loop = loop
        self._serves = serves
        self.peer: MemoryTransport | None = None
        self._sent: list[bytes] = []
        self._lost = False

    def write(self, data: Any) -> None:
        if not self._closing:
            if not self._sent:  # the first of this moment takes the others along
                self._loop.call_later(_LATENCY, self._arrive)
            self._sent.append(bytes(data))

    def _arrive(self) -> None:
        data, self._sent = b"".join(self._sent), []
        if self._serves:
            self._loop.network.sent += len(data)
        peer = self.peer
        if peer is None or peer._lost:
            return

        def receive() -> None:
            peer._protocol.data_received(data)

        if not peer._when_reading(receive):
            receive()

    def close(self) -> None:
        """End the connection after what was written."""
        self._end(None)

    def abort(self) -> None:
        """Reset the connection."""
        self._end(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))

    def _end(self, error: Exception | None) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._lose, None)
            if self.peer is not None:
                # Timers of one moment have no order: the end must not overtake bytes.
                self._loop.call_later(_LATENCY * 1.01, self.peer._ended, error)

    def _ended(self, error: Exception | None) -> None:
        self._closing = True
        self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self._protocol.connection_lost(error)


class Network:
    """Who listens where."""

    def __init__(self) -> None:
        self.hosts: dict[tuple[str, int], Factory] = {}
        self.silent: set[tuple[str, int]] = set()
        """Addresses that do not answer at all."""
        self.connections = 0
        self.refused: list[float] = []
        """Times at which connections were refused."""
        self.sent = 0
        """Bytes that servers sent."""


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, Result]]) -> Result:
    """Run a coroutine function in a loop of its own, as `asyncio.run` would."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        return runner.run(main(loop))
