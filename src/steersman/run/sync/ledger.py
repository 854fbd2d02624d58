"""The ledger of kernel objects: what each owner wants, has, and was rejected with. Pure.

An object belongs to one owner at a time and may change hands:

    put      want changes, the owner is unwritten        accept    have = want
    reject   have stays, until another owner wants it    effective = have if rejected, else want

After a restart the ledger knows nothing of the objects in the kernel. If an owner is rejected that
has nothing in the ledger yet, it gets the objects that it wants and that the kernel has; all other
unclaimed objects are adopted (ADOPTED), because its last version may need them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from steersman.model.change_log import ChangeLog
from steersman.model.errors import ApplyError
from steersman.model.names import ObjectName, Owner, PlanKey
from steersman.model.ruleset import Diff, Ruleset, diff, diff_of_owners
from steersman.run.sync.packer import Packer

_NO_OBJECTS: Ruleset = {}

STALE = "leftovers"
"""The owner of objects that nobody owns."""
ADOPTED = "objects of an earlier process"
"""Objects that an earlier process wrote and that no owner wants, kept while a rejected owner may
need them: the kernel does not tell which of them its last version was made of."""

_SMALLEST_PART, _MOST_PARTS = 1000, 25
"""Services in each part of a Diff at least, and the most parts: see `ObjectLedger.parts`. Small
ones take little memory, but many of them more of the kernel's time."""


class PackedParts(NamedTuple):
    """The objects of some owners, packed into one piece of memory."""

    owners: list[Owner]
    data: bytearray
    ends: list[int]
    """Where the bytes of each owner end."""


class ObjectLedger:
    """The Ruleset by owner, so that a sync costs what changed."""

    def __init__(self) -> None:
        self.rejected: dict[Owner, str] = {}
        """The kernel's error, by owner whose wanted objects are not in force."""
        self._recorded = 0
        """Number of objects of all owners."""
        self._missing: dict[Owner, int] = {}
        """Number of objects that rejected owners keep here, but that others removed."""
        self._want: dict[Owner, Ruleset | bytes] = {}
        self._have: dict[Owner, Ruleset | bytes] = {}
        self._packer = Packer()
        self._loose: dict[Owner, None] = {}
        """Owners that were accepted since the last `pack`."""
        self.log: ChangeLog[Owner] = ChangeLog()
        """Owners that were rendered."""
        self._written = self.log.cursor()
        self._adopters: set[Owner] = set()
        """Owners that were rejected before any of their objects was known to be in force."""

    @property
    def objects(self) -> int:
        """Number of objects in force, as far as known."""
        return self._recorded - sum(self._missing.values())

    @property
    def owners(self) -> set[Owner]:
        """Every owner that has objects, or wants some."""
        return self._want.keys() | self._have.keys()

    def put(self, owner: Owner, ruleset: Ruleset, *, packed: bool = False) -> None:
        """Set the objects that an owner wants from now on; pack them if no one needs them soon."""
        self.log.touch(owner)
        if self.rejected:
            self.rejected.pop(owner, None)
        if ruleset:
            self._want[owner] = self._packer.pack(ruleset) if packed else ruleset
        else:
            self._want.pop(owner, None)

    def wants(self, owner: Owner) -> Ruleset:
        """Return the objects that an owner wants."""
        return self._packer.unpack(self._want.get(owner, _NO_OBJECTS))

    def drop_claimed(self, owners: Iterable[Owner]) -> None:
        """Drop from outdated owners the objects that unwritten owners want."""
        claims = [(other, self.wants(other)) for other in self.unwritten]
        for owner in owners:
            want = self.wants(owner)
            lost = {key for other, claim in claims if other != owner for key in claim.keys() & want}
            if lost:
                self.log.touch(owner)
                self._want[owner] = {k: v for k, v in want.items() if k not in lost}

    @property
    def unwritten(self) -> list[Owner]:
        """Owners that were rendered since the last write."""
        return self._written.changed()[0]

    @property
    def owes(self) -> bool:
        """Whether there are some."""
        return self._written.behind

    def changes(self) -> Diff | None:
        """Return the Diff of the unwritten owners; None if two want, or drop, one object."""
        try:
            return diff_of_owners((self._has(each), self.wants(each)) for each in self.unwritten)
        except ValueError:
            return None

    def mark_written(self) -> None:
        """Record that the Diff of `changes` is in force."""
        # Of all other owners only a rejected one may still have an object that is wanted now.
        unwritten = self.unwritten
        self._accept(unwritten, self.rejected.keys() - unwritten if self.rejected else set())
        self.mark_compared()

    def mark_compared(self) -> None:
        """Record that everything was compared with the kernel: no owner is unwritten."""
        self._written.move(self.log.revision)

    def wanted(self) -> dict[Any, Any]:
        """Return the objects that all owners want, rejected ones included."""
        return _flat(map(self._packer.unpack, self._want.values()))

    def effective(self) -> dict[Any, Any]:
        """Return the objects that the kernel should have now.

        Rejected owners come first, so a later claim overrides them.
        """
        if not self.rejected:
            return self.wanted()
        ordered = sorted(self.owners, key=lambda owner: owner not in self.rejected)
        return _flat(map(self._effective, ordered))

    def parts(self, least: int) -> Iterator[Diff] | None:
        """Return `effective` as Diffs for an empty kernel, each made when it is asked for.

        Each has whole Services: traffic to a port of theirs that comes later would be refused.

        Args:
            least: objects that are worth parts.

        Returns:
            None if they are fewer, or if an owner is rejected. The Diffs end with an ApplyError if
            two owners claim one object.
        """
        if self.rejected or sum(map(self._packer.size, self._want.values())) < least:
            return None
        services: dict[ObjectName | None, list[Owner]] = {}
        for owner in sorted(self._want, key=lambda each: isinstance(each, PlanKey)):  # NODE first
            name = owner.name.object_name if isinstance(owner, PlanKey) else None
            services.setdefault(name, []).append(owner)
        names = [*services]
        size = max(_SMALLEST_PART, len(names) // _MOST_PARTS)
        return self._checked(
            [owner for name in names[at : at + size] for owner in services[name]]
            for at in range(0, len(names), size)
        )

    def _checked(self, parts: Iterable[list[Owner]]) -> Iterator[Diff]:
        """Yield the Diff of the owners of each part, and check that no object is in two of them."""
        # By their hashes: the objects of 10,000 Services would take 8 MB, and much of it would stay
        # with the process, in arenas of Python that something else is in, too.
        seen: set[int] = set()
        number = 0
        for owners in parts:
            part = _flat(map(self.wants, owners))
            seen.update(map(hash, part))
            number += sum(self._size(self._want, owner) for owner in owners)
            if len(seen) != number:
                raise ApplyError("two Services claim the same kernel object")
            yield Diff(part)

    def part(self, kernel: Ruleset, owners: Collection[Owner]) -> Diff:
        """Return the Diff for some owners, or for unowned objects (STALE alone)."""
        if STALE in owners:
            claimed = _keys(map(self._effective, self.owners))
            return Diff(removed={k: v for k, v in kernel.items() if k not in claimed})
        # These owners may remove the objects they have, unless another owner has claimed them.
        want = _flat(map(self.wants, owners))
        taken = _keys(map(self._effective, self.owners.difference(owners)))
        keys = set(want) | (_keys(map(self._has, owners)) - taken)
        return diff({key: kernel[key] for key in keys if key in kernel}, want)

    def accept(self, owners: Collection[Owner]) -> None:
        """Record that owners have the objects they want; previous owners lose these objects."""
        self._accept(owners, self.owners.difference(owners))

    def _accept(self, owners: Iterable[Owner], losers: set[Owner]) -> None:
        # `losers` are the owners that may have one of these objects: usually few, or none.
        taken: set[Any] = set()
        for owner in owners:
            if self.rejected or self._missing:
                self.rejected.pop(owner, None)
                self._missing.pop(owner, None)
            want, have = self._want.get(owner), self._have.get(owner)
            if want is not have:
                self._recorded += self._packer.size(want or _NO_OBJECTS)
                self._recorded -= self._packer.size(have or _NO_OBJECTS)
                if want is None:
                    del self._have[owner]
                else:
                    self._have[owner] = want
                    self._loose[owner] = None
            if losers:
                taken.update(self.wants(owner))
        for loser in losers:
            had = self._has(loser)
            if lost := taken & had.keys():
                self._have[loser] = {k: v for k, v in had.items() if k not in lost}
                self._recorded -= len(lost)
                self._count_missing(loser, self._missing.get(loser, 0))

    def reject(self, owners: Collection[Owner], why: str, kernel: Ruleset) -> None:
        """Record that owners keep the objects they have.

        Args:
            kernel: the objects in the kernel: owners that the ledger knows no objects of get
                those that an earlier process wrote for them.
        """
        self.rejected.update(dict.fromkeys(owners, why))
        fresh = [owner for owner in owners if owner in self._want and owner not in self._have]
        self._adopters.update(fresh)
        # Give owners without a history the objects that they want and that no other owner has.
        others = self.owners.difference(fresh, {ADOPTED})  # adopted objects stay adopted
        taken = _keys(map(self._effective, others)) | _keys(map(self._has, others))
        for owner in fresh:
            wanted = self.wants(owner).keys() - taken
            if found := {key: kernel[key] for key in wanted if key in kernel}:
                self._have[owner] = found
                self._recorded += len(found)
                taken |= found.keys()
        # The others keep the objects they had, even missing ones: a later write puts them back.
        for owner in owners:
            self._count_missing(owner, sum(key not in kernel for key in self._has(owner)))
        if not fresh:
            return
        # Adopt the rest of the kernel's objects: any of them may belong to the old versions.
        taken |= _keys(map(self._effective, fresh))
        leftovers = {key: value for key, value in kernel.items() if key not in taken}
        self._recorded += len(leftovers) - self._size(self._have, ADOPTED)
        self._have.pop(ADOPTED, None)
        if leftovers:
            self._have[ADOPTED] = leftovers
            names = ", ".join(sorted(map(str, self._adopters))[:3])
            self.rejected[ADOPTED] = f"kept, as rejected owners may need them: {names}"

    def release_adopted(self) -> bool:
        """Drop the adopted objects if every owner that may need them is in force or gone.

        Returns:
            Whether there are some to remove from the kernel now, by a comparison.
        """
        self._adopters.intersection_update(self.rejected)
        if self._adopters or ADOPTED not in self.rejected:
            return False
        del self.rejected[ADOPTED]
        self._recorded -= self._size(self._have, ADOPTED)
        del self._have[ADOPTED]
        return True

    def _count_missing(self, owner: Owner, number: int) -> None:
        if number := min(number, self._size(self._have, owner)):
            self._missing[owner] = number
        else:
            self._missing.pop(owner, None)

    def in_force(self) -> Iterator[tuple[Any, Any]]:
        """Return every kernel object that is in force now, as far as known; made on demand."""
        parts = map(self._packer.unpack, tuple(self._have.values()))
        return chain.from_iterable(part.items() for part in parts)

    @property
    def unpacked(self) -> int:
        """Number of owners that `pack` would pack."""
        return len(self._loose)

    def packed(self) -> PackedParts:
        """Pack the objects that are in force, and keep them as they are; see `use_packed`."""
        owners, data, ends = [], bytearray(), []
        for owner in self._loose:
            part = self._have.get(owner)
            if part is self._want.get(owner) and part and not isinstance(part, bytes):
                packed = self._packer.pack(part)
                if isinstance(packed, bytes):
                    data += packed
                    owners.append(owner)
                    ends.append(len(data))
        return PackedParts(owners, data, ends)

    def use_packed(self, parts: PackedParts) -> None:
        """Keep objects as bytes until somebody asks for them.

        All are dropped before the first bytes take their place: memory that was allocated together
        is then free together. Otherwise each arena of Python would be kept for a few packed parts
        (16 MB at 10,000 Services).
        """
        for owner in parts.owners:
            self._want[owner] = self._have[owner] = _NO_OBJECTS
        begin = 0
        for owner, end in zip(parts.owners, parts.ends, strict=True):
            self._want[owner] = self._have[owner] = bytes(parts.data[begin:end])
            begin = end
        self._loose.clear()

    def _size(self, parts: Mapping[Owner, Ruleset | bytes], owner: Owner) -> int:
        return self._packer.size(parts.get(owner, _NO_OBJECTS))

    def _has(self, owner: Owner) -> Ruleset:
        return self._packer.unpack(self._have.get(owner, _NO_OBJECTS))

    def _effective(self, owner: Owner) -> Ruleset:
        """Return the objects an owner should have now: the last good version if rejected."""
        return self._has(owner) if owner in self.rejected else self.wants(owner)


def _flat(parts: Iterable[Ruleset]) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for part in parts:
        out.update(part)
    return out


def _keys(parts: Iterable[Mapping[Any, Any]]) -> set[Any]:
    return {key for part in parts for key in part}
