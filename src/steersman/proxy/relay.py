"""A relayed TCP connection: two directions, each from one socket to the other.

    client  --- Direction -->  endpoint
    client  <-- Direction ---  endpoint

A direction writes what it has read at once, and reads on only when all of it was taken: so a slow
reader stops its writer, and the only memory of a connection is what one read brought that the
target has not taken yet. Half-close and reset are passed on like bytes.

If a direction proves to be a long stream, the kernel moves the rest of it from socket to socket
through a pipe (splice(2)). That takes as many system calls as copying, but half of the CPU time.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from steersman.model.plan import Endpoint
from steersman.proxy.budget import DescriptorBudget, Reservation
from steersman.proxy.poller import BROKEN, BUFFER, ENDING, READABLE, WRITABLE, Poller
from steersman.proxy.sockets import RESET_ON_CLOSE
from steersman.proxy.traffic import EndpointCounters

SPLICE_AFTER = 1 << 20
"""Bytes of a direction in large reads after which the kernel moves the rest."""
_LARGE_READ = 1 << 14
SPLICE_DESCRIPTORS = 2
"""Descriptors of one spliced direction: the ends of a pipe."""
PIPE = 1 << 20  # bytes that may wait for a slow reader; a small pipe is slower than copying
_ROUNDS = 8  # of a direction before other connections have their turn
_F_SETPIPE_SZ = 1031  # linux/fcntl.h
_FLAGS = getattr(os, "SPLICE_F_MOVE", 0) | getattr(os, "SPLICE_F_NONBLOCK", 0)


def splice_supported() -> bool:
    """Whether this system has splice(2)."""
    return hasattr(os, "splice")


class Splice:
    """A pipe between two sockets, through which the kernel moves bytes."""

    __slots__ = ("_inside", "_pipe", "_source", "_target")

    def __init__(self, source: int, target: int) -> None:
        """Make the pipe between two descriptors.

        Raises:
            OSError: there are no descriptors for it, or pipes have used up the user's limit
                (pipe(7)).
        """
        from fcntl import fcntl  # noqa: PLC0415  # POSIX only

        self._source, self._target = source, target
        self._inside = 0
        with ExitStack() as undo:
            self._pipe: tuple[int, ...] = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            for end in self._pipe:
                undo.callback(os.close, end)
            fcntl(self._pipe[1], _F_SETPIPE_SZ, PIPE)
            undo.pop_all()

    def fill(self) -> int:
        """Take bytes from the source into the empty pipe; 0 if the source has ended.

        Raises:
            BlockingIOError: there are none now.
            OSError: the source is broken.
        """
        self._inside = os.splice(self._source, self._pipe[1], PIPE, flags=_FLAGS)
        return self._inside

    def empty(self) -> bool:
        """Write the bytes in the pipe to the target; False if it does not take all of them now.

        Raises:
            OSError: the target is broken.
        """
        while self._inside:
            try:
                self._inside -= os.splice(self._pipe[0], self._target, self._inside, flags=_FLAGS)
            except BlockingIOError:
                return False
        return True

    def close(self) -> None:
        """Close the pipe; bytes in it are lost. Idempotent."""
        for end in self._pipe:
            os.close(end)
        self._pipe = ()


class Direction:
    """One of the two directions of a relayed connection."""

    __slots__ = (
        "_bulk",
        "_connection",
        "_index",
        "_splice",
        "back",
        "blocked",
        "ended",
        "source",
        "target",
        "unsent",
    )

    def __init__(
        self,
        connection: RelayedConnection,
        index: int,
        source: socket.socket,
        target: socket.socket,
    ) -> None:
        self._connection = connection
        self._index = index
        self.source = source
        self.target = target
        self.back: Direction
        """The other direction."""
        self.ended = False
        """The source has sent its end, and it was passed on."""
        self.blocked = False
        """The target takes no more now; nothing is read until it does."""
        self.unsent = b""
        """What was read and not taken."""
        self._bulk = 0
        """Bytes of large reads; -1 once they are no longer counted."""
        self._splice: Splice | None = None

    def handle(self, events: int) -> None:
        """Take the events of the source, which is the target of the way back."""
        if events & BROKEN and self.blocked:  # nothing will be read that would say so
            self._connection.abort()
            return
        if events & WRITABLE and self.back.blocked:
            self.back.resume()
        if events & READABLE:
            self.pass_on(more=bool(events & ENDING))

    def resume(self) -> None:
        """Give the target what waits for it, then read on."""
        try:
            if self._splice is not None:
                self.blocked = not self._splice.empty()
            else:
                self.send(self.unsent)
        except OSError:
            self._connection.abort()
        else:
            self.pass_on()

    def pass_on(self, *, more: bool = True) -> None:
        """Read and write until the source has nothing or the target takes no more.

        Args:
            more: read again after a read that brought less than it might have. It need not be if
                no end was announced: later bytes are a later event (epoll(7), questions).
        """
        connection = self._connection
        poller = connection.poller
        try:
            for _ in range(_ROUNDS):
                if self.blocked or self.ended or connection.closed:
                    return
                if self._splice is not None:
                    size = self._splice.fill()
                else:
                    size = self.source.recv_into(poller.buffer)
                if not size:
                    self.end()
                    return
                connection.count(self._index, size)
                if self._splice is not None:
                    self.blocked = not self._splice.empty()
                    if self.blocked:
                        poller.await_writable(self.target)
                else:
                    self.send(poller.view[:size])
                    if size >= _LARGE_READ and self._bulk >= 0:
                        self._consider_splice(size)
                    elif size < BUFFER and not more:
                        return
        except BlockingIOError:
            return
        except OSError:
            connection.abort()
            return
        poller.again(self.pass_on)

    def send(self, data: bytes | memoryview) -> None:
        """Write, and keep what the target does not take.

        Raises:
            OSError: the target is broken.
        """
        try:
            sent = self.target.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self.blocked, self.unsent = True, bytes(data[sent:])
            self._connection.poller.await_writable(self.target)
        else:
            self.blocked, self.unsent = False, b""

    def end(self) -> None:
        """Pass the end of this direction on; the way back continues."""
        self.ended = True
        self.stop_splice()
        if self.back.ended:  # both have ended: close in order
            self._connection.close()
            return
        try:
            self.target.shutdown(socket.SHUT_WR)
        except OSError:  # it was reset
            self._connection.abort()

    async def copy(self) -> None:
        """Pass on by waiting, on a loop without readers."""
        connection, loop = self._connection, asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self.target, self.unsent)
            while data := await loop.sock_recv(self.source, BUFFER):
                connection.count(self._index, len(data))
                await loop.sock_sendall(self.target, data)
            self.end()
        except OSError:
            connection.abort()

    def _consider_splice(self, size: int) -> None:
        """Count a large read, and let the kernel move the rest of a long stream."""
        self._bulk += size
        # Copied bytes must reach the target before spliced ones.
        if self._bulk < SPLICE_AFTER or self.blocked:
            return
        self._bulk = -1
        budget, reservation = self._connection.budget, self._connection.reservation
        if splice_supported() and budget.grow(reservation, SPLICE_DESCRIPTORS):
            try:
                self._splice = Splice(self.source.fileno(), self.target.fileno())
            except OSError:  # copy as before
                budget.shrink(reservation, SPLICE_DESCRIPTORS)

    def stop_splice(self) -> None:
        """Close the pipe, if there is one."""
        if self._splice is not None:
            self._splice.close()
            self._splice = None
            self._connection.budget.shrink(self._connection.reservation, SPLICE_DESCRIPTORS)


class RelayedConnection:
    """A client, an endpoint, and the two directions between them."""

    __slots__ = (
        "_counters",
        "_on_end",
        "back",
        "began",
        "budget",
        "closed",
        "endpoint",
        "forth",
        "poller",
        "reservation",
    )

    def __init__(
        self,
        sockets: tuple[socket.socket, socket.socket],
        endpoint: Endpoint,
        counters: EndpointCounters,
        budget: DescriptorBudget,
        reservation: Reservation,
        *,
        poller: Poller,
        on_end: Callable[[RelayedConnection], None],
    ) -> None:
        """Make a connection of two connected sockets (the client's, then the endpoint's).

        `on_end` is called once, when both are closed.
        """
        self.endpoint = endpoint
        self.budget = budget
        self.reservation = reservation
        self.poller = poller
        self._counters = counters
        self._on_end = on_end
        client, server = sockets
        self.forth = Direction(self, 0, client, server)
        self.back = Direction(self, 1, server, client)
        self.forth.back, self.back.back = self.back, self.forth
        self.closed = False
        self.began = time.monotonic()

    def start(self, greeting: bytes) -> None:
        """Relay; the endpoint receives the greeting first.

        Raises:
            OSError: the endpoint is gone.
        """
        if greeting:
            self.forth.send(greeting)
        self.poller.relay(self.forth, self.back)

    def count(self, direction: int, size: int) -> None:
        """Count bytes, and mark the connection as used."""
        self.budget.touch(self.reservation)
        self._counters.move(direction, size)

    def abort(self) -> None:
        """Reset both sides."""
        if not self.closed:
            for direction in (self.forth, self.back):
                with suppress(OSError):
                    direction.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            self.close()

    def close(self) -> None:
        """Close both sides. Idempotent."""
        if self.closed:
            return
        self.closed = True
        for direction in (self.forth, self.back):
            direction.stop_splice()
            self.poller.close(direction.source)
        self._on_end(self)
