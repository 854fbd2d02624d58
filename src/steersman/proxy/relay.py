"""A relayed TCP connection: each side passes on what the other one sends.

    client  <->  RelaySide (client)  <->  RelaySide (server)  <->  endpoint

A side's bytes, half-close and reset go to its peer, and a slow reader stops its writer. So the only
memory of a connection is what its slower side has not taken yet.

Bytes are copied through asyncio's transports at first. If a direction proves to be a long stream,
the kernel moves the rest of it from socket to socket through a pipe (splice(2)). That takes as many
system calls as copying, but half of the CPU time. The transports keep their sockets meanwhile,
because asyncio cannot give them back; a splice waits for duplicates of their descriptors.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import cast

from steersman.model.plan import Endpoint
from steersman.proxy.budget import DescriptorBudget, Reservation
from steersman.proxy.sockets import RESET_ON_CLOSE
from steersman.proxy.traffic import EndpointCounters

_BUFFER = 1 << 16  # bytes that wait for a slow reader before its writer is stopped
SPLICE_AFTER = 1 << 20
"""Bytes of a direction in large reads after which the kernel moves the rest."""
_LARGE_READ = 1 << 14
_ENDS = 2

SPLICE_DESCRIPTORS = 4
"""Descriptors of one spliced direction: two ends of a pipe, two duplicates."""
PIPE = 1 << 20  # bytes that may wait for a slow reader; a small pipe is slower than copying
_ROUNDS = 8  # of a splice before other connections have their turn
_F_SETPIPE_SZ = 1031  # linux/fcntl.h
_FLAGS = getattr(os, "SPLICE_F_MOVE", 0) | getattr(os, "SPLICE_F_NONBLOCK", 0)


def splice_supported() -> bool:
    """Whether this system has splice(2)."""
    return hasattr(os, "splice")


class Splice:
    """One direction of a connection, moved by the kernel."""

    __slots__ = ("_ended", "_in_pipe", "_loop", "_moved", "_pipe", "_source", "_target")

    def __init__(
        self,
        source: int,
        target: int,
        moved: Callable[[int], None],
        ended: Callable[[OSError | None], None],
    ) -> None:
        """Start, on the running loop.

        Args:
            source: descriptor of a socket that nothing else reads.
            target: descriptor of a socket that nothing else writes.
            moved: called with the number of bytes that were passed on.
            ended: called once, after everything is closed: with None if the source has ended,
                or with the error.

        Raises:
            OSError: there are no descriptors for it, or pipes have used up the user's limit
                (pipe(7)); nothing has changed then.
        """
        from fcntl import fcntl  # noqa: PLC0415  # POSIX only

        self._loop = asyncio.get_running_loop()
        self._moved, self._ended = moved, ended
        self._in_pipe = 0
        with ExitStack() as undo:
            self._pipe: tuple[int, ...] = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            for end in self._pipe:
                undo.callback(os.close, end)
            fcntl(self._pipe[1], _F_SETPIPE_SZ, PIPE)
            self._source = os.dup(source)
            undo.callback(os.close, self._source)
            self._target = os.dup(target)
            undo.pop_all()
        self._loop.add_reader(self._source, self._pass_on)

    def close(self) -> None:
        """Stop; bytes in the pipe are lost. Idempotent."""
        if self._pipe:
            self._loop.remove_reader(self._source)
            self._loop.remove_writer(self._target)
            for descriptor in (*self._pipe, self._source, self._target):
                os.close(descriptor)
            self._pipe = ()

    def _pass_on(self) -> None:
        """Fill the pipe and empty it, while there are bytes to take and the target takes them."""
        try:
            for _ in range(_ROUNDS):
                try:
                    self._in_pipe = os.splice(self._source, self._pipe[1], PIPE, flags=_FLAGS)
                except BlockingIOError:
                    return
                if not self._in_pipe:
                    self._end(None)
                    return
                if not self._empty_pipe():
                    self._loop.remove_reader(self._source)
                    self._loop.add_writer(self._target, self._resume)
                    return
        except OSError as error:
            self._end(error)

    def _resume(self) -> None:
        """Read again once the target has taken everything from the pipe."""
        try:
            if self._empty_pipe():
                self._loop.remove_writer(self._target)
                self._loop.add_reader(self._source, self._pass_on)
        except OSError as error:
            self._end(error)

    def _empty_pipe(self) -> bool:
        """Write to the target; False if it takes no more now."""
        while self._in_pipe:
            try:
                count = os.splice(self._pipe[0], self._target, self._in_pipe, flags=_FLAGS)
            except BlockingIOError:
                return False
            self._in_pipe -= count
            self._moved(count)
        return True

    def _end(self, error: OSError | None) -> None:
        self.close()
        self._ended(error)


class RelaySide(asyncio.Protocol):
    """One of the two sides of a relayed connection."""

    __slots__ = (
        *("_bulk", "_connection", "_counters", "_direction", "_splice", "_splice_pending"),
        *("ended", "peer", "transport"),
    )

    def __init__(
        self, connection: RelayedConnection, counters: EndpointCounters, direction: int
    ) -> None:
        self._connection = connection
        self._counters = counters
        self._direction = direction
        self.peer: RelaySide
        self.transport: asyncio.Transport
        self.ended = False
        """This side has sent its end."""
        self._bulk = 0
        """Bytes of large reads; -1 once they are no longer counted."""
        self._splice_pending = False
        """To be spliced as soon as the peer has sent everything that was copied to it."""
        self._splice: Splice | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Read nothing before the other side is connected, too."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(_BUFFER)
        self.transport.pause_reading()
        self._connection.transports.append(self.transport)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on."""
        connection = self._connection
        connection.budget.touch(connection.reservation)
        self._counters.move(self._direction, len(data))
        self.peer.transport.write(data)
        if len(data) >= _LARGE_READ and self._bulk >= 0:
            self._bulk += len(data)
            if self._bulk >= SPLICE_AFTER:
                self._prepare_splice()

    def eof_received(self) -> bool:
        """Pass the end of this direction on; the other direction continues."""
        self.ended = True
        peer = self.peer
        if peer.ended:  # both directions have ended: close in order
            self.transport.close()
            peer.transport.close()
        elif not peer.transport.is_closing():
            try:
                peer.transport.write_eof()
            except OSError:  # it was reset, and its transport has not noticed yet
                abort(peer.transport)
        return True  # keep the transport open: its other direction continues

    def pause_writing(self) -> None:
        """Stop reading from the peer: this side reads slowly."""
        self.peer.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read from the peer again: this side has caught up."""
        if self.peer._splice_pending:
            self.peer._start_splice()
        else:
            self.peer.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Close the other side, too: with a reset, unless both sides had ended in order."""
        del error
        if not self._connection.joined:
            self._connection.broken = True
            return
        self._stop_splice()
        self.peer._stop_splice()
        if not self.peer.transport.is_closing():
            abort(self.peer.transport)
        self._connection.side_lost()

    # Splicing

    def _prepare_splice(self) -> None:
        """Start to splice once the peer has sent what was copied to it."""
        self._bulk = -1
        if not splice_supported() or not self._connection.budget.has_free(SPLICE_DESCRIPTORS):
            return
        # The bytes that were copied must reach the socket before those of the pipe.
        self._splice_pending = True
        self.transport.pause_reading()
        peer = self.peer.transport
        peer.set_write_buffer_limits(0)  # `resume_writing` now means that all is sent
        if not peer.get_write_buffer_size():
            self._start_splice()

    def _start_splice(self) -> None:
        self._splice_pending = False
        transports = (self.transport, self.peer.transport)
        if any(transport.is_closing() for transport in transports):
            return  # `connection_lost` comes next
        source, target = (int(t.get_extra_info("socket").fileno()) for t in transports)
        if source < 0 or target < 0:
            return
        connection = self._connection
        if connection.budget.grow(connection.reservation, SPLICE_DESCRIPTORS):
            try:
                self._splice = Splice(source, target, self._count, self._splice_ended)
            except OSError:
                connection.budget.shrink(connection.reservation, SPLICE_DESCRIPTORS)
            else:
                return
        # No descriptors for splicing: copy as before.
        self.peer.transport.set_write_buffer_limits(_BUFFER)
        self.transport.resume_reading()

    def _count(self, moved: int) -> None:
        self._connection.budget.touch(self._connection.reservation)
        self._counters.move(self._direction, moved)

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
            self._connection.budget.shrink(self._connection.reservation, SPLICE_DESCRIPTORS)


def abort(transport: asyncio.BaseTransport) -> None:
    """Close a connection with a reset."""
    sock = cast("socket.socket | None", transport.get_extra_info("socket"))
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    cast(asyncio.Transport, transport).abort()


class RelayedConnection:
    """A client, an endpoint, and the two sides that relay between them."""

    __slots__ = (
        *("_lost", "_on_end", "broken", "budget", "client"),
        *("endpoint", "joined", "reservation", "server", "transports"),
    )

    def __init__(
        self,
        endpoint: Endpoint,
        counters: EndpointCounters,
        budget: DescriptorBudget,
        reservation: Reservation,
        on_end: Callable[[RelayedConnection], None],
    ) -> None:
        """Make a connection without transports; `on_end` is called when both sides are lost."""
        self.endpoint = endpoint
        self.budget = budget
        self.reservation = reservation
        self.client = RelaySide(self, counters, 0)
        self.server = RelaySide(self, counters, 1)
        self.client.peer, self.server.peer = self.server, self.client
        self.transports: list[asyncio.Transport] = []
        """Those of both sides, as far as they are connected."""
        self.joined = False
        self.broken = False
        """A side was lost before they were joined."""
        self._on_end = on_end
        self._lost = 0

    async def join(self, client: socket.socket, server: socket.socket, greeting: bytes) -> None:
        """Relay between two connected sockets; the server receives the greeting first.

        Raises:
            OSError: one of them is broken.
        """
        loop = asyncio.get_running_loop()
        # Both sides pause reading as soon as they are connected; see `connection_made`.
        await loop.create_connection(lambda: self.server, sock=server)
        if greeting:
            self.server.transport.write(greeting)
        await loop.create_connection(lambda: self.client, sock=client)
        if self.broken:
            raise ConnectionResetError
        self.joined = True
        self.server.transport.resume_reading()
        self.client.transport.resume_reading()

    def side_lost(self) -> None:
        """Note that a side has no connection any more."""
        self._lost += 1
        if self._lost == _ENDS:
            self._on_end(self)

    def abort(self) -> None:
        """Reset both sides, or the one that is connected."""
        for transport in self.transports:
            abort(transport)
