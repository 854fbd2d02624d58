"""Which kernel objects belong to whom: what each owner should have, has, and was refused. Pure.

An object belongs to one owner at a time and may change hands. Who is refused keeps what it had,
until somebody else wants it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from steersman.model.names import PlanKey
from steersman.model.ruleset import Diff, Ruleset, diff, merge

Owner: TypeAlias = PlanKey | str
"""Who a kernel object belongs to: a ServicePort, NODE, or STALE (nobody any more)."""

NODE = "the node"
STALE = "leftovers"
ADOPTED = "objects of an earlier process"
"""What an earlier process wrote and nobody wants, while an owner is refused that may need it: which
of these objects its last version was made of, nobody knows."""


class Holdings:
    """The Ruleset by owner, so that a sync costs what changed."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.refused: dict[Owner, str] = {}
        """What the kernel said to those whose objects are not what they should be."""
        self.objects = 0
        """How many are in force, as far as known."""
        self._want: dict[Owner, Ruleset] = {}
        self._have: dict[Owner, Ruleset] = {}
        self._dirty: set[Owner] = set()
        self._adopters: set[Owner] = set()
        """Owners that were refused before anything of theirs was known to be in force."""

    @property
    def owners(self) -> set[Owner]:
        """Everybody who has something, or should have."""
        return self._want.keys() | self._have.keys()

    def put(self, owner: Owner, ruleset: Ruleset) -> None:
        """Say what an owner should have from now on."""
        self._dirty.add(owner)
        self.refused.pop(owner, None)
        if ruleset:
            self._want[owner] = ruleset
        else:
            self._want.pop(owner, None)

    def give_way(self, owners: Iterable[Owner]) -> None:
        """Take from owners what others have claimed since: what they want is out of date."""
        claims = [(other, self._want.get(other, {})) for other in self._dirty]
        for owner in owners:
            want = self._want.get(owner, {})
            lost = {key for other, claim in claims if other != owner for key in claim.keys() & want}
            if lost:
                self._dirty.add(owner)
                self._want[owner] = {k: v for k, v in want.items() if k not in lost}

    @property
    def outstanding(self) -> int:
        """How many owners `put` has changed since."""
        return len(self._dirty)

    def changes(self) -> Diff | None:
        """What `put` has changed since; None where two owners want, or give up, one object."""
        parts = (diff(self._have.get(o, {}), self._want.get(o, {})) for o in self._dirty)
        try:
            return merge(parts)
        except ValueError:
            return None

    def written(self) -> None:
        """Note that what `changes` said is in force."""
        # Of all others only who is refused may have what is wanted now.
        self._accept(self._dirty, self.refused.keys() - self._dirty)
        self._dirty.clear()

    def compared(self) -> None:
        """Note that all has been compared with the kernel: no change is outstanding."""
        self._dirty.clear()

    def wanted(self) -> dict[Any, Any]:
        """What all owners should have, whatever is refused."""
        return _flat(self._want.values())

    def effective(self) -> dict[Any, Any]:
        """What the kernel should have now.

        Owners who are refused come first: where another one claims an object of theirs, it is his.
        """
        ordered = sorted(self.owners, key=lambda owner: owner not in self.refused)
        return _flat(map(self._effective, ordered))

    def part(self, kernel: Ruleset, owners: Collection[Owner]) -> Diff:
        """What is to be done for some owners, or what is nobody's (STALE alone)."""
        if STALE in owners:
            claimed = _keys(map(self._effective, self.owners))
            return Diff(removed={k: v for k, v in kernel.items() if k not in claimed})
        want = _flat(self._want.get(owner, {}) for owner in owners)
        taken = _keys(map(self._effective, self.owners.difference(owners)))
        keys = set(want) | (_keys(self._have.get(owner, {}) for owner in owners) - taken)
        return diff({key: kernel[key] for key in keys if key in kernel}, want)

    def accept(self, owners: Collection[Owner]) -> None:
        """Note that owners have what they should have; whose it was has it no longer."""
        self._accept(owners, self.owners.difference(owners))

    def refuse(self, owners: Collection[Owner], why: str, kernel: Ruleset) -> None:
        """Note that owners keep what they have.

        Args:
            owners: whose part is refused.
            why: what the kernel says.
            kernel: what it has: of owners that are new to us, what an earlier process made of them.
        """
        self.refused.update(dict.fromkeys(owners, why))
        fresh = [owner for owner in owners if owner in self._want and owner not in self._have]
        self._adopters.update(fresh)
        others = self.owners.difference(fresh, {ADOPTED})  # what was adopted stays so
        taken = _keys(map(self._effective, others)) | _keys(self._have.get(o, {}) for o in others)
        for owner in fresh:
            wanted = self._want[owner].keys() - taken
            if found := {key: kernel[key] for key in wanted if key in kernel}:
                self._have[owner] = found
                self.objects += len(found)
                taken |= found.keys()
        if fresh:
            taken |= _keys(map(self._effective, fresh))
            self._adopt({key: value for key, value in kernel.items() if key not in taken})

    def _adopt(self, leftovers: Ruleset) -> None:
        self.objects += len(leftovers) - len(self._have.pop(ADOPTED, ()))
        if leftovers:
            self._have[ADOPTED] = leftovers
            names = ", ".join(sorted(map(str, self._adopters))[:3])
            self.refused[ADOPTED] = f"kept, as they may belong to what is refused: {names}"

    def release(self) -> bool:
        """Forget what was adopted, if everybody who may need it is in force or gone.

        Returns:
            Whether it is to be removed from the kernel now, as leftovers.
        """
        self._adopters.intersection_update(self.refused)
        if self._adopters or ADOPTED not in self.refused:
            return False
        del self.refused[ADOPTED]
        self.objects -= len(self._have.pop(ADOPTED))
        return True

    def in_force(self) -> Iterator[tuple[Any, Any]]:
        """Every kernel object that is in force, as far as known."""
        for part in tuple(self._have.values()):
            yield from part.items()

    def _effective(self, owner: Owner) -> Ruleset:
        """What an owner should have now: the last good version where the new one is refused."""
        return (self._have if owner in self.refused else self._want).get(owner, {})

    def _accept(self, owners: Iterable[Owner], losers: set[Owner]) -> None:
        taken: set[Any] = set()
        for owner in owners:
            self.refused.pop(owner, None)
            self.objects -= len(self._have.get(owner, ()))
            if owner in self._want:
                self._have[owner] = self._want[owner]
                self.objects += len(self._want[owner])
            else:
                self._have.pop(owner, None)
            if losers:
                taken.update(self._want.get(owner, ()))
        for loser in losers:
            self._lose(loser, taken)

    def _lose(self, owner: Owner, taken: set[Any]) -> None:
        had = self._have.get(owner, {})
        if lost := taken & had.keys():
            self._have[owner] = {k: v for k, v in had.items() if k not in lost}
            self.objects -= len(lost)


def _flat(parts: Iterable[Ruleset]) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for part in parts:
        out.update(part)
    return out


def _keys(parts: Iterable[Mapping[Any, Any]]) -> set[Any]:
    return {key for part in parts for key in part}
