"""TCP: accept, dial an endpoint (the next one where it fails), and leave the rest to relay.py."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterable
from functools import partial
from typing import Any

from steersman.model.addresses import canonical_ip
from steersman.model.names import Protocol
from steersman.model.plan import Endpoint
from steersman.proxy.balance import Balancer
from steersman.proxy.budget import Reservation
from steersman.proxy.dials import Dial
from steersman.proxy.incoming import interface_of
from steersman.proxy.listeners import ListenerPlan
from steersman.proxy.proxy_protocol import header
from steersman.proxy.relay import RelayedConnection, connect
from steersman.proxy.route import Route, spread
from steersman.proxy.sockets import BACKLOG, reset, tune

DIAL_TIMEOUTS = (0.25, 0.5, 1.0, 2.0)
"""Seconds for each attempt to reach an endpoint (behaviour 11.2)."""
_STALL = 0.05  # seconds
_STALLS = 4  # of one attempt
_DESCRIPTORS = 2  # of one connection
_ACCEPT_AT_ONCE = 64
_ACCEPT_IF_SHORT = 4
_ACCEPT_AGAIN = 0.1  # seconds
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class TcpListener:
    """Accepts the clients of a Route; a stopped one leaves its connections running."""

    def __init__(self, sock: socket.socket, route: Route) -> None:
        """Take a listening socket and start accepting, on the running loop."""
        self.route = route
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[asyncio.Task[bool], tuple[socket.socket, Reservation]] = {}
        """What brings each client to an endpoint."""
        self._retry: asyncio.TimerHandle | None = None
        self._proactor: asyncio.Task[None] | None = None
        self.pairs: set[RelayedConnection] = set()
        self._start()

    @property
    def listening(self) -> socket.socket:
        """The listening socket."""
        return self._socket

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

    def _acceptable(self, most: int = 0) -> None:
        """Accept clients; few if others have to give way, which close a moment later."""
        few = not self.route.budget.has_free(_DESCRIPTORS * _ACCEPT_AT_ONCE)
        for _ in range(most or (_ACCEPT_IF_SHORT if few else _ACCEPT_AT_ONCE)):
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
                self.route.budget.refused += error.errno in _EXHAUSTED
                await asyncio.sleep(_ACCEPT_AGAIN)
                continue
            self._take(client, peer)

    def _pause(self, error: OSError) -> None:
        """Accept no more for a moment: the system has no descriptors or memory for it."""
        if error.errno in _EXHAUSTED:
            self.route.budget.refused += 1
        self._loop.remove_reader(self._socket)
        self._retry = self._loop.call_later(_ACCEPT_AGAIN, self._start)

    def _take(self, client: socket.socket, peer: tuple[Any, ...]) -> None:
        reservation = self.route.budget.reserve(self.route.plan.owner, peer[0], _DESCRIPTORS)
        if reservation is None:
            reset(client)
            return
        task = self._loop.create_task(self._serve(client, peer, reservation))
        reservation.evict = task.cancel
        self._tasks[task] = (client, reservation)
        task.add_done_callback(self._served)

    def follow(self, plan: ListenerPlan) -> None:
        """Take another plan; connections go on, but for those that it wants closed."""
        self.route.plan = plan
        self._cut(self.pairs)

    def _cut(self, pairs: Iterable[RelayedConnection]) -> None:
        kept = self.route.plan.kept
        if kept is not None:
            for pair in [pair for pair in pairs if pair.endpoint not in kept]:
                pair.abort()

    def stop(self) -> None:
        """Close the listening socket; those who have connected already are served."""
        if self._proactor is not None:
            self._proactor.cancel()
        else:
            if self._retry is None and not self.route.shared:
                self._acceptable(BACKLOG)
            if self._retry is not None:
                self._retry.cancel()
            self._loop.remove_reader(self._socket)
        self._socket.close()

    def abort(self) -> None:
        """Reset every connection."""
        for task in tuple(self._tasks):
            task.cancel()
        for pair in tuple(self.pairs):
            pair.abort()

    # Serving

    async def _serve(
        self, client: socket.socket, peer: tuple[Any, ...], reservation: Reservation
    ) -> bool:
        try:
            tune(client)
            return await self._join(client, peer, reservation)
        except OSError:
            return False  # the client is gone already

    def _served(self, task: asyncio.Task[bool]) -> None:
        """Turn a client away that was not joined, also where its task never got to begin."""
        (client, reservation), joined = self._tasks.pop(task), False
        try:
            joined = not task.cancelled() and task.result()
        finally:
            if not joined:
                self.route.budget.release(reservation)
                reset(client)

    async def _join(
        self, client: socket.socket, peer: tuple[Any, ...], reservation: Reservation
    ) -> bool:
        """Bring a client and an endpoint together; False where there is none for it."""
        route = self.route
        reached = (client.getsockname(), route.destination)
        caller = route.dials.caller(Protocol.TCP, peer, reached)
        if caller is not None and route.dials.refuses(caller, route.plan.owner):
            return False
        needs_interface = not route.plan.same_for_all
        interface = interface_of(client) if needs_interface else ""
        endpoints = route.endpoints(peer[0], interface)
        if not endpoints:
            return False
        started = self._loop.time()
        with route.dialling() as may:
            dial = await self._dial(endpoints, caller) if may else None
        if dial is None:
            return False
        endpoint = dial.endpoint
        balancer = route.balancer
        counters = route.reached(peer[0], endpoint, self._loop.time() - started)
        pair = RelayedConnection(
            endpoint, counters, route.budget, reservation, partial(self._ended, balancer, dial)
        )
        try:
            greets = route.plan.proxy_protocol
            greeting = _greeting(client, peer, route.destination) if greets else b""
            await connect(self._loop, pair, client, dial.socket, greeting)
        except (OSError, asyncio.CancelledError):  # the task is cancelled where all are reset
            balancer.ended(endpoint)
            pair.abort()
            self._hang_up(dial)
            raise
        self.pairs.add(pair)
        reservation.evict = pair.abort
        self._cut([pair])  # the plan may be another one by now
        return True

    async def _dial(self, endpoints: list[Endpoint], caller: Dial | None) -> Dial | None:
        """Try endpoint after endpoint; one that refused is not asked again."""
        refused: set[Endpoint] = set()
        for timeout, endpoint in zip(
            DIAL_TIMEOUTS, spread(endpoints, len(DIAL_TIMEOUTS)), strict=True
        ):
            if endpoint in refused:
                continue
            sock = self.route.open_socket(endpoint.ip, "TCP")
            dial = self.route.dials.begin(sock, self.route.plan.owner, endpoint, caller)
            try:
                tune(sock)
                await self._connect(sock, (endpoint.ip, endpoint.port), timeout)
            except TimeoutError:
                pass
            except OSError:
                refused.add(endpoint)
            except asyncio.CancelledError:
                self._hang_up(dial)
                raise
            else:
                return dial
            self._hang_up(dial)
            self.route.failed(endpoint)
        return None

    async def _connect(self, sock: socket.socket, address: tuple[str, int], seconds: float) -> None:
        """Connect in some time; a timer that was late says that this process stood still.

        That is nobody's fault but its own (a CPU limit, say), so it waits for as long again.
        """
        for _ in range(_STALLS):
            due = self._loop.time() + seconds
            try:
                async with asyncio.timeout_at(due):
                    await self._loop.sock_connect(sock, address)  # or go on with it
            except TimeoutError:
                if self._loop.time() - due < _STALL:
                    break
            else:
                return
        raise TimeoutError

    def _hang_up(self, dial: Dial) -> None:
        self.route.dials.end(dial)
        dial.socket.close()

    def _ended(self, balancer: Balancer, dial: Dial, pair: RelayedConnection) -> None:
        self.pairs.discard(pair)
        self.route.dials.end(dial)
        self.route.ended(balancer, pair.endpoint, pair.reservation)


def _greeting(client: socket.socket, peer: tuple[Any, ...], destination: tuple[str, int]) -> bytes:
    name = client.getsockname()
    address = destination[0] or canonical_ip(name[0]) or name[0]
    return header((canonical_ip(peer[0]) or peer[0], peer[1]), (address, destination[1]))
