"""Sort a Diff by the backends that carry it out. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, TypeAlias

from steersman.model.addresses import family_of
from steersman.model.names import Protocol
from steersman.model.ruleset import Diff, Ruleset
from steersman.modes.ipvs.objects import (
    ADDRESS_SETS,
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
from steersman.netfilter.iptables.names import WHOLE
from steersman.netfilter.iptables.restore import Step, rule_lines

_CHAINS, _DROP_JUMPS, _ADD_JUMPS, _REMOVE = ((phase, 0) for phase in range(4))
_MAX_ENTRIES = 1 << 20  # of a set; ipset's default of 65,536 is too small for large clusters


ServerChange: TypeAlias = tuple[ServerKey, Server | None, Server]
"""A virtual server: its present state (None: it does not exist), and the wanted one."""


class TargetChange(NamedTuple):
    """What happens to a real server of a virtual one."""

    verb: Literal["add", "change", "delete"]
    target: Target
    weight: int = 0


def target_changes(change: ServerChange) -> Iterator[TargetChange]:
    """Yield what happens to the real servers of a virtual server.

    One that goes gets weight 0: it keeps its connections, and gets no new ones. Those of UDP are
    none to wait for, so there it is deleted.
    """
    key, old, new = change
    present, wanted = old.weight_of if old else {}, new.weight_of
    for target, weight in wanted.items():
        if target not in present:
            yield TargetChange("add", target, weight)
        elif present[target] != weight:
            yield TargetChange("change", target, weight)
    for target in present:
        if target not in wanted:
            yield TargetChange("delete" if key.protocol is Protocol.UDP else "change", target)


class ChangeSet:
    """A Diff, sorted by backend."""

    servers: list[ServerChange]
    """Virtual servers to make or change."""
    servers_gone: list[ServerKey]
    """Virtual servers to delete."""
    usage: Counter[str]
    """Change of the number of virtual servers that need an address on the interface."""
    orphans: set[str]
    """Addresses on the interface, or marked as such, that no virtual server needs."""
    rules: Diff
    """The part about chains and jumps."""
    sets: list[str]
    """Lines for `ipset restore` before everything else: sets and entries to make."""
    sets_gone: list[str]
    """Lines for `ipset restore` after everything else."""

    def __init__(self, change: Diff) -> None:
        """Sort a Diff."""
        self.servers, self.servers_gone = [], []
        self.usage, self.orphans = Counter(), set()
        self.sets, self.sets_gone = [], []
        self.makes_device = DeviceKey(DEVICE) in change.added
        self.drops_device = DeviceKey(DEVICE) in change.removed
        self.sets_made = {key.set for key in change.added if type(key) is SetKey}
        self.sets_destroyed = {key.set for key in change.removed if type(key) is SetKey}
        self.rules = change.where(lambda key: type(key) is tuple)
        for key, old, new in change.old_and_new():
            if type(key) is ServerKey:
                self._sort_server(key, old, new)
            elif type(key) is MemberKey:
                self._sort_entry(key, old, new)
            elif type(key) is SetKey and old is None:
                limit = "" if new.startswith("bitmap:") else f" maxelem {_MAX_ENTRIES}"
                self.sets.insert(0, f"create {key.set} {new}{limit}")  # before its entries
        self.sets_gone += [f"destroy {name}" for name in sorted(self.sets_destroyed)]

    def _sort_server(self, key: ServerKey, old: Server | None, new: Server | None) -> None:
        if new is None:
            self.servers_gone.append(key)
        else:
            self.servers.append((key, old, new))
        if number := bool(new and new.assigned) - bool(old and old.assigned):
            self.usage[key.address] += number

    def _sort_entry(self, key: MemberKey, old: str | None, new: str | None) -> None:
        if old is None:
            self.sets.append(f"add {key.set} {key.entry}")
        elif new is not None:  # it changed hands only: the value is always ""
            return
        elif key.set in ADDRESS_SETS:  # only `read` returns these, never rendering
            self.orphans.add(key.entry)
        elif key.set not in self.sets_destroyed:  # otherwise it goes with its set
            self.sets_gone.append(f"del {key.set} {key.entry}")

    def addresses(self, usage: Counter[str]) -> tuple[list[str], list[str]]:
        """Return the addresses that the interface gets, and those that it loses.

        Args:
            usage: virtual servers per address before the change; `assigned_addresses`.
        """
        more = self.usage
        bind = sorted(a for a, number in more.items() if number > 0 and not usage[a])
        fewer = {a for a, number in more.items() if number < 0} | self.orphans
        return bind, sorted(a for a in fewer if usage[a] + more[a] <= 0)


def assigned_addresses(objects: Ruleset) -> Counter[str]:
    """Count the virtual servers that need each address of the interface."""
    return Counter(
        key.address for key, value in objects.items() if type(key) is ServerKey and value.assigned
    )


def address_entries(verb: str, addresses: Iterable[str]) -> list[str]:
    """Return lines for `ipset restore` about addresses on the interface."""
    return [f"{verb} {role_set(ADDRESSES, family_of(a))} {a}" for a in addresses]


def rule_steps(change: Diff) -> dict[int, list[Step]]:
    """Return the steps of iptables-restore: chains before jumps to them, removals in reverse."""
    steps: dict[int, list[Step]] = {}
    for (family, table, chain, part), old, new in change.old_and_new():
        own = steps.setdefault(family, [])
        if part != WHOLE:
            phase = _DROP_JUMPS if new is None else _ADD_JUMPS
            own.append(Step(phase, table, delete=rule_lines(old), insert=rule_lines(new)))
        elif new is not None:
            own.append(Step(_CHAINS, table, declare=chain, append=new))
        else:
            own.append(Step(_REMOVE, table, declare=chain, remove=chain))
    return steps
