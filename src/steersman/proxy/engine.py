"""The listeners of this process: start, change, stop and drain them.

A change has two halves, because rules may have to be switched from one listener to another in
between. A listener is replaced if its address or port changes, otherwise only its plan changes:

    started = await proxy.start(wanted)       old and new listeners accept
    (lead the rules to the new listeners)
    await proxy.finish(started)               or `go_back(started)`, if the rules were refused

The listeners of a ServicePort share a balancer and counters. All listeners share a descriptor
budget. Connections outlive their listener: `drain` waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

import msgspec

from steersman.model.connections import ConnectionSearch
from steersman.model.errors import ApplyError
from steersman.model.names import Family, PlanKey, Protocol
from steersman.model.plan import Endpoint
from steersman.model.stats import NodeTotals, ProxyTotals, TrafficCounters
from steersman.proxy.balance import Balancer, Route
from steersman.proxy.budget import DescriptorBudget
from steersman.proxy.dials import DialRegistry
from steersman.proxy.dns import PORT_NAME, SearchingSession
from steersman.proxy.listeners import FrontendKey, ListenerPlan
from steersman.proxy.poller import Poller, make_poller
from steersman.proxy.ports import PortAllocator
from steersman.proxy.sockets import (
    BACKLOG,
    ListenerKey,
    Sockets,
    descriptor_limit,
    open_socket,
    prepare,
    request_arrivals,
    wildcard,
)
from steersman.proxy.tcp import TcpListener
from steersman.proxy.traffic import LATENCY_BUCKETS, Traffic
from steersman.proxy.udp import MakeSession, UdpListener

RunningListener = TcpListener | UdpListener
_DRAIN_POLL = 0.05  # seconds
_CLOSING_ROUNDS = 3
_AT_ONCE = 256  # connections that are listed while other tasks wait: some milliseconds


class Started(NamedTuple):
    """The listeners that `start` has started or changed."""

    wanted: Mapping[FrontendKey, ListenerPlan]
    before: Mapping[FrontendKey, ListenerPlan]
    """The plans until then of those that existed."""
    replaced: Mapping[FrontendKey, RunningListener]
    """Listeners that others take the place of; they still accept."""

    @property
    def opened(self) -> set[FrontendKey]:
        """The listeners that are new, or have another port now."""
        return {key for key in self.wanted if key not in self.before or key in self.replaced}


class SharedState:
    """The state that listeners of a ServicePort share, until the last of them stops."""

    def __init__(self, traffic: Traffic) -> None:
        self.dials = DialRegistry()
        self._traffic = traffic
        self.balancers: dict[PlanKey, Balancer] = {}
        self._users: dict[PlanKey, set[RunningListener]] = {}
        """The listeners of each ServicePort that are not stopped."""

    def balancer(self, owner: PlanKey) -> Balancer:
        """Return the balancer of a ServicePort."""
        return self.balancers.setdefault(owner, Balancer())

    def add(self, owner: PlanKey, listener: RunningListener) -> None:
        """Note that a listener uses the state of a ServicePort."""
        self._users.setdefault(owner, set()).add(listener)
        self._traffic.begin(owner)

    def remove(self, owner: PlanKey, listener: RunningListener) -> None:
        """Note that a listener no longer uses it; drop it with the last one."""
        self._users[owner].discard(listener)
        if not self._users[owner]:
            del self._users[owner]
            self.balancers.pop(owner, None)
            self._traffic.forget(owner)
            self.dials.forget(owner)

    def drop_former_endpoints(self, owner: PlanKey) -> None:
        """Drop counters of endpoints that no plan has and no connection uses.

        Failures are forgotten, too: an endpoint that comes back is tried like any other.
        """
        balancer = self.balancer(owner)
        plans = (listener.route.plan for listener in self._users[owner])
        planned = frozenset[Endpoint]().union(*(plan.endpoints for plan in plans))
        balancer.forget_failures(planned)
        self._traffic.keep(owner, balancer.active.keys() | planned)


class Proxy:
    """All listeners of this process."""

    def __init__(self, ports: PortAllocator, udp_idle: float, limit: int = 0) -> None:
        """Make a proxy without listeners.

        Args:
            ports: gives out proxy ports.
            udp_idle: seconds after which an idle UDP session ends.
            limit: descriptors for listeners and connections; 0 for all that the system allows.
        """
        self.budget = DescriptorBudget(limit or descriptor_limit())
        self.traffic = Traffic()
        self.shared = SharedState(self.traffic)
        self.dns_search: tuple[str, ...] = ()
        """Suffixes to try for queries to DNS Services (dns.py)."""
        self._ports = ports
        self._udp_idle = udp_idle
        self._listeners: dict[FrontendKey, RunningListener] = {}
        self._inherited: Sockets = {}
        """The predecessor's sockets, for listeners to come."""
        self._stopped: list[RunningListener] = []
        """Stopped listeners that still have connections."""
        self._poller: Poller | None = None
        """What TCP connections wait with, from the first listener on."""

    @property
    def listeners(self) -> dict[FrontendKey, ListenerPlan]:
        """The plans of the listeners."""
        return {key: listener.route.plan for key, listener in self._listeners.items()}

    def listens_at(self, key: FrontendKey, plan: ListenerPlan) -> bool:
        """Whether there is a listener at the address and port of a plan."""
        old = self._listeners[key].route.plan if key in self._listeners else None
        return old is not None and (old.bind, old.port) == (plan.bind, plan.port)

    def port(self, key: FrontendKey) -> int:
        """Return the port of a listener; 0 for an unknown one."""
        return self._listeners[key].port if key in self._listeners else 0

    @property
    def open_connections(self) -> int:
        """The number of TCP connections and UDP sessions."""
        every = (*self._listeners.values(), *self._stopped)
        return sum(listener.open_connections for listener in every)

    async def find_connections(self, search: ConnectionSearch) -> None:
        """Add the connections that a search wants; other tasks have their turn in between."""
        for listener in (*self._listeners.values(), *self._stopped):
            if listener.route.plan.owner not in search.owners:
                continue
            for number, found in enumerate(listener.list_connections(), 1):
                search.add(found)
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)

    def totals(self) -> NodeTotals:
        """Return the counts over all endpoints that were ever served."""
        total = self.traffic.total
        return NodeTotals(
            connections=total.connections,
            traffic=TrafficCounters(0, 0, *total.moved),
            proxy=ProxyTotals(
                failures=total.failures,
                seconds=total.dial_seconds,
                buckets=tuple(zip((*LATENCY_BUCKETS, math.inf), total.dial_buckets, strict=True)),
                open_connections=self.open_connections,
                refused=self.budget.refused,
            ),
        )

    def sockets(self) -> dict[ListenerKey, socket.socket]:
        """Return the listening sockets, for the next process."""
        return {
            _listener_key(key, listener.route.plan): listener.socket
            for key, listener in self._listeners.items()
        }

    def inherit(self, sockets: Sockets) -> None:
        """Keep the predecessor's sockets for listeners to come, and close those from before.

        A listener takes a duplicate, so that clients may wait if it is given up and started again.
        """
        for sock in self._inherited.values():
            sock.close()
        self._inherited = sockets

    def retire(self) -> None:
        """Leave new clients to another process, which has the same sockets.

        TCP clients may still be accepted here; replies to earlier datagrams are still passed on.
        """
        for listener in self._listeners.values():
            listener.route.shared = True
            if isinstance(listener, UdpListener):
                listener.pause()

    async def start(self, wanted: Mapping[FrontendKey, ListenerPlan]) -> Started:
        """Start listeners, or change the plans of those that exist; `finish` or `go_back` follows.

        Raises:
            ApplyError: one cannot be started; then none is, and no plan has changed.
        """
        # Open all new listeners first: only this can fail.
        fresh: dict[FrontendKey, RunningListener] = {}
        try:
            for key, plan in wanted.items():
                if not self.listens_at(key, plan):
                    fresh[key] = self._open(key, plan)
        except OSError as error:
            self._stop(fresh.values())
            at = f"{plan.bind or 'every address'} port {plan.port or '(a free one)'}/{key.protocol}"
            why = error.strerror or str(error)
            raise ApplyError(
                f"{plan.owner}: {at} cannot be listened on: {why}; end what else uses it"
            ) from error
        # Then change the plans of the others.
        existed = {key: self._listeners[key].route.plan for key in wanted if key in self._listeners}
        replaced = {key: self._listeners[key] for key in fresh if key in self._listeners}
        for key in wanted.keys() - fresh.keys():
            listener, plan = self._listeners[key], wanted[key]
            before = listener.route.plan.owner
            listener.follow(plan)
            if plan.owner != before:  # the Service has another name now, but the same address
                self.shared.add(plan.owner, listener)
                listener.route.balancer = self.shared.balancer(plan.owner)
                self.shared.remove(before, listener)
        self._listeners.update(fresh)
        for owner in {plan.owner for plan in wanted.values()}:
            self.shared.drop_former_endpoints(owner)
        return Started(wanted, existed, replaced)

    async def go_back(self, started: Started) -> None:
        """Use the listeners and plans from before `start` again."""
        instead = self._take(started.replaced)
        self._listeners.update(started.replaced)
        # The predecessor's rules may lead to the sockets that it handed over.
        fresh = [
            key
            for key, plan in started.wanted.items()
            if key not in started.before and _listener_key(key, plan) not in self._inherited
        ]
        self._stop([*instead, *self._take(fresh)])
        await self.start(started.before)

    async def finish(
        self,
        started: Started,
        removed: Iterable[FrontendKey] = (),
        without_endpoints: Iterable[FrontendKey] = (),
    ) -> None:
        """Stop listeners, now that nothing leads to them any more.

        Args:
            started: what `start` has returned; the replaced ones stop.
            removed: others that stop.
            without_endpoints: those of them whose connections are reset if their plans say so.
        """
        self.reset_connections(without_endpoints)
        self._stop([*started.replaced.values(), *self._take(removed)])

    def remove(self, keys: Iterable[FrontendKey]) -> None:
        """Stop listeners; unknown ones are ignored."""
        self._stop(self._take(keys))

    def _take(self, keys: Iterable[FrontendKey]) -> list[RunningListener]:
        """Remove listeners and return them. They still accept until they are stopped."""
        return [self._listeners.pop(key) for key in keys if key in self._listeners]

    def reset_connections(self, keys: Iterable[FrontendKey]) -> None:
        """Reset the connections of listeners without endpoints, if their plans say so."""
        for listener in [self._listeners[key] for key in keys if key in self._listeners]:
            plan = listener.route.plan
            if plan.kept is not None:
                listener.follow(msgspec.structs.replace(plan, kept=()))  # for waiting clients
                listener.abort()

    def _stop(self, listeners: Iterable[RunningListener]) -> None:
        """Stop accepting; TCP connections continue."""
        for listener in listeners:
            self._ports.release(listener.port)
            listener.stop()
            self.budget.used -= 1
            self.shared.remove(listener.route.plan.owner, listener)
            self._stopped.append(listener)
        self._stopped = [listener for listener in self._stopped if listener.open_connections]

    async def drain(self, seconds: float) -> int:
        """Stop all listeners and let connections end; return how many were reset at the end."""
        self.remove(list(self._listeners))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.open_connections:  # noqa: ASYNC110  # cheaper than an event for each end
                    await asyncio.sleep(_DRAIN_POLL)
        cut = self.open_connections
        for listener in self._stopped:
            listener.abort()
        # Without readers sockets are closed a few rounds of the loop later.
        for _ in range(_CLOSING_ROUNDS):
            await asyncio.sleep(0)
        if self._poller is not None:
            self._poller.stop()
            self._poller = None
        return cut

    def _open(self, key: FrontendKey, plan: ListenerPlan) -> RunningListener:
        """Start a listener on the predecessor's socket or a new one."""
        inherited = self._claim(key, plan)
        address = plan.bind or wildcard(key.family is Family.IPV6)
        sock = inherited or open_socket(address, key.protocol)
        listener: RunningListener
        try:
            if inherited is None:
                # The next process may bind a fixed port, too; proxy ports are handed over or new.
                prepare(sock, shared=bool(plan.port))
                if plan.port:
                    sock.bind((address, plan.port))
                else:
                    self._ports.bind(sock, address)
            route = Route(
                plan,
                self.shared.balancer(plan.owner),
                self.traffic,
                self.budget,
                dials=self.shared.dials,
                destination=(key.address, key.port),
            )
            if key.protocol is Protocol.TCP:
                request_arrivals(sock)  # accepted connections inherit it
                sock.listen(BACKLOG)
                if self._poller is None:
                    self._poller = make_poller()
                listener = TcpListener(sock, route, self._poller)
            else:
                session: MakeSession | None = None
                if self.dns_search and plan.owner.name.port == PORT_NAME:
                    session = partial(SearchingSession, suffixes=self.dns_search)
                listener = UdpListener(sock, route, self._udp_idle, session)
        except OSError:
            sock.close()
            raise
        self.budget.used += 1
        self.shared.add(plan.owner, listener)
        return listener

    def _claim(self, key: FrontendKey, plan: ListenerPlan) -> socket.socket | None:
        """Return the predecessor's socket for a listener; None if there is none that fits."""
        sock = self._inherited.get(_listener_key(key, plan))
        # The range of proxy ports, or the port itself, may be configured differently now.
        port = sock.getsockname()[1] if sock is not None else 0
        if sock is None or not (port == plan.port or (not plan.port and self._ports.allows(port))):
            return None
        claimed = sock.dup()
        claimed.setblocking(False)
        return claimed


def _listener_key(key: FrontendKey, plan: ListenerPlan) -> ListenerKey:
    return ListenerKey(str(key), plan.bind)
