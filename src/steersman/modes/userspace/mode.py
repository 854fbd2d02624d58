"""The userspace mode: listeners in this process, and what leads clients to them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Set
from typing import TypeAlias

import msgspec

from steersman.host.exec import Exec
from steersman.model.conntrack import Stale
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset
from steersman.model.stats import ConnectionStats, NodeTotals
from steersman.modes.base import Mode, Support
from steersman.modes.specs import ModeOptions
from steersman.modes.userspace import render
from steersman.modes.userspace.addresses import LinuxAddresses
from steersman.modes.userspace.direct import DirectMode, DirectOptions
from steersman.modes.userspace.flows import past_portals
from steersman.modes.userspace.names import (
    BaseKey,
    left_without_endpoints,
    listeners_of,
    part_of,
    portals_of,
    removed_listeners,
)
from steersman.modes.userspace.nft_portals import NftPortals
from steersman.modes.userspace.portals import IptablesPortals
from steersman.netfilter.conntrack import delete_stale
from steersman.proxy.engine import Proxy, RunningListener
from steersman.proxy.handoff import SocketHandoff, Stage
from steersman.proxy.listeners import LISTENER, PORTAL, FrontendKey, ListenerPlan
from steersman.proxy.sockets import OpenSocket, PortAllocator, open_socket

Forget: TypeAlias = Callable[[Stale], Awaitable[object]]
log = logging.getLogger(__name__)
_HANDOFF_NAME = "steersman-userspace"
"""By which one process takes over the listening sockets of another."""


class UserspaceOptions(msgspec.Struct, frozen=True):
    """What may be set about the userspace modes."""

    ports: tuple[int, int] | None = None
    """First and last proxy port (`--proxy-port-range`); None leaves it to the kernel."""
    udp_idle: float = 0.25
    """Seconds after which an idle UDP client is forgotten (`--udp-timeout`)."""
    iptables_variant: str = ""
    """`nft`, `legacy`, or "" for the one that this machine uses."""
    portals: str = ""
    """`iptables`, `nftables`, or "" for the first of them that works."""
    limit: int = 0
    """Descriptors for listeners and connections; 0 for what the system allows."""
    leftovers: bool = False
    """Only to remove what is left: no table is created by asking."""
    handover: str = ""
    """Name by which listening sockets are taken over from the process before, and given to the
    next; "" for not at all."""


class UserspaceMode(Mode):
    """Proxies TCP and UDP itself; rules of iptables or nft lead Service addresses to it."""

    name = "userspace"
    hands_over_sockets = True
    traits = Traits(
        reads_addresses=True,
        terminates_connections=True,
        forwards_sctp=False,
        localhost_node_ports=True,
        relays_localhost=True,
    )

    def __init__(
        self,
        execute: Exec,
        options: UserspaceOptions | None = None,
        open_socket: OpenSocket = open_socket,
        forget: Forget | None = None,
    ) -> None:
        """Make the mode; nothing is run or opened before it is used.

        Args:
            execute: the door to iptables and nft.
            options: what the operator set.
            open_socket: makes sockets (in another network namespace, for tests).
            forget: deletes stale entries of conntrack; None leaves them.
        """
        options = options or UserspaceOptions()
        self._choices: dict[str, IptablesPortals | NftPortals] = {
            "iptables": IptablesPortals(
                execute, options.iptables_variant, leftovers=options.leftovers
            ),
            "nftables": NftPortals(execute),
        }
        if options.portals:
            self._choices = {options.portals: self._choices[options.portals]}
        self.portals = next(iter(self._choices.values()))
        self.proxy = Proxy(
            open_socket, PortAllocator(options.ports), options.udp_idle, options.limit
        )
        self._handoff = SocketHandoff(options.handover, self.proxy)
        self._forget = forget
        self._lock = asyncio.Lock()

    async def probe(self) -> Support:
        """Find what rules can be written with: iptables, or else nft."""
        missing: tuple[str, ...] = ()
        for portals in self._choices.values():
            support = await portals.probe()
            if support.usable:
                self.portals = portals
                return support
            missing += support.missing
        return Support(usable=False, missing=missing)

    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Render the chains that portals are in."""
        families = self.portals.families or settings.families
        ruleset = render.render_node(settings)
        return {key: value for key, value in ruleset.items() if key.family in families}

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render the listeners and portals of one ServicePort."""
        families = self.portals.families or settings.families
        return render.render_redirect(plan, settings) if plan.key.family in families else {}

    async def read(self) -> Ruleset:
        """What listens, and the rules that lead there."""
        async with self._lock:
            return {**self.proxy.listeners, **await self.portals.read()}

    async def fingerprint(self) -> Hashable | None:
        """None: reading the rules is all that there is."""
        return None

    async def wait_for_external_change(self) -> None:
        """Return when a process that had taken over has gone: the rules may be different."""
        await self._handoff.wait_until_resumed()

    async def apply(self, change: Diff) -> None:
        """Start listeners, switch the rules to them, stop the others."""
        async with self._lock:
            if self._handoff.stage is not Stage.SERVING:
                await self._handoff.follow(
                    listeners_of(change), left_without_endpoints(change), removed_listeners(change)
                )
                return
            wanted = listeners_of(change)
            if wanted:
                await self._handoff.take_over()
            for family in Family:  # each has rules of its own, which can fail on their own
                if part := part_of(change, family):
                    await self._follow(family, part)
            if wanted:
                await self._handoff.started()

    async def _follow(self, family: Family, change: Diff) -> None:
        before = self.proxy.listeners
        wanted = listeners_of(change)
        replaced = await self.proxy.start(wanted)
        gone = {k for k in change.removed if k[0] == LISTENER} - wanted.keys()
        try:
            await self._lead(change, wanted)
        except BaseException:  # cancelled, too: what is stopped next is what there is
            await self._take_back(before, wanted, replaced)
            raise
        self.proxy.reset_connections(left_without_endpoints(change))
        self.proxy.stop([*replaced.values(), *self.proxy.take(gone)])
        opened = {key.of(PORTAL) for key in wanted if key not in before or key in replaced}
        await self._clear_ways(family, opened | portals_of(change).keys())

    async def _clear_ways(self, family: Family, portals: Set[FrontendKey]) -> None:
        """Have UDP clients that never pause come by new portals: conntrack knows other ways."""
        ports = {key: self.proxy.port(key.of(LISTENER)) for key in portals}
        past = past_portals(family, {k: self.portals.known(k) for k in portals}, ports)
        if self._forget is not None and past:
            try:
                await self._forget(past)
            except OSError as error:
                log.warning("UDP clients of new portals may be led elsewhere: %s", error)

    async def _lead(self, change: Diff, listeners: dict[FrontendKey, ListenerPlan]) -> None:
        portals = portals_of(change)
        for key in listeners:  # their port may be another one now
            portal = self.portals.known(key.of(PORTAL))
            if portal is not None and key.of(PORTAL) not in change.removed:
                portals.setdefault(key.of(PORTAL), portal)
        gone = [key for key in change.removed if key[0] != LISTENER and key not in portals]
        bases = [key for key in change.added if isinstance(key, BaseKey)]
        ports = {key: self.proxy.port(key.of(LISTENER)) for key in portals}
        await self.portals.apply(gone, portals, bases, ports)

    async def _take_back(
        self,
        before: dict[FrontendKey, ListenerPlan],
        wanted: dict[FrontendKey, ListenerPlan],
        replaced: dict[FrontendKey, RunningListener],
    ) -> None:
        """Undo `start`: the rules lead where they did; rules of the process before do, too."""
        self.proxy.put_back(replaced)
        fresh = [k for k in wanted if k not in before and not self.proxy.inherited.is_claimed(k)]
        self.proxy.stop(self.proxy.take(fresh))
        await self.proxy.start({key: before[key] for key in wanted if key in before})

    def find_leftovers(self, families: Iterable[Family]) -> str:
        """Look for the rules of the portals in use."""
        return self.portals.find_leftovers(families)

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
        """Stop listening, let connections end; return how many were cut after `drain` seconds."""
        self._handoff.close()
        return await self.proxy.drain(drain)


def create(execute: Exec, options: ModeOptions) -> UserspaceMode | DirectMode:
    """Build the mode for registry.py, with the portals that were asked for or may be changed."""
    portals = options.portals or ("" if os.geteuid() == 0 else "none")
    if portals in ("direct", "none"):
        addresses = LinuxAddresses(execute) if portals == "direct" else None
        wanted = DirectOptions(options.udp_idle, handover=_HANDOFF_NAME)
        return DirectMode("userspace", addresses, wanted)
    return UserspaceMode(
        execute,
        UserspaceOptions(
            options.proxy_ports,
            options.udp_idle,
            options.iptables_variant,
            portals,
            leftovers=options.leftovers,
            handover=_HANDOFF_NAME,
        ),
        forget=delete_stale,
    )
