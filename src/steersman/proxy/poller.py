"""Wait for many sockets at little cost: an epoll of our own beside that of asyncio.

A connection with one question and one answer wakes its process several times. For that the
transports, futures and timers of asyncio take twice as long as all system calls: a core made 0.27
of haproxy's connections and makes 0.57 of them with this module (side by side, on a busy machine):

- a socket is registered once, edge-triggered, and closing it removes it; it is changed only if a
  slow reader makes a writer wait. So whoever is called must read or write until it would block,
  or until less came than was asked for, or ask to be called `again`;
- handlers get the events directly, without a future or a task in between.

Events are hints: one may be for an earlier socket with the same descriptor. `Tasks` does the same
work on loops that have no readers (Windows' Proactor), at asyncio's price.
"""

from __future__ import annotations

import asyncio
import errno
import select
import socket
from collections.abc import Callable
from typing import Protocol, TypeAlias

from steersman.host.connect import socket_address
from steersman.host.probe import error_number

BUFFER = 1 << 16  # bytes of a read
_AT_ONCE = 256  # events that are fetched at a time

# sys/epoll.h; the module has them on Linux only
READABLE = 0x1 | 0x8 | 0x10 | 0x2000  # EPOLLIN, EPOLLERR, EPOLLHUP, EPOLLRDHUP
ENDING = 0x8 | 0x10 | 0x2000
WRITABLE = 0x4 | 0x8 | 0x10
BROKEN = 0x8
_READS = 0x1 | 0x2000 | 1 << 31  # EPOLLIN, EPOLLRDHUP, EPOLLET
_READS_AND_WRITES = _READS | 0x4  # EPOLLOUT

Connected: TypeAlias = Callable[[int], None]
"""Called with 0, or the error number, when a socket is connected."""
_CONNECTED = frozenset((0, errno.EISCONN))
_CONNECTING = frozenset((errno.EINPROGRESS, errno.EALREADY, errno.EWOULDBLOCK))


class OneWay(Protocol):
    """One of the two directions of a relayed connection."""

    source: socket.socket
    blocked: bool
    """The target takes no more now."""

    @property
    def back(self) -> OneWay:
        """The other direction."""

    def handle(self, events: int) -> None:
        """Take the events of the source."""

    def pass_on(self, *, more: bool = True) -> None:
        """Read and write until one of them would block."""

    async def copy(self) -> None:
        """Pass on by waiting, on a loop without readers."""


class Poller:
    """The sockets of one Proxy, on the running loop."""

    def __init__(self) -> None:
        """Begin to wait.

        Raises:
            NotImplementedError: this loop has no readers.
        """
        self.buffer = bytearray(BUFFER)
        """Where every read goes; what cannot be written at once is copied from here."""
        self.view = memoryview(self.buffer)
        self._handlers: dict[int, Callable[[int], None]] = {}
        """By descriptor: takes the events."""
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        try:
            self._loop.add_reader(self._epoll, self._poll)
        except NotImplementedError:
            self._epoll.close()
            raise

    def stop(self) -> None:
        """Wait no longer; all sockets must be closed."""
        self._loop.remove_reader(self._epoll)
        self._epoll.close()

    def connect(self, sock: socket.socket, address: tuple[str, int], done: Connected) -> int:
        """Connect a socket.

        Returns:
            0 if it is connected, EINPROGRESS if `done` will be called, or another error number.
        """
        error = sock.connect_ex(address)
        if error in _CONNECTING:
            # An endpoint on this machine has answered by now, and a second call says so.
            error = sock.connect_ex(address)
        if error in _CONNECTED:
            return 0
        if error not in _CONNECTING:
            return error

        def finish(_: int) -> None:
            error = sock.connect_ex(address)
            if error not in _CONNECTING:
                done(0 if error in _CONNECTED else error)

        self._register(sock, finish, _READS_AND_WRITES)
        return errno.EINPROGRESS

    def relay(self, one: OneWay, other: OneWay) -> None:
        """Have two connected sockets read, each of which is the source of a direction."""
        # A client's first words have often come while its endpoint was dialled.
        one.pass_on(more=False)
        for direction in (one, other):
            if direction.source.fileno() >= 0:  # reading has not ended the connection
                events = _READS_AND_WRITES if direction.back.blocked else _READS
                self._register(direction.source, direction.handle, events)

    def await_writable(self, sock: socket.socket) -> None:
        """Tell of a socket that takes bytes again, too; most never have to be asked for that."""
        if sock.fileno() in self._handlers:
            self._epoll.modify(sock, _READS_AND_WRITES)

    def _register(self, sock: socket.socket, handler: Callable[[int], None], events: int) -> None:
        descriptor = sock.fileno()
        known = descriptor in self._handlers
        self._handlers[descriptor] = handler
        if known:  # pending events go to the new handler
            self._epoll.modify(descriptor, events)
        else:
            self._epoll.register(descriptor, events)

    def again(self, handler: Callable[[], None]) -> None:
        """Call something once others have had their turn."""
        self._loop.call_soon(handler)

    def close(self, sock: socket.socket) -> None:
        """Close a socket, which need not be registered. Idempotent."""
        self._handlers.pop(sock.fileno(), None)
        sock.close()

    def _poll(self) -> None:
        find = self._handlers.get
        for descriptor, events in self._epoll.poll(0, _AT_ONCE):
            handler = find(descriptor)
            if handler is not None:
                try:
                    handler(events)
                except Exception as error:  # the other events do not come again
                    self._loop.call_exception_handler({"message": "relay", "exception": error})


class Tasks(Poller):
    """The same by tasks of asyncio, which wait for one socket each."""

    def __init__(self) -> None:
        """Begin with no task."""
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[socket.socket, list[asyncio.Task[None]]] = {}
        """Those that use a socket."""

    def stop(self) -> None:
        """Do nothing: tasks end with their sockets."""

    def connect(self, sock: socket.socket, address: tuple[str, int], done: Connected) -> int:
        """Connect a socket, always later."""

        async def connect() -> None:
            try:
                await self._loop.sock_connect(sock, socket_address(*address))
            except OSError as error:
                done(error_number(error))
            else:
                done(0)

        self._tasks[sock] = [self._loop.create_task(connect())]
        return errno.EINPROGRESS

    def await_writable(self, sock: socket.socket) -> None:
        """Do nothing: a task waits for that."""

    def relay(self, one: OneWay, other: OneWay) -> None:
        """Begin to copy."""
        both = [self._loop.create_task(each.copy()) for each in (one, other)]
        for direction in (one, other):
            self._tasks[direction.source] = both

    def close(self, sock: socket.socket) -> None:
        """Close a socket as soon as no task waits for it."""
        tasks = self._tasks.pop(sock, [])
        if not tasks:
            sock.close()
            return
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: sock.close())


def make_poller() -> Poller:
    """Return the poller that this system and the running loop support."""
    try:
        return Poller()
    except (AttributeError, NotImplementedError):  # no epoll, no readers
        return Tasks()
