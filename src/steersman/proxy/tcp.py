"""TCP listeners: accept a client, dial an endpoint (the next one if that fails), relay.

accept  ->  reserve descriptors  ->  choose endpoints  ->  dial  ->  RelayedConnection
            refused: reset           none: reset           none answers: reset
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Iterable
from functools import partial
from itertools import cycle

from steersman.model.addresses import canonical_ip
from steersman.model.names import Protocol
from steersman.model.plan import Endpoint
from steersman.proxy.balance import Balancer, Route
from steersman.proxy.budget import Reservation
from steersman.proxy.listeners import ListenerPlan
from steersman.proxy.relay import RelayedConnection
from steersman.proxy.sockets import BACKLOG, Dial, SocketAddress, interface_of, reset, tune

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

    def __init__(self, sock: socket.socket, route: Route) -> None:
        """Start to accept from a listening socket, on the running loop."""
        self.route = route
        self.socket = sock
        self.port = int(sock.getsockname()[1])
        self._loop = asyncio.get_running_loop()
        self._dialling: dict[asyncio.Task[bool], tuple[socket.socket, Reservation]] = {}
        """The tasks that bring clients to endpoints."""
        self._retry: asyncio.TimerHandle | None = None
        self._proactor: asyncio.Task[None] | None = None
        self.connections: set[RelayedConnection] = set()
        self._start()

    @property
    def open_connections(self) -> int:
        """The number of connections, with those that are being dialled."""
        return len(self.connections) + len(self._dialling)

    # Accepting

    def _start(self) -> None:
        self._retry = None
        try:
            self._loop.add_reader(self.socket, self._acceptable)
        except NotImplementedError:  # Windows' Proactor loop has no readers
            self._proactor = self._loop.create_task(self._accept_forever())

    def _acceptable(self, most: int = 0) -> None:
        """Accept clients; only some if others must be evicted, which close a moment later."""
        scarce = not self.route.budget.has_free(_DESCRIPTORS * _ACCEPT_AT_ONCE)
        for _ in range(most or (_ACCEPT_IF_SCARCE if scarce else _ACCEPT_AT_ONCE)):
            try:
                client, peer = self.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # the loop calls again if there are more
            except OSError as error:  # no descriptors or no memory: stop for a moment
                self.route.budget.refused += error.errno in _EXHAUSTED
                self._loop.remove_reader(self.socket)
                self._retry = self._loop.call_later(_ACCEPT_AGAIN, self._start)
                return
            self._admit(client, peer)

    async def _accept_forever(self) -> None:
        while True:
            try:
                client, peer = await self._loop.sock_accept(self.socket)
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
        task = self._loop.create_task(self._serve(client, peer, reservation))
        reservation.evict = task.cancel
        self._dialling[task] = (client, reservation)
        task.add_done_callback(self._served)

    def follow(self, plan: ListenerPlan) -> None:
        """Use another plan. Connections continue, unless it wants them closed."""
        self.route.plan = plan
        self._reset_unwanted(self.connections)

    def _reset_unwanted(self, connections: Iterable[RelayedConnection]) -> None:
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
            self._loop.remove_reader(self.socket)
        self.socket.close()

    def abort(self) -> None:
        """Reset every connection."""
        for task in tuple(self._dialling):
            task.cancel()
        for connection in tuple(self.connections):
            connection.abort()

    # Serving

    async def _serve(
        self, client: socket.socket, peer: SocketAddress, reservation: Reservation
    ) -> bool:
        """Connect a client with an endpoint; False to reset it."""
        route = self.route
        try:
            tune(client)
            # Refuse a client that is this process, if it would come back without end.
            reached = (client.getsockname(), route.destination)
            caller = route.dials.find(Protocol.TCP, peer, reached)
            if caller is not None and route.dials.refuses(caller, route.plan.owner):
                return False
            # Choose endpoints and dial them.
            interface = "" if route.plan.same_for_all else interface_of(client)
            endpoints = route.endpoints(peer[0], interface)
            if not endpoints:
                return False
            started, dial = self._loop.time(), None
            with route.dialling() as allowed:
                if allowed:
                    dial = await self._dial(endpoints, peer[0], interface, caller)
            if dial is None:
                return False
            # Relay. The route may get another balancer while the connection lasts.
            balancer = route.balancer
            counters = route.reached(peer[0], dial.endpoint, self._loop.time() - started)
            route.answered(dial.endpoint, counters)
            on_end = partial(self._ended, balancer, dial)
            connection = RelayedConnection(
                dial.endpoint, counters, route.budget, reservation, on_end
            )
            try:
                greeting = b""
                if route.plan.proxy_protocol:
                    here, (address, port) = client.getsockname()[0], route.destination
                    destination = (address or canonical_ip(here) or here, port)
                    source = (canonical_ip(peer[0]) or peer[0], peer[1])
                    greeting = proxy_protocol_header(source, destination)
                await connection.join(client, dial.socket, greeting)
            except (OSError, asyncio.CancelledError):  # `abort` and evictions cancel the task
                balancer.ended(dial.endpoint)
                connection.abort()
                self._hang_up(dial)
                raise
            self.connections.add(connection)
            reservation.evict = connection.abort
            self._reset_unwanted([connection])  # the plan may have changed during the dial
        except OSError:  # the client is gone already
            return False
        return True

    def _served(self, task: asyncio.Task[bool]) -> None:
        """Reset a client that was not connected, even if its task was cancelled before it began."""
        (client, reservation), connected = self._dialling.pop(task), False
        try:
            connected = not task.cancelled() and task.result()
        finally:
            if not connected:
                self.route.budget.release(reservation)
                reset(client)

    async def _dial(
        self, endpoints: list[Endpoint], client: str, interface: str, caller: Dial | None
    ) -> Dial | None:
        """Try one endpoint after the other; one that refused is not tried again."""
        route = self.route
        plan, choices = route.plan, cycle(endpoints)
        refused: set[Endpoint] = set()
        for timeout in DIAL_TIMEOUTS:
            # The endpoints may be others by now: one that failed may have been ejected.
            if route.plan is not plan:
                plan, endpoints = route.plan, route.endpoints(client, interface)
                choices = cycle(endpoints)
            if not endpoints:
                break
            endpoint = next(choices)
            if endpoint in refused:
                continue
            sock = route.open_socket(endpoint.ip, "TCP")
            dial = route.dials.add(sock, plan.owner, endpoint, caller)
            try:
                tune(sock)
                await self._connect(dial, timeout)
            except OSError as error:
                self._hang_up(dial)
                route.failed(endpoint, client, error)
                if not isinstance(error, TimeoutError):
                    refused.add(endpoint)
            except asyncio.CancelledError:
                self._hang_up(dial)
                raise
            else:
                return dial
        return None

    async def _connect(self, dial: Dial, seconds: float) -> None:
        """Connect within a time limit; `DialRegistry.give_up` ends it.

        A timer that fires late shows that this process stood still (because of a CPU limit, say).
        The endpoint is not to blame then, so the attempt gets the same time again.

        Raises:
            TimeoutError: the endpoint did not answer.
            OSError: it refused.
        """
        address = (dial.endpoint.ip, dial.endpoint.port)
        for _ in range(_MAX_STALLS):
            due = self._loop.time() + seconds
            try:
                async with asyncio.timeout_at(due) as dial.attempt:
                    # Continues an attempt that has begun.
                    await self._loop.sock_connect(dial.socket, address)
            except TimeoutError:
                if self._loop.time() - due < _STALL:
                    break
            else:
                return
            finally:
                dial.attempt = None
        raise TimeoutError

    def _hang_up(self, dial: Dial) -> None:
        self.route.dials.remove(dial)
        dial.socket.close()

    def _ended(self, balancer: Balancer, dial: Dial, connection: RelayedConnection) -> None:
        self.connections.discard(connection)
        self.route.dials.remove(dial)
        self.route.ended(balancer, connection.endpoint, connection.reservation)


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
