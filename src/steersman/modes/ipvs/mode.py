"""The ipvs mode as the rest of the program sees it (modes/base.py)."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Collection, Hashable, Iterable
from typing import Any

import msgspec

from steersman.host.exec import Exec
from steersman.host.facts import has_interface
from steersman.host.netlink import NETLINK_GENERIC, NETLINK_ROUTE
from steersman.host.sysctl import SysctlError, apply, ipvs_settings
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset
from steersman.model.stats import ConnectionStats, NodeTotals
from steersman.modes.base import Mode, Support
from steersman.modes.ipvs import render, render_node
from steersman.modes.ipvs.apply import Servers, Sets
from steersman.modes.ipvs.counters import Counters
from steersman.modes.ipvs.device import Device
from steersman.modes.ipvs.fingerprint import of_kernel
from steersman.modes.ipvs.kernel import Doors, Kernel
from steersman.modes.ipvs.names import (
    ADDRESS_SETS,
    CHAINS,
    DEVICE,
    DeviceKey,
    Server,
    ServerKey,
    SetKey,
)
from steersman.modes.ipvs.parse import parse_servers
from steersman.modes.ipvs.probe import check_ipset, check_matches, check_scheduler, find_family
from steersman.modes.ipvs.sockets import Sockets, here
from steersman.modes.ipvs.wire import ask_info, timeouts
from steersman.modes.specs import IpvsOptions, ModeOptions
from steersman.netfilter.iptables import Iptables, Tool, choose_tool
from steersman.netfilter.nf_tables import chains_left

log = logging.getLogger(__name__)
_VERSION = re.compile(r"\d+")
_LOCK_WAIT = 5
_MARKED = frozenset(map(SetKey, ADDRESS_SETS))


class IpvsMode(Mode):
    """Programs virtual servers over netlink, sets with ipset, and a few rules with iptables."""

    name = "ipvs"
    needs_sysctls = True
    traits = Traits(
        filters_without_endpoints=True,
        rejects_unknown_ports=True,
        assigns_vips=True,
        reads_addresses=True,
        one_health_check_port=True,
    )

    def __init__(
        self, execute: Exec, options: IpvsOptions | None = None, inside: Any = here
    ) -> None:
        """Make the mode; nothing is opened before `probe`.

        Args:
            execute: runs ipset and iptables.
            options: what may be set.
            inside: runs a function in the network namespace to program (another one, for tests).
        """
        self._execute = execute
        self._options = options or IpvsOptions()
        self._families: tuple[Family, ...] = tuple(Family)
        self._random_fully = True
        self._kernel: Kernel | None = None
        self._generic = 0
        self._sockets = Sockets(inside)
        self._prepared = False
        self._lock = asyncio.Lock()
        self._counters = Counters(inside)

    # Whether it can run

    async def probe(self) -> Support:
        """Find out whether ip_vs, its scheduler, ipset, iptables and its matches are there."""
        self._disconnect()
        netlink = self._sockets.get(NETLINK_GENERIC)
        loads = self._options.load_modules
        family, lacking = await find_family(self._execute, netlink, loads=loads)
        lacking = lacking or await check_ipset(self._execute)
        scheduler = self._options.scheduler
        if lacking := lacking or check_scheduler(netlink, family, scheduler, self._sockets.inside):
            self._disconnect()
            return Support(usable=False, missing=(lacking,))
        variant = self._options.iptables_variant
        choice = await choose_tool(self._execute, variant, leftovers=not loads)
        if choice.tool is None:
            return Support(usable=False, missing=choice.missing)
        if loads and (
            lacking := await check_matches(self._execute, choice.tool.of(choice.families[0]))
        ):
            self._disconnect()
            return Support(usable=False, missing=(lacking,))
        self._open(choice.tool, choice.families, family)
        self._set_timeouts()
        return Support(usable=True, missing=choice.missing)

    def _open(self, tool: Tool, families: tuple[Family, ...], generic: int) -> None:
        self._families, self._generic = families, generic
        self._random_fully = tool.random_fully
        netlink = self._sockets.get(NETLINK_GENERIC)
        doors = Doors(
            Servers(netlink, generic, self._sockets.inside),
            Device(self._sockets.get(NETLINK_ROUTE), DEVICE),
            Sets(self._execute),
            Iptables(self._execute, tool, _LOCK_WAIT),
        )
        self._kernel = Kernel(doors, families, self._options.exclude_cidrs)
        log.info("ip_vs %s, %d buckets for connections", *ask_info(netlink, generic))

    async def aclose(self, drain: float = 0.0) -> int:
        """Close the sockets; the kernel keeps its virtual servers."""
        self._disconnect()
        return await super().aclose(drain)

    def _disconnect(self) -> None:
        self._kernel = None
        self._sockets.close()

    def _set_timeouts(self) -> None:
        options = self._options
        wanted = (options.tcp_timeout, options.tcp_fin_timeout, options.udp_timeout)
        if any(wanted):
            self._sockets.get(NETLINK_GENERIC).request(timeouts(self._generic, *wanted))

    def prepare(self) -> None:
        """Set the kernel's switches (behaviour 1.6), once, before anything is added.

        Raises:
            BusyError: one cannot be set.
        """
        if self._prepared:
            return
        settings = ipvs_settings(kernel_version(), self._options.strict_arp)
        try:
            for warning in self._sockets.inside(lambda: apply(settings)):
                log.warning("%s", warning)
        except SysctlError as error:
            raise BusyError(f"{error.strerror}; ipvs needs it") from error
        self._prepared = True

    # What is wanted

    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Render sets, chains and jumps."""
        families = tuple(family for family in settings.families if family in self._families)
        settings = msgspec.structs.replace(settings, families=families)
        return render_node.render_node(settings, random_fully=self._random_fully)

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render one ServicePort's virtual servers and set entries."""
        if plan.key.family not in self._families:
            return {}
        options = render.Options(self._options.scheduler, self._options.scheduler_flags)
        return render.render_service(plan, settings, options)

    # What there is

    async def read(self) -> Ruleset:
        """Return what the kernel has of ours; real servers that are drained by now are removed."""
        async with self._lock:
            kernel = await self._opened()
            try:
                return await kernel.read()
            except OSError as error:
                raise BusyError(f"the kernel does not say what it has: {error}") from error
            except ApplyError as error:
                raise BusyError(f"what is drained cannot be removed: {error}") from error

    async def fingerprint(self) -> Hashable | None:
        """Return hashes of what the kernel lists; None where a drained endpoint is to be deleted.

        None, too, where it does not say, so that `read` finds out why.
        """
        async with self._lock:
            kernel = await self._opened()
            try:
                return await of_kernel(kernel, self._sockets, self._generic)
            except (OSError, BusyError):
                return None

    async def apply(self, change: Diff) -> None:
        """Carry out a Diff."""
        async with self._lock:
            kernel = await self._opened()
            if change.added:
                self.prepare()
            try:
                await kernel.write(change)
            except OSError as error:
                raise BusyError(f"the kernel could not be told: {error}") from error

    async def _opened(self) -> Kernel:
        if self._kernel is None:
            support = await self.probe()
            if self._kernel is None:
                raise BusyError(" ".join(support.missing))
        return self._kernel

    def find_leftovers(self, families: Iterable[Family]) -> str:
        """Look for our device, else for our chains."""
        if has_interface(DEVICE):
            return f"the interface {DEVICE} is left"
        return chains_left(lambda table, chain: (table, chain) in CHAINS, families)

    # Connections

    async def stats(self, plans: Collection[ServicePlan]) -> ConnectionStats:
        """Connections, packets and bytes so far."""
        return await self._counters.stats(plans)

    async def node_totals(self) -> NodeTotals:
        """Return connections, packets and bytes of all virtual servers."""
        return await self._counters.totals()

    def without_new_connections(self, have: Ruleset) -> Ruleset:
        """Return what carries connections: virtual servers without endpoints for new ones."""
        return {
            key: msgspec.structs.replace(value, targets=(), weights=())
            if isinstance(value, Server)
            else value
            for key, value in have.items()
            if isinstance(key, ServerKey | DeviceKey) or key in _MARKED
        }

    async def connections(self) -> int:
        """How many TCP and SCTP connections are established by way of virtual servers.

        Raises:
            BusyError: the kernel does not say.
        """
        kernel = await self._opened()
        try:
            table = parse_servers(kernel.servers.table())
        except OSError as error:
            raise BusyError(f"the kernel does not say what is connected: {error}") from error
        return sum(real.active for group in table.values() for real in group)


def kernel_version() -> tuple[int, int]:
    """Major and minor version of the running kernel."""
    major, minor = _VERSION.findall(os.uname().release)[:2]
    return int(major), int(minor)


def create(execute: Exec, options: ModeOptions) -> IpvsMode:
    """Build the mode for registry.py; ip_vs is loaded only if this mode is the configured one."""
    wanted = msgspec.structs.replace(
        options.ipvs,
        iptables_variant=options.iptables_variant,
        load_modules=options.asked_for == IpvsMode.name,
    )
    return IpvsMode(execute, wanted)
