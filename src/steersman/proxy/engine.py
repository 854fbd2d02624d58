"""The listeners of this process: started, changed and stopped to follow a Diff."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Mapping
from functools import partial

import msgspec

from steersman.model.errors import ApplyError
from steersman.model.names import Family, PlanKey, Protocol
from steersman.proxy.balance import Balancer
from steersman.proxy.budget import DescriptorBudget
from steersman.proxy.dials import DialRegistry
from steersman.proxy.incoming import note_interfaces
from steersman.proxy.listeners import FrontendKey, ListenerPlan
from steersman.proxy.route import Route
from steersman.proxy.searching import PORT_NAME, SearchingSession
from steersman.proxy.sockets import (
    ListenerKey,
    OpenSocket,
    PortAllocator,
    Sockets,
    descriptor_limit,
    listen,
    prepare,
    wildcard,
)
from steersman.proxy.tcp import TcpListener
from steersman.proxy.traffic import Traffic
from steersman.proxy.udp import MakeSession, UdpListener

AnyListener = TcpListener | UdpListener
_DRAIN_LOOK = 0.05  # seconds
_CLOSING = 3  # rounds of the loop until what was closed is closed


class Proxy:
    """Every listener, and what they share."""

    def __init__(
        self, open_socket: OpenSocket, ports: PortAllocator, udp_idle: float, limit: int = 0
    ) -> None:
        """Make a proxy without listeners.

        Args:
            open_socket: makes sockets (in another network namespace, for tests).
            ports: gives out proxy ports.
            udp_idle: seconds after which an idle UDP client is forgotten.
            limit: descriptors for listeners and connections; 0 for what the system allows.
        """
        self.traffic = Traffic()
        self.budget = DescriptorBudget(limit or descriptor_limit())
        self.dials = DialRegistry()
        self._open_socket = open_socket
        self._ports = ports
        self._udp_idle = udp_idle
        self.dns_search: tuple[str, ...] = ()
        """Suffixes to try for questions to DNS Services (dns.py); () leaves them alone."""
        self._listeners: dict[FrontendKey, AnyListener] = {}
        self._balancers: dict[PlanKey, Balancer] = {}
        self._owned: dict[PlanKey, set[AnyListener]] = {}
        """The listeners of each ServicePort, stopped ones not among them."""
        self._left: list[AnyListener] = []
        """Stopped ones whose connections go on."""
        self._inherited: dict[ListenerKey, socket.socket] = {}
        """Sockets of the process before, that no listener has taken yet."""
        self._taken: set[FrontendKey] = set()
        """Listeners that have taken one, as long as there may be more of them."""

    @property
    def listeners(self) -> dict[FrontendKey, ListenerPlan]:
        """What there is."""
        return {key: listener.route.plan for key, listener in self._listeners.items()}

    def port(self, key: FrontendKey) -> int:
        """The port of a listener; 0 where there is none."""
        return self._listeners[key].port if key in self._listeners else 0

    @property
    def open_connections(self) -> int:
        """TCP connections and UDP sessions now."""
        self._left = [listener for listener in self._left if listener.open_connections]
        every = (*self._listeners.values(), *self._left)
        return sum(listener.open_connections for listener in every)

    def sockets(self) -> dict[ListenerKey, socket.socket]:
        """The sockets of all listeners, to be given away."""
        return {
            _place(key, listener.route.plan): listener.listening
            for key, listener in self._listeners.items()
        }

    def inherit(self, sockets: Sockets) -> None:
        """Keep other sockets for listeners to come; those from before are closed."""
        for sock in self._inherited.values():
            sock.close()
        self._inherited = dict(sockets)
        self._taken.clear()

    def inherited(self, key: FrontendKey) -> bool:
        """Whether a listener has just taken the socket of the process before."""
        return key in self._taken

    def retire(self) -> None:
        """Leave to another process what it has the same sockets for: TCP clients may go to both.

        UDP clients go to the other one; what they have asked here is still answered.
        """
        for listener in self._listeners.values():
            listener.route.shared = True
            if isinstance(listener, UdpListener):
                listener.pause()

    def resume(self) -> None:
        """Serve all clients again: the other process has gone."""
        for listener in self._listeners.values():
            listener.route.shared = False
            if isinstance(listener, UdpListener):
                listener.resume()

    async def start(
        self, wanted: Mapping[FrontendKey, ListenerPlan]
    ) -> dict[FrontendKey, AnyListener]:
        """Start listeners, or give them other plans; return those that are replaced.

        They still accept: `stop` them when nothing leads to them any more, or `put_back`.

        Raises:
            ApplyError: one cannot be started; then none is, and none has another plan.
        """
        fresh: dict[FrontendKey, AnyListener] = {}
        try:
            for key, plan in wanted.items():
                if not self._fits(key, plan):
                    fresh[key] = await self._open(key, plan)
        except OSError as error:
            self._give_back(fresh)
            self.stop(fresh.values())
            raise ApplyError(_trouble(key, plan, error)) from error
        replaced = {key: self._listeners[key] for key in fresh if key in self._listeners}
        for key in wanted.keys() - fresh.keys():
            route = self._listeners[key].route
            before = route.plan.owner
            self._listeners[key].follow(wanted[key])
            if route.plan.owner != before:
                self._own(route.plan.owner, self._listeners[key])
                route.balancer = self._balancer(route.plan.owner)
                self._disown(before, self._listeners[key])
        self._listeners.update(fresh)
        for owner in {plan.owner for plan in wanted.values()}:
            self._forget_endpoints(owner)
        return replaced

    def put_back(self, replaced: Mapping[FrontendKey, AnyListener]) -> None:
        """Have what was replaced instead of what replaced it, which is stopped."""
        instead = self.take(replaced)
        self._listeners.update(replaced)
        self.stop(instead)

    def take(self, keys: Iterable[FrontendKey]) -> list[AnyListener]:
        """Give listeners up; they still accept until they are stopped."""
        return [self._listeners.pop(key) for key in keys if key in self._listeners]

    def cut(self, keys: Iterable[FrontendKey]) -> None:
        """Reset the connections of listeners that have lost all endpoints, where that is wanted."""
        for listener in [self._listeners[key] for key in keys if key in self._listeners]:
            plan = listener.route.plan
            if plan.kept is not None:
                listener.follow(msgspec.structs.replace(plan, kept=()))  # for who waits there
                listener.abort()

    def stop(self, listeners: Iterable[AnyListener]) -> None:
        """Accept no more; TCP connections go on."""
        for listener in listeners:
            self._ports.free(listener.port)
            listener.stop()
            self.budget.used -= 1
            self._disown(listener.route.plan.owner, listener)
            self._left.append(listener)
        self._left = [listener for listener in self._left if listener.open_connections]

    def _fits(self, key: FrontendKey, plan: ListenerPlan) -> bool:
        """Whether a listener is there already and just needs another plan."""
        if key not in self._listeners:
            return False
        have = self._listeners[key].route.plan
        return (have.bind, have.port) == (plan.bind, plan.port)

    async def _open(self, key: FrontendKey, plan: ListenerPlan) -> AnyListener:
        sock = self._inherit(key, plan) or self._bind(key, plan)
        try:
            listener = await self._listen(sock, key, plan)
        except OSError:
            sock.close()
            raise
        self.budget.used += 1
        self._own(plan.owner, listener)
        return listener

    def _inherit(self, key: FrontendKey, plan: ListenerPlan) -> socket.socket | None:
        sock = self._inherited.pop(_place(key, plan), None)
        if sock is None:
            return None
        port = sock.getsockname()[1]
        if port == plan.port or (not plan.port and self._ports.allows(port)):
            sock.setblocking(False)
            self._taken.add(key)
            return sock
        sock.close()
        return None

    def _give_back(self, fresh: Mapping[FrontendKey, AnyListener]) -> None:
        """Inherit again what listeners took that are given up: somebody may wait there."""
        for key, listener in fresh.items():
            if key in self._taken:
                with contextlib.suppress(OSError):  # no descriptors: a new socket has to do
                    place = _place(key, listener.route.plan)
                    self._inherited[place] = listener.listening.dup()
        self._taken -= fresh.keys()

    def _bind(self, key: FrontendKey, plan: ListenerPlan) -> socket.socket:
        address = plan.bind or wildcard(key.family is Family.IPV6)
        sock = self._open_socket(address, key.protocol)
        try:
            prepare(sock, shared=bool(plan.port))
            if plan.port:
                sock.bind((address, plan.port))
            else:
                self._ports.bind(sock, address)
        except OSError:
            sock.close()
            raise
        return sock

    async def _listen(
        self, sock: socket.socket, key: FrontendKey, plan: ListenerPlan
    ) -> AnyListener:
        balancer = self._balancer(plan.owner)
        route = Route(
            plan,
            balancer,
            self.traffic,
            self.budget,
            self._open_socket,
            dials=self.dials,
            destination=(key.address, key.port),
        )
        if key.protocol is Protocol.TCP:
            note_interfaces(sock)
            listen(sock)
            return TcpListener(sock, route)
        make: MakeSession | None = None
        if self.dns_search and plan.owner.name.port == PORT_NAME:
            make = partial(SearchingSession, suffixes=self.dns_search)
        udp = UdpListener(sock, route, self._udp_idle, make)
        await udp.start()
        return udp

    def _balancer(self, owner: PlanKey) -> Balancer:
        return self._balancers.setdefault(owner, Balancer())

    def _own(self, owner: PlanKey, listener: AnyListener) -> None:
        self._owned.setdefault(owner, set()).add(listener)
        self.traffic.begin(owner)

    def _disown(self, owner: PlanKey, listener: AnyListener) -> None:
        """Forget what the listeners of a ServicePort shared with the last one."""
        self._owned[owner].discard(listener)
        if not self._owned[owner]:
            del self._owned[owner]
            self._balancers.pop(owner, None)
            self.traffic.forget(owner)
            self.dials.forget(owner)

    def _forget_endpoints(self, owner: PlanKey) -> None:
        """Drop counts of endpoints that are in no plan and have no connection any more."""
        active = self._balancer(owner).active.keys()
        plans = (listener.route.plan for listener in self._owned[owner])
        self.traffic.keep(owner, active | frozenset().union(*(plan.endpoints for plan in plans)))

    async def drain(self, seconds: float) -> int:
        """Stop all listeners, wait for the connections to end; return how many had to be cut."""
        self.stop(self.take(list(self._listeners)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.open_connections:  # noqa: ASYNC110  # every end would have to tell
                    await asyncio.sleep(_DRAIN_LOOK)
        cut = self.open_connections
        for listener in self._left:
            listener.abort()
        for _ in range(_CLOSING):
            await asyncio.sleep(0)
        return cut


def _place(key: FrontendKey, plan: ListenerPlan) -> ListenerKey:
    return ListenerKey(str(key), plan.bind)


def _trouble(key: FrontendKey, plan: ListenerPlan, error: OSError) -> str:
    where = f"{plan.bind or 'every address'} port {plan.port or '(a free one)'}/{key.protocol}"
    why = error.strerror or str(error)
    return f"{plan.owner}: {where} cannot be listened on: {why}; end what else uses it"
