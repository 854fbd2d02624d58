"""TCP listeners: accept a client, dial an endpoint (the next one if that fails), relay.

accept  ->  reserve descriptors  ->  choose endpoints  ->  dial  ->  RelayedConnection
            refused: reset           none: reset           none answers: reset
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle

from steersman.host.connect import TCP_INFO_SIZE, idle_seconds
from steersman.model.addresses import canonical_ip
from steersman.model.connections import ConnectionState, OpenConnection
from steersman.model.names import Protocol
from steersman.model.plan import Endpoint
from steersman.proxy.balance import Balancer, Route
from steersman.proxy.budget import Reservation
from steersman.proxy.dials import Dial
from steersman.proxy.listeners import ListenerPlan
from steersman.proxy.poller import Poller
from steersman.proxy.relay import RelayedConnection
from steersman.proxy.sockets import (
    BACKLOG,
    SocketAddress,
    interface_of,
    open_socket,
    print_address,
    reset,
    tune,
    tune_accepted,
)

DIAL_TIMEOUTS = (0.25, 0.5, 1.0, 2.0)
"""Seconds for each attempt to reach an endpoint (behaviour 11.2)."""
_STALL = 0.05  # seconds by which a timer is late if the process stood still
_MAX_STALLS = 4  # of one attempt
_DESCRIPTORS = 2  # of one connection
_ACCEPT_AT_ONCE = 64
_ACCEPT_IF_SCARCE = 4
_ACCEPT_AGAIN = 0.1  # seconds
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

# PROXY protocol, version 2
_SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
_VERSION_AND_PROXY = 0x21
_TCP4, _TCP6 = 0x11, 0x21


class TcpListener:
    """Accepts the clients of a Route; its connections outlive the listener."""

    def __init__(self, sock: socket.socket, route: Route, poller: Poller) -> None:
        """Start to accept from a listening socket, on the running loop."""
        self.route = route
        self.socket = sock
        self.poller = poller
        self.port = int(sock.getsockname()[1])
        self.loop = asyncio.get_running_loop()
        self.dialling: set[Dialling] = set()
        """Clients that wait for an endpoint."""
        self.connections: set[RelayedConnection] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._proactor: asyncio.Task[None] | None = None
        tune(sock)  # what it accepts inherits that, on Linux
        self._start()

    @property
    def open_connections(self) -> int:
        """The number of connections, with those that are being dialled."""
        return len(self.connections) + len(self.dialling)

    def list_connections(self) -> Iterator[OpenConnection]:
        """Yield the connections of now, and those that are being dialled."""
        for waiting in tuple(self.dialling):
            with suppress(OSError):
                yield waiting.describe()
        for each in tuple(self.connections):
            with suppress(OSError):  # it was reset, and will be closed
                client, server = each.forth.source, each.back.source
                closing = each.forth.ended or each.back.ended
                yield OpenConnection(
                    endpoint=str(each.endpoint),
                    client=print_address(client.getpeername()),
                    frontend=self.frontend_of(client),
                    protocol=Protocol.TCP.value,
                    state=ConnectionState.CLOSING if closing else ConnectionState.OPEN,
                    source=print_address(server.getsockname()),
                    age=time.monotonic() - each.began,
                    idle=idle_of(client),
                )

    def frontend_of(self, client: socket.socket) -> str:
        """Return the destination that a client used; for a node port, our address."""
        address, port = self.route.destination
        return print_address((address or client.getsockname()[0], port))

    # Accepting

    def _start(self) -> None:
        self._retry = None
        try:
            self._queue = select.poll()
            self._queue.register(self.socket, select.POLLIN)
            self.loop.add_reader(self.socket, self._acceptable)
        except (AttributeError, NotImplementedError):  # Windows has no poll, its loop no readers
            self._proactor = self.loop.create_task(self._accept_forever())

    def _acceptable(self, most: int = 0) -> None:
        """Accept clients; only some if others must be evicted, which takes time."""
        scarce = not self.route.budget.has_free(_DESCRIPTORS * _ACCEPT_AT_ONCE)
        for _ in range(most or (_ACCEPT_IF_SCARCE if scarce else _ACCEPT_AT_ONCE)):
            try:
                client, peer = self.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors or no memory: stop for a moment
                self.route.budget.refused += error.errno in _EXHAUSTED
                self.loop.remove_reader(self.socket)
                self._retry = self.loop.call_later(_ACCEPT_AGAIN, self._start)
                return
            self._admit(client, peer)
            # To accept nobody costs ten times as much as to ask: the kernel makes a socket first.
            if not self._queue.poll(0):
                return

    async def _accept_forever(self) -> None:
        while True:
            try:
                client, peer = await self.loop.sock_accept(self.socket)
            except ConnectionError:
                continue
            except OSError as error:
                self.route.budget.refused += error.errno in _EXHAUSTED
                await asyncio.sleep(_ACCEPT_AGAIN)
                continue
            self._admit(client, peer)

    def _admit(self, client: socket.socket, peer: SocketAddress) -> None:
        """Reserve descriptors for a client and serve it, or reset it."""
        reservation = self.route.budget.reserve(self.route.plan.owner, peer[0], _DESCRIPTORS)
        if reservation is None:
            reset(client)
            return
        dialling = Dialling(self, client, peer, reservation)
        reservation.evict = dialling.abort
        self.dialling.add(dialling)
        dialling.begin()

    def follow(self, plan: ListenerPlan) -> None:
        """Use another plan. Connections continue, unless it wants them closed."""
        self.route.plan = plan
        self.reset_unwanted(self.connections)

    def reset_unwanted(self, connections: Iterable[RelayedConnection]) -> None:
        """Reset those whose endpoint the plan does not let them keep."""
        kept = self.route.plan.kept
        if kept is not None:
            for connection in [each for each in connections if each.endpoint not in kept]:
                connection.abort()

    def stop(self) -> None:
        """Close the listening socket; serve the clients that have connected already."""
        if self._proactor is not None:
            self._proactor.cancel()
        else:
            # Clients that the kernel has connected would be reset with the socket. If another
            # process has the same socket, they wait there.
            if self._retry is None and not self.route.shared:
                self._acceptable(BACKLOG)
            if self._retry is not None:
                self._retry.cancel()
            self.loop.remove_reader(self.socket)
        self.socket.close()

    def abort(self) -> None:
        """Reset every connection."""
        for dialling in tuple(self.dialling):
            dialling.abort()
        for connection in tuple(self.connections):
            connection.abort()

    def ended(self, balancer: Balancer, dial: Dial, connection: RelayedConnection) -> None:
        """Note the end of a connection."""
        self.connections.discard(connection)
        self.route.dials.remove(dial)
        self.route.ended(balancer, connection.endpoint, connection.reservation)


class Dialling:
    """A client that waits for an endpoint: one after the other is dialled until one answers.

    One that refused is not tried again. Everything happens in the calls of `begin`, the poller and
    the timer; a dial that is answered at once needs no timer.
    """

    def __init__(
        self,
        listener: TcpListener,
        client: socket.socket,
        peer: SocketAddress,
        reservation: Reservation,
    ) -> None:
        self._listener = listener
        self._client = client
        self._peer = peer
        self._reservation = reservation
        self._interface = ""
        self._caller: Dial | None = None
        self._plan = listener.route.plan
        """The plan that the endpoints are of."""
        self._endpoints: list[Endpoint] = []
        self._choices: Iterator[Endpoint]
        self._timeouts = iter(DIAL_TIMEOUTS)
        self._refused: set[Endpoint] = set()
        self._dial: Dial | None = None
        self._began = 0.0
        self._due = 0.0
        self._stalls = 0
        """Timers of this attempt that fired late."""
        self._timer: asyncio.Handle | None = None
        self._counted: Balancer | None = None
        """The Balancer that counts this client as one that waits."""

    def begin(self) -> None:
        """Choose endpoints and dial the first; reset the client if there is none for it."""
        route = self._listener.route
        try:
            tune_accepted(self._client)
            # Refuse a client that is this process, if it would come back without end.
            caller = self._caller = route.dials.find(Protocol.TCP, self._peer, self._reached)
            if caller is not None and route.dials.refuses(caller, self._plan.owner):
                self.abort()
                return
            if not self._plan.same_for_all:
                self._interface = interface_of(self._client)
        except OSError:  # the client is gone already
            self.abort()
            return
        self._choose()
        if self._endpoints and route.begin_dialling():
            self._counted = route.balancer
            self._began = time.monotonic()
            self._dial_next()
        else:
            self.abort()

    def describe(self) -> OpenConnection:
        """Return the client's connection, with the endpoint that is dialled.

        Raises:
            OSError: the client has gone.
        """
        dial = self._dial
        return OpenConnection(
            endpoint=str(dial.endpoint) if dial is not None else "",
            client=print_address(self._peer),
            frontend=self._listener.frontend_of(self._client),
            protocol=Protocol.TCP.value,
            state=ConnectionState.OPENING,
            age=time.monotonic() - self._began if self._began else None,
        )

    def abort(self) -> None:
        """Reset the client, and give up the dial. Idempotent."""
        listener = self._listener
        if self in listener.dialling:
            self._leave()
            self._hang_up()
            listener.route.budget.release(self._reservation)
            reset(self._client)

    def _reached(self) -> tuple[SocketAddress, SocketAddress]:
        """Return the addresses by which the client may have reached the listener."""
        return self._client.getsockname(), self._listener.route.destination

    def _choose(self) -> None:
        route = self._listener.route
        self._plan, self._endpoints = route.plan, route.endpoints(self._peer[0], self._interface)
        self._choices = cycle(self._endpoints)

    def _dial_next(self) -> None:
        """Dial one endpoint after the other until one may answer; none does: reset the client."""
        route, poller = self._listener.route, self._listener.poller
        for seconds in self._timeouts:
            # The endpoints may be others by now: one that failed may have been ejected.
            if route.plan is not self._plan:
                self._choose()
            if not self._endpoints:
                break
            endpoint = next(self._choices)
            if endpoint in self._refused:
                continue
            try:
                sock = open_socket(endpoint.ip, "TCP")
            except OSError:
                break
            dial = route.dials.add(sock, self._plan.owner, endpoint, self._caller)
            dial.give_up = self._give_up
            self._dial = dial
            try:
                tune(sock)
                error = poller.connect(sock, (endpoint.ip, endpoint.port), self._connected)
            except OSError as problem:  # its address is none
                error = problem.errno or errno.EINVAL
            if error == errno.EINPROGRESS:
                self._stalls = 0
                self._wait(seconds)
                return
            if not error:
                self._join(dial)
                return
            self._failed(dial, OSError(error, os.strerror(error)))
        self.abort()

    def _wait(self, seconds: float) -> None:
        loop = self._listener.loop
        self._due = loop.time() + seconds
        self._timer = loop.call_at(self._due, self._expired, seconds)

    def _expired(self, seconds: float) -> None:
        """Give an endpoint up that did not answer.

        A timer that fires late shows that this process stood still (because of a CPU limit, say).
        The endpoint is not to blame then, so the attempt gets the same time again.
        """
        self._stalls += 1
        if self._listener.loop.time() - self._due >= _STALL and self._stalls < _MAX_STALLS:
            self._wait(seconds)
        elif self._dial is not None:
            self._failed(self._dial, TimeoutError())
            self._dial_next()

    def _give_up(self) -> bool:
        """Let the attempt time out now; False if it does so already."""
        if self._timer is None or self._due == 0.0:
            return False
        self._timer.cancel()
        self._due, self._stalls = 0.0, _MAX_STALLS
        self._timer = self._listener.loop.call_soon(self._expired, 0.0)
        return True

    def _connected(self, error: int) -> None:
        """Go on after a dial that was answered or refused."""
        dial = self._dial
        if dial is None:  # given up
            return
        if error:
            self._failed(dial, OSError(error, os.strerror(error)))
            self._dial_next()
        else:
            self._join(dial)

    def _failed(self, dial: Dial, error: OSError) -> None:
        self._hang_up()
        self._listener.route.failed(dial.endpoint, self._peer[0], error)
        if not isinstance(error, TimeoutError):
            self._refused.add(dial.endpoint)

    def _hang_up(self) -> None:
        """Close the dial's socket, if there is one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._dial is not None:
            self._listener.route.dials.remove(self._dial)
            self._listener.poller.close(self._dial.socket)
            self._dial = None

    def _leave(self) -> None:
        """Wait no longer."""
        self._listener.dialling.discard(self)
        if self._counted is not None:
            self._counted.dialling -= 1
            self._counted = None

    def _join(self, dial: Dial) -> None:
        """Relay between the client and its endpoint."""
        if self._timer is not None:
            self._timer.cancel()
        dial.give_up = None
        self._leave()
        listener, route, client = self._listener, self._listener.route, self._client
        counters = route.reached(self._peer[0], dial.endpoint, time.monotonic() - self._began)
        route.answered(dial.endpoint, counters)
        connection = RelayedConnection(
            (client, dial.socket),
            dial.endpoint,
            counters,
            route.budget,
            self._reservation,
            poller=listener.poller,
            # The route may get another balancer while the connection lasts.
            on_end=partial(listener.ended, route.balancer, dial),
        )
        listener.connections.add(connection)
        self._reservation.evict = connection.abort
        try:
            connection.start(self._greeting() if route.plan.proxy_protocol else b"")
        except OSError:  # one of them is gone already
            connection.abort()
        listener.reset_unwanted([connection])  # the plan may have changed during the dial

    def _greeting(self) -> bytes:
        here, (address, port) = self._client.getsockname()[0], self._listener.route.destination
        destination = (address or canonical_ip(here) or here, port)
        source = (canonical_ip(self._peer[0]) or self._peer[0], self._peer[1])
        return proxy_protocol_header(source, destination)


def idle_of(sock: socket.socket) -> float | None:
    """Return the seconds without data of a TCP connection; None if this system does not tell."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    return idle_seconds(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_SIZE))


def proxy_protocol_header(client: tuple[str, int], destination: tuple[str, int]) -> bytes:
    """Return the header that goes before the first byte of a TCP connection.

    Source: the PROXY protocol, versions 1 & 2 (HAProxy Technologies, 2020), section 2.2.

    Args:
        client: canonical address and port of the client.
        destination: the address and port that it connected to, of the same family.
    """
    ipv6 = ":" in client[0]
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    addresses = b"".join(socket.inet_pton(family, end[0]) for end in (client, destination))
    body = addresses + struct.pack(">HH", client[1], destination[1])
    kind = _TCP6 if ipv6 else _TCP4
    return _SIGNATURE + struct.pack(">BBH", _VERSION_AND_PROXY, kind, len(body)) + body
