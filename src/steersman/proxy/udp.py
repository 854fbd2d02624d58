"""UDP listeners: a session with a socket of its own for each client, which ends when idle.

    client  <->  UdpListener's socket  <->  Session's socket  <->  endpoint

A client that sends to two of our addresses has two sessions: replies come from the address asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import NamedTuple, TypeAlias

from steersman.host.probe import outcome_of
from steersman.model.addresses import join_host_port
from steersman.model.connections import ConnectionState, OpenConnection
from steersman.model.names import Protocol
from steersman.model.plan import Endpoint
from steersman.proxy.balance import Route
from steersman.proxy.budget import Reservation
from steersman.proxy.dials import Dial
from steersman.proxy.listeners import ListenerPlan
from steersman.proxy.sockets import (
    Arrival,
    SocketAddress,
    arrival_of,
    interface_name,
    open_socket,
    print_address,
    reply_options,
    request_arrivals,
)

ANSWER_SECONDS = 5.0
"""How long a client that waits for an answer keeps its session: resolvers wait as long
(resolv.conf(5))."""
_DESCRIPTORS = 1  # of one session
_MAX_DATAGRAM = 1 << 16
_ANCILLARY = 128  # bytes
_READ_AT_ONCE = 64
_RECEIVE_AGAIN = 0.1  # seconds


class Client(NamedTuple):
    """The address that replies go to, and the address of ours that they come from."""

    address: SocketAddress
    arrival: Arrival = Arrival()


class Session:
    """The connection of one client to an endpoint."""

    def __init__(
        self, listener: UdpListener, client: Client, endpoint: Endpoint, reservation: Reservation
    ) -> None:
        self.endpoint = endpoint
        self._reservation = reservation
        reservation.evict = self.close
        self._dial: Dial | None = None
        self._listener = listener
        self.client = client
        self._receiver: asyncio.Task[None] | None = None
        """Only on a loop without readers."""
        self.closed = self._unanswered = self._answered = False
        self._balancer = listener.route.balancer
        self._counters = listener.route.reached(client.address[0], endpoint, 0.0)
        self._began = self._used = listener.loop.time()
        self._timer = listener.loop.call_later(listener.idle_seconds, self._check_idle)

    def open(self, caller: Dial | None) -> None:
        """Open the socket to the endpoint, or close the session.

        Args:
            caller: the dial of this process that the client is; None for others.
        """
        route, loop = self._listener.route, self._listener.loop
        try:
            sock = open_socket(self.endpoint.ip, "UDP")
        except OSError:  # no descriptors, say: the endpoint is not to blame
            route.budget.refused += 1
            self.close()
            return
        self._dial = route.dials.add(sock, route.plan.owner, self.endpoint, caller)
        try:
            sock.setblocking(False)
            sock.connect((self.endpoint.ip, self.endpoint.port))  # sends nothing
            if self._listener.reads:
                loop.add_reader(sock, self._readable, sock)
            else:
                self._receiver = loop.create_task(self._receive_forever(sock))
        except OSError as error:
            route.failed(self.endpoint, self.client.address[0], error)
            self.close()

    def send(self, data: bytes) -> None:
        """Pass on a datagram of the client."""
        budget = self._listener.route.budget
        if self._answered:  # a reply alone may be to a forged address
            budget.mark_assured(self._reservation)
        budget.touch(self._reservation)
        self._used, self._unanswered = self._listener.loop.time(), True
        self._counters.move(0, len(data))
        if self._receiver is None:
            self._pass_on(data)
        else:  # an ICMP error is lost unless the socket receives before it sends
            self._listener.loop.call_soon(self._pass_on, data)

    def _pass_on(self, data: bytes) -> None:
        if self._dial is None:
            return
        try:
            self._dial.socket.send(data)
        except BlockingIOError:  # its buffer is full: the datagram is lost
            pass
        except OSError as error:
            self._failed(error)

    def _readable(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(_MAX_DATAGRAM)
        except BlockingIOError:
            return
        except OSError as error:
            self._failed(error)
        else:
            self.received(data)

    async def _receive_forever(self, sock: socket.socket) -> None:
        """Receive by waiting.

        A transport of asyncio names no destination to WSASendTo, which refuses that, and receives
        nothing any more after an ICMP error.
        """
        while not self.closed:
            try:
                data = await self._listener.loop.sock_recv(sock, _MAX_DATAGRAM)
            except OSError as error:
                self._failed(error)
                await asyncio.sleep(_RECEIVE_AGAIN)
            else:
                self.received(data)

    def received(self, data: bytes) -> None:
        """Pass on a reply."""
        self._listener.route.budget.touch(self._reservation)
        self._used, self._unanswered = self._listener.loop.time(), False
        if not self._answered:
            self._answered = True
            self._listener.route.answered(self.endpoint, self._counters)
        self._counters.move(1, len(data))
        self._listener.reply(data, self.client)

    def _failed(self, error: OSError) -> None:
        """Close if the endpoint refuses; the client's next datagram goes to another endpoint."""
        if outcome_of(error) == "refused" and not self.closed:
            self._listener.route.failed(self.endpoint, self.client.address[0], error)
            self.close()

    def _check_idle(self) -> None:
        """Close after the idle time; a client that waits for an answer has longer."""
        loop, patience = self._listener.loop, self._listener.idle_seconds
        if self._unanswered and not self._listener.route.budget.is_scarce:
            patience = max(patience, ANSWER_SECONDS)
        # Traffic only notes the time; a timer per datagram would cost more than this check.
        left = self._used + patience - loop.time()
        if left > 0:
            self._timer = loop.call_later(min(left, self._listener.idle_seconds), self._check_idle)
        else:
            self.close()

    def describe(self) -> OpenConnection:
        """Return this session as a connection."""
        arrival, now = self.client.arrival.address, self._listener.loop.time()
        address, port = self._listener.route.destination
        if not address:  # a node port: the address of ours that was asked
            own = self._listener.socket.getsockname()[0]
            address = str(ip_address(arrival)) if arrival else own
        source = self._dial.socket.getsockname() if self._dial is not None else None
        return OpenConnection(
            endpoint=str(self.endpoint),
            client=print_address(self.client.address),
            frontend=join_host_port(address, port),
            protocol=Protocol.UDP.value,
            state=ConnectionState.OPEN if self._answered else ConnectionState.OPENING,
            source=print_address(source) if source else "",
            age=now - self._began,
            idle=now - self._used,
        )

    def close(self) -> None:
        """End the session. Idempotent."""
        if not self.closed:
            self.closed = True
            self._listener.forget(self.client, self)
            self._timer.cancel()
            if self._receiver is not None:
                self._receiver.cancel()
            if self._dial is not None:
                self._listener.route.dials.remove(self._dial)
                if self._listener.reads:
                    self._listener.loop.remove_reader(self._dial.socket)
                self._dial.socket.close()
                self._dial = None
            self._listener.route.ended(self._balancer, self.endpoint, self._reservation)


MakeSession: TypeAlias = Callable[["UdpListener", Client, Endpoint, Reservation], Session]


class UdpListener:
    """Receives the datagrams of a Route's clients; replies leave by the same socket."""

    def __init__(
        self,
        sock: socket.socket,
        route: Route,
        idle_seconds: float,
        session: MakeSession | None = None,
    ) -> None:
        """Receive datagrams from now on, on the running loop.

        Args:
            sock: a bound socket.
            route: leads to the endpoints.
            idle_seconds: how long a session may be idle.
            session: makes another kind of session.
        """
        self.route = route
        self.idle_seconds = idle_seconds
        self.loop = asyncio.get_running_loop()
        self.socket = sock
        self.port = int(sock.getsockname()[1])
        self._receiver: asyncio.Task[None] | None = None
        """Only on a loop without readers (Windows' Proactor)."""
        self._sessions: dict[Client, Session] = {}
        self._make = session or Session
        self._stopped = False
        self.reads = request_arrivals(sock)
        """Whether the loop has readers."""
        if self.reads:
            self.loop.add_reader(sock, self._readable)
        else:
            self._receiver = self.loop.create_task(self._receive_forever())

    @property
    def open_connections(self) -> int:
        """The number of sessions."""
        return len(self._sessions)

    def list_connections(self) -> Iterator[OpenConnection]:
        """Yield the sessions of now."""
        for session in tuple(self._sessions.values()):
            with contextlib.suppress(OSError):  # its socket was closed
                yield session.describe()

    def _readable(self) -> None:
        for _ in range(_READ_AT_ONCE):
            try:
                data, ancillary, _, sender = self.socket.recvmsg(_MAX_DATAGRAM, _ANCILLARY)
            except OSError:
                return
            self._receive(data, Client(sender, arrival_of(ancillary)))

    async def _receive_forever(self) -> None:
        """Receive by waiting.

        A transport of asyncio would drop empty datagrams, keep the port for a while after `stop`,
        and receive nothing any more once a client could not be reached (CPython issue 91227).
        """
        while True:
            try:
                data, sender = await self.loop.sock_recvfrom(self.socket, _MAX_DATAGRAM)
            except ConnectionError:  # a client that does not wait for its reply any more
                continue
            except OSError:
                await asyncio.sleep(_RECEIVE_AGAIN)
                continue
            self._receive(data, Client(sender))

    def _receive(self, data: bytes, client: Client) -> None:
        """Pass on a datagram, in the client's session or a new one; drop it if it is refused."""
        route = self.route
        caller = route.dials.find(Protocol.UDP, client.address)
        if caller is not None and route.dials.refuses(caller, route.plan.owner):
            return
        # Find the session, unless its endpoint has left the plan.
        session = self._sessions.get(client)
        if session is not None and not route.serves(session.endpoint):
            session.close()
            session = None
        # Or open one.
        if session is None:
            by_interface = not route.plan.same_for_all
            index = client.arrival.interface
            interface = interface_name(self.socket, index) if by_interface else ""
            endpoints = route.endpoints(client.address[0], interface)
            if not endpoints:
                return
            reservation = route.budget.reserve(route.plan.owner, client.address[0], _DESCRIPTORS)
            if reservation is None:
                return
            session = self._sessions[client] = self._make(self, client, endpoints[0], reservation)
            session.open(caller)
        session.send(data)

    def reply(self, data: bytes, client: Client) -> None:
        """Send a datagram to a client; it is lost if the socket's buffer is full."""
        # A socket that is bound to every address must name the one that the reply comes from.
        with contextlib.suppress(OSError):  # asyncio's transports send no empty datagrams
            if client.arrival.address:
                self.socket.sendmsg([data], reply_options(client.arrival), 0, client.address)
            else:
                self.socket.sendto(data, client.address)

    def follow(self, plan: ListenerPlan) -> None:
        """Use another plan. A session whose endpoint is gone ends with its next datagram."""
        self.route.plan = plan

    def forget(self, client: Client, session: Session) -> None:
        """Remove a session; the last one of a stopped listener closes its socket."""
        if self._sessions.get(client) is session:
            del self._sessions[client]
            if self._stopped and not self._sessions:
                self.socket.close()

    def pause(self) -> None:
        """Leave new datagrams to another process that has the same socket."""
        if self.reads:
            self.loop.remove_reader(self.socket)

    def stop(self) -> None:
        """Receive no more, and end the sessions, whose replies have no socket to leave by.

        If another process has the same socket, sessions go on until they are idle.
        """
        if self.reads:
            self.loop.remove_reader(self.socket)
        if self.reads and self.route.shared and self._sessions:
            self._stopped = True
            return
        self.abort()
        if self._receiver is not None:
            self._receiver.cancel()
        self.socket.close()

    def abort(self) -> None:
        """End every session."""
        for session in tuple(self._sessions.values()):
            session.close()
