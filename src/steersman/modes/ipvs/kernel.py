"""All of the mode's kernel objects behind one `read` and one `write`, in the order that is safe."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, NamedTuple

import msgspec

from steersman.model.addresses import family_of, in_cidr
from steersman.model.names import Family
from steersman.model.ruleset import Diff, Ruleset
from steersman.modes.ipvs.apply import Servers, Sets
from steersman.modes.ipvs.changes import (
    INLINE,
    Work,
    address_entries,
    held_addresses,
    only_endpoints,
)
from steersman.modes.ipvs.device import Device
from steersman.modes.ipvs.names import (
    ADDRESS_SETS,
    ADDRESSES,
    DEVICE,
    DeviceKey,
    MemberKey,
    Server,
    ServerKey,
    SetKey,
    role_set,
)
from steersman.modes.ipvs.parse import parse_rules
from steersman.netfilter.iptables import Iptables
from steersman.netfilter.names import WHOLE
from steersman.netfilter.rule_text import LIMITS, Step, old_and_new, rule_lines, write_steps


class Doors(NamedTuple):
    """How each sort of object is read and written."""

    servers: Servers
    device: Device
    sets: Sets
    iptables: Iptables


class Kernel:
    """The doors to the kernel, and which addresses it holds for whom."""

    def __init__(
        self, doors: Doors, families: tuple[Family, ...], excluded: tuple[str, ...] = ()
    ) -> None:
        """Take the doors.

        Args:
            doors: how each sort of object is read and written.
            families: those that iptables can do here.
            excluded: CIDRs; virtual servers and held addresses in them are somebody else's.
        """
        self.servers, self.device, self.sets, self.iptables = doors
        self.families = families
        self._excluded = excluded
        self._sets: set[str] = set()
        """Our sets in the kernel."""
        self._held: Counter[str] = Counter()
        """How many virtual servers need each address of the interface."""
        self._claimed: set[ServerKey] = set()
        """Virtual servers in excluded CIDRs that we have written."""
        self._others: dict[ServerKey, Server] = {}
        """Those that we have not, as of the last `read`."""

    async def read(self) -> Ruleset:
        """Return what there is of ours; real servers that are drained by now are removed.

        Without our interface no virtual server is ours: another program made them.
        """
        ruleset: dict[Any, Any] = {**await self.sets.read()}
        self._sets = {key.set for key in ruleset if type(key) is SetKey}
        held = await asyncio.to_thread(self.device.addresses)
        marks = [k for k in ruleset if type(k) is MemberKey and k.set in ADDRESS_SETS]
        marked = {key.entry for key in marks}
        for mark in marks:
            del ruleset[mark]
        if self.device.index():
            ruleset[DeviceKey(DEVICE)] = "dummy"
            for key, server in (await asyncio.to_thread(self._own_servers)).items():
                whole = key.address in held and key.address in marked
                ruleset[key] = msgspec.structs.replace(server, held=whole) if whole else server
        for family in self.families:
            ruleset.update(parse_rules(await self.iptables.save(family), int(family)))
        self._held = held_addresses(ruleset)
        for address in (held | marked) - self._held.keys():
            if not self._is_excluded(address):
                ruleset[MemberKey(role_set(ADDRESSES, family_of(address)), address)] = ""
        return ruleset

    def _own_servers(self) -> dict[ServerKey, Server]:
        """List the virtual servers that are not excluded, and delete what is drained of them."""
        found = self.servers.read()
        own = {key: server for key, server in found.items() if self.is_ours(key)}
        self._others = {key: server for key, server in found.items() if key not in own}
        self.servers.end_drained(own)
        return own

    def is_ours(self, key: ServerKey) -> bool:
        """Whether a virtual server is ours to change: written by us, or not excluded."""
        return key in self._claimed or not self._is_excluded(key.address)

    def _claim(self, work: Work) -> None:
        """What is wanted is ours once it is written; an earlier process may have made it."""
        for place, (key, old, new) in enumerate(work.servers):
            if not self.is_ours(key):
                work.servers[place] = key, old or self._others.get(key), new

    def _is_excluded(self, address: str) -> bool:
        return any(in_cidr(address, cidr) for cidr in self._excluded)

    async def write(self, change: Diff) -> None:
        """Carry out a Diff: what is added first, from sets to addresses; then what goes.

        Raises:
            ApplyError: something was refused.
            BusyError: a door is closed for now.
            OSError: a socket failed.
        """
        if endpoints := only_endpoints(change):
            self.servers.write(endpoints)
        else:
            await self._carry_out(Work(change))

    async def _carry_out(self, work: Work) -> None:
        self._claim(work)
        held, growth = self._held, work.growth
        bind = sorted(a for a, more in growth.items() if more > 0 and not held[a])
        fewer = {a for a, more in growth.items() if more < 0} | work.strays
        unbind = sorted(a for a in fewer if held[a] + growth[a] <= 0)
        await self.sets.restore([*work.sets, *address_entries("add", bind)])
        if work.rules:
            for run in write_steps(_rule_steps(work.rules), LIMITS[self.iptables.tool.variant], {}):
                await self.iptables.restore(run)
        if work.makes_device:
            self.device.make()

        def over_netlink() -> None:
            self.servers.write(work.servers)
            self.device.add(bind)
            self.device.drop(unbind)
            self.servers.delete(work.servers_gone)

        servers = len(work.servers) + len(work.servers_gone)
        if servers + len(bind) + len(unbind) <= INLINE:
            over_netlink()
        else:
            await asyncio.to_thread(over_netlink)
        if work.drops_device:
            self.device.remove()
        self._claimed.update(key for key, _, _ in work.servers if not self.is_ours(key))
        self._claimed.difference_update(work.servers_gone)
        self._sets = (self._sets | work.sets_made) - work.sets_destroyed
        marks = [a for a in unbind if role_set(ADDRESSES, family_of(a)) in self._sets]
        await self.sets.restore([*address_entries("del", marks), *work.sets_gone])
        held.update(growth)
        for address in unbind:
            del held[address]


_CHAINS, _DROP_JUMPS, _ADD_JUMPS, _REMOVE = ((phase, 0) for phase in range(4))


def _rule_steps(change: Diff) -> dict[int, list[Step]]:
    """Return the steps of iptables-restore: chains before the jumps to them, and back."""
    steps: dict[int, list[Step]] = {}
    for (family, table, chain, part), old, new in old_and_new(change):
        own = steps.setdefault(family, [])
        if part != WHOLE:
            phase = _DROP_JUMPS if new is None else _ADD_JUMPS
            own.append(Step(phase, table, delete=rule_lines(old), insert=rule_lines(new)))
        elif new is not None:
            own.append(Step(_CHAINS, table, declare=chain, append=new))
        else:
            own.append(Step(_REMOVE, table, declare=chain, remove=chain))
    return steps
