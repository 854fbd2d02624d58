"""The ipvs mode as the rest of the program sees it (modes/base.py)."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from steersman.host.exec import Exec
from steersman.host.netlink import NETLINK_GENERIC, NETLINK_ROUTE, Netlink, NetlinkError
from steersman.host.sysctl import SysctlError, apply, ipvs_settings
from steersman.model.addresses import family_of, in_cidr
from steersman.model.names import Family
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.modes.base import ApplyError, BusyError, Support
from steersman.modes.diff import Diff, Ruleset
from steersman.modes.iptables.apply import Iptables
from steersman.modes.iptables.render import Features
from steersman.modes.iptables.script import LIMITS, write_runs
from steersman.modes.iptables.variant import choose
from steersman.modes.ipvs import render, render_node
from steersman.modes.ipvs.apply import Device, Servers, Sets
from steersman.modes.ipvs.names import (
    ADDRESSES,
    DEVICE,
    DeviceKey,
    MemberKey,
    Server,
    ServerKey,
    SetKey,
    Target,
    role_set,
)
from steersman.modes.ipvs.options import IpvsOptions
from steersman.modes.ipvs.parse import parse_rules
from steersman.modes.ipvs.probe import check_ipset, check_scheduler, find_family
from steersman.modes.ipvs.wire import Stats, list_destinations, resolve, timeouts

T = TypeVar("T")
log = logging.getLogger(__name__)
_VERSION = re.compile(r"\d+")
_LOCK_WAIT = 5
_INLINE = 64  # objects up to which the system call is not worth a thread
_MOST_ENTRIES = 1 << 20  # of a set; ipset's own 65,536 is less than large clusters have
_RANDOM_FULLY = (1, 6, 2)


def here(function: Callable[[], T]) -> T:
    """Run something in the network namespace that this process is in."""
    return function()


class IpvsMode:
    """Programs virtual servers over netlink, sets with ipset, and a few rules with iptables."""

    name = "ipvs"
    traits = Traits(
        filters_without_endpoints=True, rejects_unknown_ports=True, holds_addresses=True
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
        self._inside = inside
        self._sets = Sets(execute)
        self._families: tuple[Family, ...] = tuple(Family)
        self._features = Features()
        self._doors: tuple[Servers, Device, Iptables] | None = None
        self._sockets: list[Netlink] = []
        self._held: Counter[str] = Counter()
        """How many virtual servers need each address of the interface."""
        self._stray: set[str] = set()
        """Addresses that no virtual server needs, found on the interface or in the set."""
        self._prepared = False
        self._lock = asyncio.Lock()

    async def probe(self) -> Support:
        """Find out whether ip_vs, its scheduler, ipset and iptables are there."""
        self.disconnect()
        netlink = self._open(NETLINK_GENERIC)
        loads = self._options.load_modules
        family, lacking = await find_family(self._execute, netlink, loads=loads)
        lacking = lacking or await check_ipset(self._execute)
        scheduler = self._options.scheduler
        if lacking := lacking or check_scheduler(netlink, family, scheduler, self._inside):
            self.disconnect()
            return Support(usable=False, missing=(lacking,))
        choice = await choose(self._execute, self._options.iptables_variant)
        if choice.tool is None:
            return Support(usable=False, missing=choice.missing)
        self._families = choice.families
        self._features = Features(random_fully=choice.tool.version >= _RANDOM_FULLY)
        self._doors = (
            Servers(netlink, family, self._inside),
            Device(self._open(NETLINK_ROUTE), DEVICE),
            Iptables(self._execute, choice.tool, _LOCK_WAIT),
        )
        self._set_timeouts(netlink, family)
        return Support(usable=True, missing=choice.missing)

    def disconnect(self) -> None:
        """Close the sockets; the kernel keeps what it has."""
        self._doors = None
        for netlink in self._sockets:
            netlink.close()
        self._sockets.clear()

    def _open(self, protocol: int) -> Netlink:
        netlink: Netlink = self._inside(lambda: Netlink(protocol))
        self._sockets.append(netlink)
        return netlink

    def _set_timeouts(self, netlink: Netlink, family: int) -> None:
        options = self._options
        wanted = (options.tcp_timeout, options.tcp_fin_timeout, options.udp_timeout)
        if any(wanted):
            netlink.request(timeouts(family, *wanted))

    def _prepare(self) -> None:
        """Set the kernel's switches (SPEC 1.6), once, before anything is added."""
        if self._prepared:
            return
        major, minor = _VERSION.findall(os.uname().release)[:2]
        settings = ipvs_settings((int(major), int(minor)), self._options.strict_arp)
        try:
            for warning in self._inside(lambda: apply(settings)):
                log.warning("%s", warning)
        except SysctlError as error:
            raise BusyError(f"{error.strerror}; ipvs needs it") from error
        self._prepared = True

    def render_node(self, settings: NodeSettings) -> Ruleset:
        """Render sets, chains and jumps."""
        families = tuple(family for family in settings.families if family in self._families)
        settings = msgspec.structs.replace(settings, families=families)
        return render_node.render_node(settings, self._features)

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        """Render one ServicePort's virtual servers and set entries."""
        if plan.key.family not in self._families:
            return {}
        return render.render_service(plan, settings, render.Options(self._options.scheduler))

    async def read(self) -> Ruleset:
        """Return what the kernel has of ours; real servers that are drained by now are removed.

        Without our interface no virtual server is ours: another program made them.
        """
        async with self._lock:
            doors = await self._opened()
            try:
                return await self._read(*doors)
            except OSError as error:
                raise BusyError(f"the kernel does not say what it has: {error}") from error
            except ApplyError as error:
                raise BusyError(f"what is drained cannot be removed: {error}") from error

    async def _read(self, servers: Servers, device: Device, iptables: Iptables) -> Ruleset:
        ruleset: dict[Any, Any] = dict(await self._sets.read())
        held = device.addresses()
        marked = {key.entry for key in _derived(ruleset)}
        if device.index():
            ruleset[DeviceKey(DEVICE)] = "dummy"
        for family in self._families:
            ruleset.update(parse_rules(await iptables.save(family), int(family)))
        found = await self._own_servers(servers) if DeviceKey(DEVICE) in ruleset else {}
        for key, server in found.items():
            whole = key.address in held and key.address in marked
            ruleset[key] = msgspec.structs.replace(server, held=whole)
        for entry in list(_derived(ruleset)):
            del ruleset[entry]
        self._held = _count(ruleset)
        self._stray = (held | marked) - self._held.keys()
        return ruleset

    async def _own_servers(self, servers: Servers) -> dict[ServerKey, Server]:
        """List the virtual servers that are not excluded, and delete what is drained of them."""
        excluded = self._options.exclude_cidrs

        def read() -> dict[ServerKey, Server]:
            own = {
                key: server
                for key, server in servers.read().items()
                if not any(in_cidr(key.address, cidr) for cidr in excluded)
            }
            servers.end_drained(own)
            return own

        return await asyncio.to_thread(read)

    def traffic(self, keys: Iterable[ServerKey]) -> Iterator[tuple[ServerKey, Target, Stats]]:
        """Tell what went through each endpoint of some virtual servers since it was added.

        Blocks, on a socket of its own: for another thread than that of the loop. What is not there
        is left out.

        Raises:
            OSError: the kernel does not say.
        """
        with self._inside(lambda: Netlink(NETLINK_GENERIC, buffer=1 << 20)) as netlink:
            family = resolve(netlink)
            for key in keys:
                with suppress(NetlinkError):
                    for target, stats in list_destinations(netlink, family, key):
                        yield key, target, stats

    async def fingerprint(self) -> Hashable | None:
        """None: sets, servers and addresses have no common generation; they are read each time."""
        return None

    async def apply(self, change: Diff) -> None:
        """Carry out a Diff: what is added first, from sets to addresses, then what goes."""
        async with self._lock:
            servers, device, iptables = await self._opened()
            if change.added:
                self._prepare()
            try:
                await self._carry_out(change, servers, device, iptables)
            except OSError as error:
                raise BusyError(f"the kernel could not be told: {error}") from error

    async def _carry_out(
        self, change: Diff, servers: Servers, device: Device, iptables: Iptables
    ) -> None:
        growth = _growth(change)
        bind = sorted(a for a, more in growth.items() if more > 0 and not self._held[a])
        fewer = {a for a, more in growth.items() if more < 0} | self._stray
        unbind = sorted(a for a in fewer if self._held[a] + growth[a] <= 0)
        await self._sets.restore([*_creations(change), *_entries("add", bind, change.added)])
        await self._write_rules(change, iptables)
        if DeviceKey(DEVICE) in change.added:
            device.make()
        if len(change) <= _INLINE:
            servers.write(_servers(change))
        else:
            await asyncio.to_thread(servers.write, _servers(change))
        device.add(bind)
        device.drop(unbind)
        servers.delete(key for key in change.removed if isinstance(key, ServerKey))
        if DeviceKey(DEVICE) in change.removed:
            device.remove()
        gone = {key.set for key in change.removed if isinstance(key, SetKey)}
        entries = [k for k in change.removed if isinstance(k, MemberKey) and k.set not in gone]
        unbound = [a for a in unbind if role_set(ADDRESSES, family_of(a)) not in gone]
        await self._sets.restore(
            [*_entries("del", unbound, entries), *(f"destroy {name}" for name in sorted(gone))]
        )
        self._held.update(growth)
        for address in unbind:
            del self._held[address]
        self._stray = set()

    async def _write_rules(self, change: Diff, iptables: Iptables) -> None:
        rules = Diff(
            {key: value for key, value in change.added.items() if _is_rule(key)},
            {key: value for key, value in change.removed.items() if _is_rule(key)},
            {key: value for key, value in change.changed.items() if _is_rule(key)},
        )
        for run in write_runs(rules, LIMITS[iptables.tool.variant], {}) if rules else ():
            await iptables.restore(run)

    async def _opened(self) -> tuple[Servers, Device, Iptables]:
        if self._doors is None:
            support = await self.probe()
            if self._doors is None:
                raise BusyError(" ".join(support.missing))
        return self._doors


def _is_rule(key: object) -> bool:
    return type(key) is tuple


def _count(objects: Ruleset) -> Counter[str]:
    """How many virtual servers need each address of the interface."""
    return Counter(
        key.address for key, value in objects.items() if isinstance(key, ServerKey) and value.held
    )


def _growth(change: Diff) -> Counter[str]:
    """By how much the number of virtual servers that need an address changes."""
    growth = _count(change.added)
    growth.update(_count({key: new for key, (_, new) in change.changed.items()}))
    growth.subtract(_count(change.removed))
    growth.subtract(_count({key: old for key, (old, _) in change.changed.items()}))
    return growth


def _derived(objects: Ruleset) -> Iterable[MemberKey]:
    """Entries that follow from what the interface holds: no owner has them."""
    names = {role_set(ADDRESSES, family) for family in Family}
    return (key for key in objects if isinstance(key, MemberKey) and key.set in names)


def _servers(change: Diff) -> list[tuple[ServerKey, Server | None, Server]]:
    fresh = [(k, None, v) for k, v in change.added.items() if isinstance(k, ServerKey)]
    return [
        *fresh,
        *((k, old, new) for k, (old, new) in change.changed.items() if isinstance(k, ServerKey)),
    ]


def _creations(change: Diff) -> list[str]:
    return [
        f"create {k.set} {v} maxelem {_MOST_ENTRIES}"
        for k, v in change.added.items()
        if isinstance(k, SetKey)
    ]


def _entries(verb: str, addresses: Iterable[str], keys: Iterable[Any]) -> list[str]:
    return [
        *(f"{verb} {role_set(ADDRESSES, family_of(a))} {a}" for a in addresses),
        *(f"{verb} {k.set} {k.entry}" for k in keys if isinstance(k, MemberKey)),
    ]
