"""A relayed TCP connection: two transports, and what one end says is told to the other.

Half-close is passed on, a slow reader slows its writer down, a reset is passed on as a reset. The
only memory of a connection is what its slower side has not taken yet.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from steersman.model.plan import Endpoint
from steersman.proxy.budget import DescriptorBudget, Reservation
from steersman.proxy.sockets import RESET_ON_CLOSE
from steersman.proxy.splice import DESCRIPTORS, Splice, possible
from steersman.proxy.traffic import EndpointCounters

_WAITING = 1 << 16  # bytes that wait for a slow reader before its writer is stopped
SPLICE_AFTER = 1 << 20
"""Bytes in large reads after which the kernel is left to pass on the rest of a direction."""
_LARGE_READ = 1 << 14
_ENDS = 2


class RelaySide(asyncio.Protocol):
    """One of the two ends of a relayed connection."""

    __slots__ = (
        *("_bulk", "_direction", "_pair", "_splice", "_tally", "_waits"),
        *("ended", "peer", "transport"),
    )

    def __init__(self, pair: RelayedConnection, counters: EndpointCounters, direction: int) -> None:
        self._pair = pair
        self._tally = counters
        self._direction = direction
        self.peer: RelaySide
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
        self._pair.made.append(self.transport)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on."""
        pair = self._pair
        pair.budget.touch(pair.reservation)
        self._tally.move(self._direction, len(data))
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
        if not possible() or not self._pair.budget.has_free(DESCRIPTORS):
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
        if not self._pair.budget.grow(self._pair.reservation, DESCRIPTORS):
            self._copy()
            return
        try:
            self._splice = Splice(*ends, self._count, self._splice_ended)
        except OSError:
            self._pair.budget.shrink(self._pair.reservation, DESCRIPTORS)
            self._copy()

    def _copy(self) -> None:
        """Go on copying: there are no descriptors for splicing."""
        self.peer.transport.set_write_buffer_limits(_WAITING)
        self.transport.resume_reading()

    def _count(self, moved: int) -> None:
        self._pair.budget.touch(self._pair.reservation)
        self._tally.move(self._direction, moved)

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
            self._pair.budget.shrink(self._pair.reservation, DESCRIPTORS)

    def connection_lost(self, error: Exception | None) -> None:
        """Take the other end along: with a reset, unless both had ended in order."""
        if not self._pair.joined:
            self._pair.broken = True
            return
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


class RelayedConnection:
    """A relayed connection."""

    __slots__ = (
        *("_lost", "_on_end", "broken", "client"),
        *("endpoint", "reservation", "joined", "made", "budget", "server"),
    )

    def __init__(
        self,
        endpoint: Endpoint,
        counters: EndpointCounters,
        budget: DescriptorBudget,
        reservation: Reservation,
        on_end: Callable[[RelayedConnection], None],
    ) -> None:
        self.endpoint = endpoint
        self.budget = budget
        self.reservation = reservation
        self.client = RelaySide(self, counters, 0)
        self.server = RelaySide(self, counters, 1)
        self.client.peer, self.server.peer = self.server, self.client
        self.made: list[asyncio.Transport] = []
        """The transports of both ends, as far as they are there."""
        self.joined = False
        self.broken = False
        """An end was lost before they were joined."""
        self._on_end = on_end
        self._lost = 0

    def lost(self) -> None:
        """One end is gone."""
        self._lost += 1
        if self._lost == _ENDS:
            self._on_end(self)

    def abort(self) -> None:
        """Reset both ends, or the one that is there."""
        for transport in self.made:
            abort(transport)


async def connect(
    loop: asyncio.AbstractEventLoop,
    pair: RelayedConnection,
    client: socket.socket,
    server: socket.socket,
    greeting: bytes,
) -> None:
    """Join two connected sockets; the server gets the greeting first.

    Raises:
        OSError: one of them is broken.
    """
    await loop.create_connection(lambda: pair.server, sock=server)
    if greeting:
        pair.server.transport.write(greeting)
    await loop.create_connection(lambda: pair.client, sock=client)
    if pair.broken:
        raise ConnectionResetError
    pair.joined = True
    pair.server.transport.resume_reading()
    pair.client.transport.resume_reading()
