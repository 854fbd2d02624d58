"""UDP: a session per client, a socket towards an endpoint each, forgotten when idle.

A client that asks another of our addresses is another one: answers come from where was asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

from steersman.model.names import Protocol
from steersman.model.plan import Endpoint
from steersman.proxy.budget import Reservation
from steersman.proxy.dials import Dial
from steersman.proxy.incoming import (
    Arrival,
    answering,
    arrival_of,
    interface_name,
    note_interfaces,
)
from steersman.proxy.listeners import ListenerPlan
from steersman.proxy.route import Route
from steersman.proxy.traffic import EndpointCounters

Address: TypeAlias = tuple[Any, ...]
ANSWER_SECONDS = 5.0
"""How long a client is kept that waits for an answer; resolvers do as long (resolv.conf(5))."""
_QUEUE = 16  # datagrams that wait while a session is made
_DESCRIPTORS = 1  # of one session
_LARGEST = 1 << 16
_ANCILLARY = 128  # bytes
_AT_ONCE = 64


class Client(NamedTuple):
    """Whom answers are for, and where they are to come from."""

    address: Address
    arrival: Arrival = Arrival()


class Session(asyncio.DatagramProtocol):
    """The way to an endpoint for one client."""

    def __init__(
        self, listener: UdpListener, client: Client, endpoint: Endpoint, reservation: Reservation
    ) -> None:
        self.endpoint = endpoint
        self._reservation = reservation
        reservation.evict = self.close
        self.dial: Dial | None = None
        self._listener = listener
        self._client = client
        self._transport: asyncio.DatagramTransport | None = None
        self._waiting: list[bytes] = []
        self.closed = self._unanswered = self._answered = self._full = False
        self._balancer = listener.route.balancer
        self._tally: EndpointCounters = listener.route.reached(client.address[0], endpoint, 0.0)
        self._used = listener.loop.time()
        self._timer = listener.loop.call_later(listener.idle_seconds, self._check)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what has been waiting."""
        self._transport = cast(asyncio.DatagramTransport, transport)
        if self.closed:
            self._transport.abort()
            return
        for data in self._waiting:
            self._pass_on(data)
        self._waiting.clear()

    def send(self, data: bytes) -> None:
        """Pass a datagram of the client on."""
        budget = self._listener.route.budget
        if self._answered:
            budget.mark_assured(self._reservation)
        budget.touch(self._reservation)
        self._used, self._unanswered = self._listener.loop.time(), True
        self._tally.move(0, len(data))
        if self._transport is not None:
            self._pass_on(data)
        elif len(self._waiting) < _QUEUE:
            self._waiting.append(data)

    def _pass_on(self, data: bytes) -> None:
        assert self._transport is not None
        if data:
            if not self._full:
                self._transport.sendto(data)
        elif self.dial is not None:
            with contextlib.suppress(OSError):  # transports of asyncio send no empty ones
                self.dial.socket.send(data)

    def pause_writing(self) -> None:
        """Lose datagrams: the way to the endpoint takes no more."""
        self._full = True

    def resume_writing(self) -> None:
        """Pass datagrams on again."""
        self._full = False

    def datagram_received(self, data: bytes, addr: Address) -> None:
        """Pass an answer back."""
        del addr
        self._listener.route.budget.touch(self._reservation)
        self._used, self._unanswered = self._listener.loop.time(), False
        self._answered = True
        self._tally.move(1, len(data))
        self._listener.answer(data, self._client)

    def error_received(self, exc: Exception) -> None:
        """The endpoint refuses: the client's next datagram goes to another one."""
        if isinstance(exc, ConnectionRefusedError):
            self._listener.route.failed(self.endpoint)
            self.close()

    def _check(self) -> None:
        """Close when nothing has moved for long; answers may take longer where there is room."""
        loop, patience = self._listener.loop, self._listener.idle_seconds
        if self._unanswered and not self._listener.route.budget.is_scarce:
            patience = max(patience, ANSWER_SECONDS)
        left = self._used + patience - loop.time()
        if left > 0:
            self._timer = loop.call_later(min(left, self._listener.idle_seconds), self._check)
        else:
            self.close()

    def close(self) -> None:
        """Forget the client."""
        if not self.closed:
            self.closed = True
            self._listener.forget(self._client, self)
            self._timer.cancel()
            if self.dial is not None:
                self._listener.route.dials.end(self.dial)
            self._listener.route.ended(self._balancer, self.endpoint, self._reservation)
            if self._transport is not None:
                self._transport.close()


MakeSession: TypeAlias = Callable[["UdpListener", Client, Endpoint, Reservation], Session]


class UdpListener(asyncio.DatagramProtocol):
    """Takes the datagrams of a Route's clients; answers go out by the same socket."""

    def __init__(
        self,
        sock: socket.socket,
        route: Route,
        idle_seconds: float,
        session: MakeSession | None = None,
    ) -> None:
        """Take a bound socket; `start` begins. Another kind of session may be made for clients."""
        self.route = route
        self.idle_seconds = idle_seconds
        self.loop = asyncio.get_running_loop()
        self._socket = sock
        self._transport: asyncio.DatagramTransport | None = None
        self._sessions: dict[Client, Session] = {}
        self._make = session or Session
        self._reads = self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Take datagrams from now on."""
        if note_interfaces(self._socket):
            self.loop.add_reader(self._socket, self._readable)
            self._reads = True
        else:
            await self.loop.create_datagram_endpoint(lambda: self, sock=self._socket)

    @property
    def listening(self) -> socket.socket:
        """The socket that clients send to."""
        return self._socket

    @property
    def port(self) -> int:
        """The port that it is bound to."""
        return int(self._socket.getsockname()[1])

    @property
    def open_connections(self) -> int:
        """Sessions now."""
        return len(self._sessions)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast(asyncio.DatagramTransport, transport)

    def _readable(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                data, ancillary, _, sender = self._socket.recvmsg(_LARGEST, _ANCILLARY)
            except OSError:
                return
            self._take(data, Client(sender, arrival_of(ancillary)))

    def datagram_received(self, data: bytes, addr: Address) -> None:
        """Take one where only the loop can read them (Windows' Proactor)."""
        self._take(data, Client(addr))

    def _take(self, data: bytes, client: Client) -> None:
        """Pass a datagram on, in the client's session or a new one."""
        dials = self.route.dials
        caller = dials.caller(Protocol.UDP, client.address)
        if caller is not None and dials.refuses(caller, self.route.plan.owner):
            return
        session = self._sessions.get(client)
        if session is not None and not self.route.serves(session.endpoint):
            session.close()
            session = None
        if session is None:
            session = self._open(client, caller)
        if session is not None:
            session.send(data)

    def error_received(self, exc: Exception) -> None:
        """A client cannot be reached: it is not waiting any more."""
        del exc

    def _open(self, client: Client, caller: Dial | None) -> Session | None:
        told_apart = not self.route.plan.same_for_all
        interface = interface_name(self._socket, client.arrival.interface) if told_apart else ""
        endpoints = self.route.endpoints(client.address[0], interface)
        if not endpoints:
            return None
        reservation = self.route.budget.reserve(
            self.route.plan.owner, client.address[0], _DESCRIPTORS
        )
        if reservation is None:
            return None
        session = self._sessions[client] = self._make(self, client, endpoints[0], reservation)
        task = self.loop.create_task(self._connect(session, caller))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return session

    async def _connect(self, session: Session, caller: Dial | None) -> None:
        endpoint = session.endpoint
        if session.closed:
            return
        try:
            sock = self.route.open_socket(endpoint.ip, "UDP")
        except OSError:  # no descriptors, say: not the endpoint's fault
            self.route.budget.refused += 1
            session.close()
            return
        session.dial = self.route.dials.begin(sock, self.route.plan.owner, endpoint, caller)
        try:
            sock.setblocking(False)
            sock.connect((endpoint.ip, endpoint.port))  # just notes the address
            await self.loop.create_datagram_endpoint(lambda: session, sock=sock)
        except (OSError, asyncio.CancelledError) as error:
            sock.close()
            if isinstance(error, OSError):
                self.route.failed(endpoint)
            session.close()

    def answer(self, data: bytes, client: Client) -> None:
        """Send a datagram to a client; where there is no room for it now it is lost."""
        if self._transport is not None and data:
            if not self._transport.is_closing():
                self._transport.sendto(data, client.address)
            return
        with contextlib.suppress(OSError):  # transports of asyncio send no empty ones
            if client.arrival.address:
                self._socket.sendmsg([data], answering(client.arrival), 0, client.address)
            else:
                self._socket.sendto(data, client.address)

    def follow(self, plan: ListenerPlan) -> None:
        """Take another plan; a session ends where its endpoint does."""
        self.route.plan = plan

    def forget(self, client: Client, session: Session) -> None:
        """Drop a session."""
        if self._sessions.get(client) is session:
            del self._sessions[client]
            if self._stopped and not self._sessions:
                self._socket.close()

    def pause(self) -> None:
        """Leave new datagrams to another process that has the same socket."""
        if self._reads:
            self.loop.remove_reader(self._socket)

    def resume(self) -> None:
        """Take datagrams again."""
        if self._reads and not self._stopped:
            self.loop.add_reader(self._socket, self._readable)

    def stop(self) -> None:
        """Take no more. Sessions end, too: there is no way back for their answers.

        But for one where another process has the same socket: those go on until they are idle.
        """
        if self._reads:
            self.loop.remove_reader(self._socket)
        if self._reads and self.route.shared and self._sessions:
            self._stopped = True
            return
        self.abort()
        if self._transport is not None:
            self._transport.close()
        else:
            self._socket.close()

    def abort(self) -> None:
        """Forget every client."""
        for task in tuple(self._tasks):
            task.cancel()
        for session in tuple(self._sessions.values()):
            session.close()
