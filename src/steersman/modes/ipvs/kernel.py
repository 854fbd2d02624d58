"""All kernel objects of the mode behind one `read`, one `write` and one `fingerprint`.

The addresses on the interface, and their marks in the set ADDRESSES, are no objects of the Ruleset,
because several ServicePorts share an address. They follow from the virtual servers
(Server.assigned), whose number per address is counted here: an address is added for the first one
and deleted with the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import msgspec

from steersman.host.address_device import AddressDevice
from steersman.host.netlink import Netlink
from steersman.model.addresses import family_of, in_cidr
from steersman.model.names import Family
from steersman.model.ruleset import Diff, Ruleset
from steersman.modes.ipvs.backends import Ipsets, VirtualServers, digest_sets
from steersman.modes.ipvs.changes import (
    ChangeSet,
    address_entries,
    assigned_addresses,
    rule_steps,
)
from steersman.modes.ipvs.listings import digest_servers, has_drained, parse_rules
from steersman.modes.ipvs.objects import (
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
from steersman.netfilter.iptables.restore import LIMITS, write_steps
from steersman.netfilter.iptables.saved import digest_rules
from steersman.netfilter.iptables.tool import Iptables
from steersman.netfilter.nft.generations import generation


class IpvsKernel:
    """The kernel objects of this mode."""

    def __init__(
        self,
        *,
        servers: VirtualServers,
        device: AddressDevice,
        sets: Ipsets,
        iptables: Iptables,
        netfilter: Netlink,
        families: tuple[Family, ...],
        excluded: tuple[str, ...] = (),
    ) -> None:
        """Create an accessor.

        Args:
            servers, device, sets, iptables: access to each kind of object.
            netfilter: a socket of NETLINK_NETFILTER.
            families: families that iptables can serve here.
            excluded: CIDRs; virtual servers and addresses in them are foreign.
        """
        self.servers, self.device, self.sets, self.iptables = servers, device, sets, iptables
        self._netfilter = netfilter
        self._families = families
        self._excluded = excluded
        self._sets: set[str] = set()  # our sets in the kernel
        self._usage: Counter[str] = Counter()  # virtual servers per address on the interface
        self._claimed: set[ServerKey] = set()  # written by us although in excluded CIDRs
        self._foreign: dict[ServerKey, Server] = {}  # the others there, at the last `read`

    def read(self, *, end_drained: bool = True) -> Ruleset:
        """Return our objects, and delete real servers that are drained by now.

        Without our interface no virtual server is ours: another program made them.

        Args:
            end_drained: False only reads.
        """
        ruleset: dict[Any, Any] = {**self.sets.read()}
        self._sets = {key.set for key in ruleset if type(key) is SetKey}

        # A virtual server is assigned if its address is both on the interface and marked.
        present = self.device.addresses()
        marks = [k for k in ruleset if type(k) is MemberKey and k.set in ADDRESS_SETS]
        marked = {key.entry for key in marks}
        for mark in marks:
            del ruleset[mark]
        if self.device.index():
            ruleset[DeviceKey(DEVICE)] = "dummy"
            for key, server in self._read_servers(end_drained).items():
                assigned = key.address in present and key.address in marked
                ruleset[key] = (
                    msgspec.structs.replace(server, assigned=True) if assigned else server
                )
        for family in self._families:
            ruleset.update(parse_rules(self.iptables.save(family), int(family)))
        self._usage = assigned_addresses(ruleset)
        for address in (present | marked) - self._usage.keys():  # orphans
            if not self._is_excluded(address):
                ruleset[MemberKey(role_set(ADDRESSES, family_of(address)), address)] = ""
        return ruleset

    def _read_servers(self, end_drained: bool) -> dict[ServerKey, Server]:
        """Return our virtual servers; delete their drained real servers if asked to."""
        found = self.servers.read()
        own = {key: server for key, server in found.items() if self.is_ours(key)}
        self._foreign = {key: server for key, server in found.items() if key not in own}
        if end_drained:
            self.servers.end_drained(own)
        return own

    def is_ours(self, key: ServerKey) -> bool:
        """Return whether a virtual server is ours to change: written by us, or not excluded."""
        return key in self._claimed or not self._is_excluded(key.address)

    def _is_excluded(self, address: str) -> bool:
        return any(in_cidr(address, cidr) for cidr in self._excluded)

    def fingerprint(self) -> Hashable | None:
        """Return digests of everything that `read` lists; None if `read` has something to delete.

        Neither IPVS nor ipset counts generations, so the kernel lists everything. But nothing is
        decoded, compared or kept. Counters, which traffic changes, are left out.

        Raises:
            OSError, BusyError: the kernel does not answer.
        """
        table = self.servers.table()
        if has_drained(table, self.is_ours):
            return None
        if self.iptables.tool.variant == "nft":
            rules: Hashable = generation(self._netfilter)
        else:
            rules = digest_rules(map(self.iptables.save, self._families))
        sets = digest_sets(self._netfilter)
        addresses = frozenset(self.device.addresses())
        return digest_servers(table), self.servers.digest(), sets, addresses, rules

    def write(self, change: Diff) -> None:
        """Carry out a Diff: first additions, from sets to addresses, then removals.

        Raises:
            ApplyError: an object was rejected.
            BusyError: the kernel cannot be programmed now.
            OSError: a socket failed.
        """
        changes = ChangeSet(change)
        for place, (key, old, new) in enumerate(changes.servers):
            if not self.is_ours(key):  # a wanted server becomes ours, whoever made it
                changes.servers[place] = key, old or self._foreign.get(key), new

        bind, unbind = changes.addresses(self._usage)

        # Rules refer to sets, and an address must not answer before the rules about it are there.
        self.sets.restore([*changes.sets, *address_entries("add", bind)])
        if changes.rules:
            steps = rule_steps(changes.rules)
            for run in write_steps(steps, LIMITS[self.iptables.tool.variant], {}):
                self.iptables.restore(run)
        if changes.makes_device:
            self.device.make()
        self.servers.write(changes.servers)
        self.device.add(bind)
        self.device.drop(unbind)
        self.servers.delete(changes.servers_gone)
        if changes.drops_device:
            self.device.remove()

        # Only now: if anything above failed, the next attempt needs the old state.
        self._claimed.update(key for key, _, _ in changes.servers if not self.is_ours(key))
        self._claimed.difference_update(changes.servers_gone)
        self._sets = (self._sets | changes.sets_made) - changes.sets_destroyed
        marks = [a for a in unbind if role_set(ADDRESSES, family_of(a)) in self._sets]
        self.sets.restore([*address_entries("del", marks), *changes.sets_gone])
        self._usage.update(changes.usage)
        for address in unbind:
            del self._usage[address]
