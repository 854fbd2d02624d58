"""TCP: accept, dial an endpoint (the next one where it fails), copy both ways until both end.

Half-close is passed on, a slow reader slows its writer down, a reset is passed on as a reset. The
only memory of a connection is what its slower side has not taken yet.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any, cast

from steersman.model.addresses import canonical_ip
from steersman.model.plan import Endpoint
from steersman.modes.userspace.incoming import interface_of
from steersman.modes.userspace.proxy_protocol import header
from steersman.modes.userspace.route import Route, spread
from steersman.modes.userspace.sockets import RESET_ON_CLOSE, Room, reset, tune
from steersman.modes.userspace.splice import DESCRIPTORS, Splice, possible
from steersman.modes.userspace.traffic import Tally

DIAL_TIMEOUTS = (0.25, 0.5, 1.0, 2.0)
"""Seconds for each attempt to reach an endpoint (SPEC 11.2)."""
_DESCRIPTORS = 2  # of one connection
_ACCEPT_AT_ONCE = 64
_ACCEPT_AGAIN = 0.1  # seconds
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_WAITING = 1 << 16  # bytes that wait for a slow reader before its writer is stopped
SPLICE_AFTER = 1 << 20
"""Bytes in large reads after which the kernel is left to pass on the rest of a direction."""
_LARGE_READ = 1 << 14


class Half(asyncio.Protocol):
    """One of the two ends of a relayed connection."""

    __slots__ = (
        *("_bulk", "_counts", "_direction", "_pair", "_splice", "_waits"),
        *("ended", "peer", "transport"),
    )

    def __init__(self, pair: Pair, tally: Tally, direction: int) -> None:
        self._pair = pair
        self._counts = tally.moved
        self._direction = direction
        self.peer: Half
        self.transport: asyncio.Transport
        self.ended = False
        self._bulk = 0
        """Bytes of large reads; -1 where they are not counted any more."""
        self._waits = False
        """To be spliced, as soon as the peer has sent what was copied to it."""
        self._splice: Splice | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport; nothing is read before the other end is there too."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(_WAITING)
        self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        """Pass bytes on."""
        self._counts[self._direction] += len(data)
        self.peer.transport.write(data)
        if len(data) >= _LARGE_READ and self._bulk >= 0:
            self._bulk += len(data)
            if self._bulk >= SPLICE_AFTER:
                self._hand_over()

    def eof_received(self) -> bool:
        """Pass the end of this direction on; the other one goes on."""
        self.ended = True
        peer = self.peer
        if peer.ended:
            self.transport.close()
            peer.transport.close()
        elif not peer.transport.is_closing():
            try:
                peer.transport.write_eof()
            except OSError:  # it was reset, and its transport does not know yet
                abort(peer.transport)
        return True

    def pause_writing(self) -> None:
        """This end reads slowly: read no more from the other."""
        self.peer.transport.pause_reading()

    def resume_writing(self) -> None:
        """This end has caught up."""
        if self.peer._waits:
            self.peer._start_splice()
        else:
            self.peer.transport.resume_reading()

    # Splicing

    def _hand_over(self) -> None:
        """Have the kernel pass on what follows, once what was copied is sent."""
        self._bulk = -1
        if not possible() or not self._pair.room.has(DESCRIPTORS):
            return
        self._waits = True
        self.transport.pause_reading()
        peer = self.peer.transport
        peer.set_write_buffer_limits(0)  # so that `resume_writing` means: all is sent
        if not peer.get_write_buffer_size():
            self._start_splice()

    def _start_splice(self) -> None:
        self._waits = False
        ends = (_descriptor(self.transport), _descriptor(self.peer.transport))
        if -1 in ends:  # closing: `connection_lost` will say so
            return
        try:
            self._splice = Splice(*ends, self._count, self._splice_ended)
        except OSError:
            self.peer.transport.set_write_buffer_limits(_WAITING)
            self.transport.resume_reading()
        else:
            self._pair.room.used += DESCRIPTORS

    def _count(self, moved: int) -> None:
        self._counts[self._direction] += moved

    def _splice_ended(self, error: OSError | None) -> None:
        self._stop_splice()
        if error is not None:
            abort(self.transport)
        else:
            self.eof_received()

    def _stop_splice(self) -> None:
        if self._splice is not None:
            self._splice.close()
            self._splice = None
            self._pair.room.give_back(DESCRIPTORS)

    def connection_lost(self, error: Exception | None) -> None:
        """Take the other end along: with a reset, unless both had ended in order."""
        self._stop_splice()
        self.peer._stop_splice()
        if not self.peer.transport.is_closing():
            abort(self.peer.transport)
        del error
        self._pair.lost()


def _descriptor(transport: asyncio.Transport) -> int:
    """Of its socket; -1 where it is closing."""
    if transport.is_closing():
        return -1
    return int(transport.get_extra_info("socket").fileno())


def abort(transport: asyncio.BaseTransport) -> None:
    """Close a connection with a reset."""
    sock = cast("socket.socket | None", transport.get_extra_info("socket"))
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    cast(asyncio.Transport, transport).abort()


class Pair:
    """A relayed connection."""

    __slots__ = ("_lost", "_on_end", "client", "endpoint", "room", "server")

    def __init__(
        self, endpoint: Endpoint, tally: Tally, room: Room, on_end: Callable[[Pair], None]
    ) -> None:
        self.endpoint = endpoint
        self.room = room
        self.client = Half(self, tally, 0)
        self.server = Half(self, tally, 1)
        self.client.peer, self.server.peer = self.server, self.client
        self._on_end = on_end
        self._lost = 0

    def lost(self) -> None:
        """One end is gone."""
        self._lost += 1
        if self._lost == _DESCRIPTORS:
            self._on_end(self)

    def abort(self) -> None:
        """Reset both ends."""
        abort(self.client.transport)
        abort(self.server.transport)


class TcpListener:
    """Accepts the clients of a Route; a stopped one leaves its connections running."""

    def __init__(self, sock: socket.socket, route: Route) -> None:
        """Take a listening socket and start accepting, on the running loop."""
        self.route = route
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._proactor: asyncio.Task[None] | None = None
        self.pairs: set[Pair] = set()
        self._start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._socket.getsockname()[1])

    @property
    def open_connections(self) -> int:
        """Connections now, those that are being dialled included."""
        return len(self.pairs) + len(self._tasks)

    # Accepting

    def _start(self) -> None:
        self._retry = None
        try:
            self._loop.add_reader(self._socket, self._acceptable)
        except NotImplementedError:
            self._proactor = self._loop.create_task(self._accept_forever())

    def _acceptable(self) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                client, peer = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            self._take(client, peer)

    async def _accept_forever(self) -> None:
        """Accept where the loop has no readers (Windows' Proactor)."""
        while True:
            try:
                client, peer = await self._loop.sock_accept(self._socket)
            except ConnectionError:
                continue
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self.route.room.refused += 1
                await asyncio.sleep(_ACCEPT_AGAIN)
                continue
            self._take(client, peer)

    def _pause(self, error: OSError) -> None:
        """Accept no more for a moment: the system has no descriptors or memory for it."""
        if error.errno in _EXHAUSTED:
            self.route.room.refused += 1
        self._loop.remove_reader(self._socket)
        self._retry = self._loop.call_later(_ACCEPT_AGAIN, self._start)

    def _take(self, client: socket.socket, peer: tuple[Any, ...]) -> None:
        if not self.route.room.take(_DESCRIPTORS):
            reset(client)
            return
        task = self._loop.create_task(self._serve(client, peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Close the listening socket."""
        if self._retry is not None:
            self._retry.cancel()
        elif self._proactor is not None:
            self._proactor.cancel()
        else:
            self._loop.remove_reader(self._socket)
        self._socket.close()

    def abort(self) -> None:
        """Reset every connection."""
        for task in tuple(self._tasks):
            task.cancel()
        for pair in tuple(self.pairs):
            pair.abort()

    # Serving

    async def _serve(self, client: socket.socket, peer: tuple[Any, ...]) -> None:
        joined = False
        try:
            tune(client)
            joined = await self._join(client, peer)
        except OSError:
            pass  # the client is gone already
        finally:
            if not joined:
                self.route.room.give_back(_DESCRIPTORS)
                reset(client)

    async def _join(self, client: socket.socket, peer: tuple[Any, ...]) -> bool:
        """Bring a client and an endpoint together; False where there is none for it."""
        route = self.route
        needs_interface = not route.plan.same_for_all
        interface = interface_of(client) if needs_interface else ""
        endpoints = route.endpoints(peer[0], interface)
        if not endpoints:
            return False
        started = self._loop.time()
        found = await self._dial(endpoints)
        if found is None:
            return False
        endpoint, server = found
        tally = route.reached(peer[0], endpoint, self._loop.time() - started)
        pair = Pair(endpoint, tally, route.room, self._ended)
        self.pairs.add(pair)
        greeting = _greeting(client, peer, route.destination) if route.plan.proxy_protocol else b""
        try:
            await _connect(self._loop, pair, client, server, greeting)
        except OSError:
            self.pairs.discard(pair)
            route.balancer.ended(endpoint)
            server.close()
            return False
        return True

    async def _dial(self, endpoints: list[Endpoint]) -> tuple[Endpoint, socket.socket] | None:
        """Try endpoint after endpoint; one that refused is not asked again."""
        refused: set[Endpoint] = set()
        for timeout, endpoint in zip(
            DIAL_TIMEOUTS, spread(endpoints, len(DIAL_TIMEOUTS)), strict=True
        ):
            if endpoint in refused:
                continue
            sock = self.route.open_socket(endpoint.ip, "TCP")
            try:
                tune(sock)
                async with asyncio.timeout(timeout):
                    await self._loop.sock_connect(sock, (endpoint.ip, endpoint.port))
            except TimeoutError:
                pass
            except OSError:
                refused.add(endpoint)
            except asyncio.CancelledError:
                sock.close()
                raise
            else:
                return endpoint, sock
            sock.close()
            self.route.failed(endpoint)
        return None

    def _ended(self, pair: Pair) -> None:
        self.pairs.discard(pair)
        self.route.ended(pair.endpoint, _DESCRIPTORS)


async def _connect(
    loop: asyncio.AbstractEventLoop,
    pair: Pair,
    client: socket.socket,
    server: socket.socket,
    greeting: bytes,
) -> None:
    await loop.create_connection(lambda: pair.server, sock=server)
    if greeting:
        pair.server.transport.write(greeting)
    await loop.create_connection(lambda: pair.client, sock=client)
    pair.server.transport.resume_reading()
    pair.client.transport.resume_reading()


def _greeting(client: socket.socket, peer: tuple[Any, ...], destination: tuple[str, int]) -> bytes:
    name = client.getsockname()
    address = destination[0] or canonical_ip(name[0]) or name[0]
    return header((canonical_ip(peer[0]) or peer[0], peer[1]), (address, destination[1]))
