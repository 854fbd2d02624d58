"""What a Diff asks of each door to the kernel. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeAlias

from steersman.model.addresses import family_of
from steersman.model.ruleset import Diff, Ruleset
from steersman.modes.ipvs.names import (
    ADDRESS_SETS,
    ADDRESSES,
    DeviceKey,
    MemberKey,
    Server,
    ServerKey,
    SetKey,
    role_set,
)

INLINE = 64
"""Virtual servers and addresses up to which the system calls are not worth a thread."""
_MOST_ENTRIES = 1 << 20  # of a set; ipset's own 65,536 is less than large clusters have


ServerChange: TypeAlias = tuple[ServerKey, Server | None, Server]
"""A virtual server: what is there now (None: nothing), and what is to be."""


def only_endpoints(change: Diff) -> list[ServerChange]:
    """Return the virtual servers of a small Diff that is about nothing else, by far the most."""
    if change.added or change.removed or len(change.changed) > INLINE:
        return []
    found: list[ServerChange] = []
    for key, (old, new) in change.changed.items():
        if type(key) is not ServerKey or old.held != new.held:
            return []
        found.append((key, old, new))
    return found


class Work:
    """A Diff, sorted by who carries it out."""

    def __init__(self, change: Diff) -> None:
        """Sort a Diff."""
        self.servers: list[ServerChange] = []
        """Virtual servers to make or change."""
        self.servers_gone: list[ServerKey] = []
        self.rules: Diff = Diff()
        """The part about chains and jumps."""
        self.sets: list[str] = []
        """Lines for `ipset restore`, before anything else: sets and entries to make."""
        self.sets_gone: list[str] = []
        """Lines for `ipset restore`, when all else is done."""
        self.strays: set[str] = set()
        """Addresses that are held and that nothing needs."""
        self.growth: Counter[str] = Counter()
        """By how much the number of virtual servers that need an address changes."""
        self.makes_device = self.drops_device = False
        self._rules: tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]] = ({}, {}, {})
        for key, value in change.added.items():
            self._add(key, value)
        for key, (old, new) in change.changed.items():
            self._change(key, old, new)
        self.sets_made = {key.set for key in change.added if type(key) is SetKey}
        self.sets_destroyed = {key.set for key in change.removed if type(key) is SetKey}
        for key, value in change.removed.items():
            self._remove(key, value)
        self.sets_gone += [f"destroy {name}" for name in sorted(self.sets_destroyed)]
        if any(self._rules):
            added, removed, changed = self._rules
            self.rules = Diff(added, removed, changed)

    def _add(self, key: Any, value: Any) -> None:
        kind = type(key)
        if kind is ServerKey:
            self.servers.append((key, None, value))
            self._grow(key.address, value.held)
        elif kind is MemberKey:
            self.sets.append(f"add {key.set} {key.entry}")
        elif kind is SetKey:
            self.sets.insert(0, _creation(key, value))
        elif kind is DeviceKey:
            self.makes_device = True
        else:
            self._rules[0][key] = value

    def _grow(self, address: str, number: int) -> None:
        if number:
            self.growth[address] += number

    def _change(self, key: Any, old: Any, new: Any) -> None:
        kind = type(key)
        if kind is ServerKey:
            self.servers.append((key, old, new))
            self._grow(key.address, new.held - old.held)
        elif kind is tuple:
            self._rules[2][key] = (old, new)

    def _remove(self, key: Any, value: Any) -> None:
        kind = type(key)
        if kind is ServerKey:
            self.servers_gone.append(key)
            self._grow(key.address, -value.held)
        elif kind is MemberKey:
            if key.set in ADDRESS_SETS:
                self.strays.add(key.entry)
            elif key.set not in self.sets_destroyed:
                self.sets_gone.append(f"del {key.set} {key.entry}")
        elif kind is DeviceKey:
            self.drops_device = True
        elif kind is tuple:
            self._rules[1][key] = value


def held_addresses(objects: Ruleset) -> Counter[str]:
    """How many virtual servers need each address of the interface."""
    return Counter(
        key.address for key, value in objects.items() if type(key) is ServerKey and value.held
    )


def address_entries(verb: str, addresses: Iterable[str]) -> list[str]:
    """Lines for `ipset restore` about addresses that the interface holds."""
    return [f"{verb} {role_set(ADDRESSES, family_of(a))} {a}" for a in addresses]


def _creation(key: SetKey, value: str) -> str:
    most = "" if value.startswith("bitmap:") else f" maxelem {_MOST_ENTRIES}"
    return f"create {key.set} {value}{most}"
