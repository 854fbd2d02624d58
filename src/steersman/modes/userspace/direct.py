"""Portals without rules: sockets bind the addresses of Services themselves.

With an address provider every Service address is added to an interface first; without one
(rootless) only those are served that this machine has anyway, and node ports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Hashable, Iterable

import msgspec

from steersman.host.facts import has_interface
from steersman.model.addresses import family_of
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset
from steersman.model.stats import ConnectionStats, NodeTotals
from steersman.modes.base import Mode, Support
from steersman.modes.userspace.addresses import Addresses
from steersman.modes.userspace.names import (
    ADDRESS,
    Portal,
    StrayKey,
    left_without_endpoints,
    listeners_of,
    portals_of,
    removed_listeners,
)
from steersman.modes.userspace.render import render_direct
from steersman.proxy.engine import Proxy
from steersman.proxy.handoff import SocketHandoff, Stage
from steersman.proxy.listeners import LISTENER, FrontendKey
from steersman.proxy.sockets import OpenSocket, PortAllocator, open_socket

_ONLY_OWN = (
    "Only node ports, and Service addresses that this machine has, are served: neither rules nor "
    "addresses may be added; run it as root, without --userspace-portals=none, for all."
)


class DirectOptions(msgspec.Struct, frozen=True):
    """What may be set about direct portals."""

    udp_idle: float = 0.25
    """Seconds after which an idle UDP client is forgotten (`--udp-timeout`)."""
    limit: int = 0
    """Descriptors for listeners and connections; 0 for what the system allows."""
    dns_search: tuple[str, ...] = ()
    """Suffixes that questions to DNS Services are tried with (dns.py)."""
    handover: str = ""
    """Name by which listening sockets are taken over from the process before, and given to the
    next; "" for not at all."""


class DirectMode(Mode):
    """Proxies TCP and UDP on the very addresses of Services."""

    hands_over_sockets = True
    traits = Traits(
        reads_addresses=True,
        terminates_connections=True,
        forwards_sctp=False,
        localhost_node_ports=True,
        relays_localhost=True,
        tracks_connections=False,
    )

    def __init__(
        self,
        name: str,
        addresses: Addresses | None,
        options: DirectOptions | None = None,
        open_socket: OpenSocket = open_socket,
    ) -> None:
        """Make the mode; nothing is run or opened before it is used.

        Args:
            name: the mode's name.
            addresses: adds addresses to this machine; None serves only those that it has.
            options: what the operator set.
            open_socket: makes sockets (in another network namespace, for tests).
        """
        options = options or DirectOptions()
        self.name = name
        self.proxy = Proxy(open_socket, PortAllocator(), options.udp_idle, options.limit)
        self.proxy.dns_search = options.dns_search
        self._handoff = SocketHandoff(options.handover, self.proxy)
        self._addresses = addresses
        self._refusing: dict[FrontendKey, Portal] = {}
        """Destinations that are held without a socket, so that this machine refuses them."""
        self._lock = asyncio.Lock()

    @property
    def variant(self) -> str:
        """`none` if this machine gets no addresses; "" otherwise."""
        return "" if self._addresses is not None else "none"

    async def probe(self) -> Support:
        """Say whether addresses can be added; without that, what is not served."""
        if self._addresses is not None:
            return await self._addresses.probe()
        return Support(usable=True, missing=(_ONLY_OWN,))

    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Nothing: no rules."""
        del settings
        return {}

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render the listeners of one ServicePort."""
        if self._addresses is not None:
            return render_direct(plan, settings)
        return render_direct(
            plan, settings, frozenset(settings.family(plan.key.family).local_addresses)
        )

    async def read(self) -> Ruleset:
        """What listens ("" where its address is gone), and addresses that nobody needs."""
        async with self._lock:
            objects = {**self.proxy.listeners, **self._refusing}
            if self._addresses is None:
                return objects
            held = await self._addresses.held()
            found: dict[FrontendKey | StrayKey, object] = {
                key: value if key.node_port or key.address in held else ""
                for key, value in objects.items()
            }
            if self._addresses.dedicated:
                interface = self._addresses.interface
                for address in sorted(held - _needed(objects)):
                    found[StrayKey(ADDRESS, family_of(address), interface, address)] = ""
            return found

    async def fingerprint(self) -> Hashable | None:
        """None: reading is cheap."""
        return None

    async def wait_for_external_change(self) -> None:
        """Return when a process that had taken over has gone: listeners may be missing."""
        await self._handoff.wait_until_resumed()

    async def apply(self, change: Diff) -> None:
        """Add addresses, start listeners, stop others, remove addresses that nobody needs."""
        async with self._lock:
            if self._handoff.stage is not Stage.SERVING:
                await self._handoff.follow(
                    listeners_of(change), left_without_endpoints(change), removed_listeners(change)
                )
                return
            before = _needed({**self.proxy.listeners, **self._refusing})
            wanted = listeners_of(change)
            refusing = portals_of(change)
            fresh = _needed({**wanted, **refusing})
            if wanted:
                await self._handoff.take_over()
            try:
                await self._add(fresh)
                replaced = await self.proxy.start(wanted)
            except (ApplyError, BusyError):
                await self._take_back(fresh)
                raise
            gone = {key for key in change.removed if key[0] == LISTENER} - wanted.keys()
            self.proxy.reset_connections(left_without_endpoints(change))
            self.proxy.stop([*replaced.values(), *self.proxy.take(gone)])
            for key in change.removed:
                self._refusing.pop(key, None)
            self._refusing.update(refusing)
            strays = {key.text for key in change.removed if isinstance(key, StrayKey)}
            await self._remove(before | strays)
            if wanted:
                await self._handoff.started()

    async def _add(self, addresses: set[str]) -> None:
        if self._addresses is not None:
            for address in sorted(addresses):
                await self._addresses.add(address)

    async def _remove(self, maybe: set[str]) -> None:
        """Remove those of some addresses that nobody needs now."""
        if self._addresses is not None:
            needed = _needed({**self.proxy.listeners, **self._refusing})
            for address in sorted(maybe - needed):
                await self._addresses.remove(address)

    async def _take_back(self, addresses: set[str]) -> None:
        """Remove addresses that were added in vain.

        On an interface of our own another process may need them; `read` finds what nobody does.
        """
        if self._addresses is not None and not self._addresses.dedicated:
            await self._remove(addresses)

    def find_leftovers(self, families: Iterable[Family]) -> str:
        """Look for an interface of our own."""
        del families
        if self._addresses is None or not self._addresses.dedicated:
            return ""
        name = self._addresses.interface
        return f"the interface {name} is left" if has_interface(name) else ""

    async def stats(self, plans: Collection[ServicePlan]) -> ConnectionStats:
        """Return what the proxy counted, for all ServicePorts that it knows."""
        del plans
        return await asyncio.to_thread(self.proxy.traffic.stats)

    async def node_totals(self) -> NodeTotals:
        """Return the sums over all endpoints."""
        return self.proxy.totals()

    async def wait_for_handoff(self) -> None:
        """Return once the next process has the listening sockets."""
        await self._handoff.wait_until_retired()

    async def aclose(self, drain: float = 0.0) -> int:
        """Stop listening, let connections end; return how many were cut after `drain` seconds.

        Addresses on an interface of our own stay: the next process may use them already.
        """
        self._handoff.close()
        addresses = _needed({**self.proxy.listeners, **self._refusing})
        cut = await self.proxy.drain(drain)
        self._refusing.clear()
        if self._addresses is not None and not self._addresses.dedicated:
            await self._remove(addresses)
        return cut


def _needed(objects: Ruleset) -> set[str]:
    """The addresses of Services that some objects need."""
    return {key.address for key in objects if isinstance(key, FrontendKey) and not key.node_port}
