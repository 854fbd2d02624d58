"""The ledger of kernel objects: what each owner wants, has, and was rejected with. Pure.

An object belongs to one owner at a time and may change hands:

    put      want changes, the owner is dirty            accept    have = want
    reject   have stays, until another owner wants it    effective = have if rejected, else want

After a restart the ledger knows nothing of the objects in the kernel. If an owner is rejected that
has nothing in the ledger yet, it gets the objects that it wants and that the kernel has; all other
unclaimed objects are adopted (ADOPTED), because its last version may need them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, TypeAlias

from steersman.compile.planner import PlanChange
from steersman.model.errors import ApplyError
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import EndpointChange, ServicePlan
from steersman.model.ruleset import Diff, Packer, Ruleset, diff, diff_of_owners, patch
from steersman.source.store import MOST_TRIGGERS, Changes

# -- Owed to the kernel ----------------------------------------------------------------------------
#
# Changes owed to the kernel: they were seen, and are not known to be in force.
#
# Theory. A change passes four places, and is a debt until the kernel has it:
#
#     Store --take--> changed --plan--> unrendered --render--> ledger (dirty) --write--> kernel
#
# Nothing leaves a place before it is in the next one, so an exception or a cancelled task at any
# await leaves the debt where it was, and the next run goes on from there. Two more facts describe
# our knowledge of the kernel; only a run clears them:
#
#     unread      a write is under way or failed, or nothing was read yet: read everything
#     suspected   others may have touched our objects: compare the fingerprint, then decide
#
# `unread` is set before a write begins and cleared after it succeeded, so no kind of failure needs
# code of its own. Retry, drift, reload and restart are all the same: run until nothing is owed.


class Owed:
    """The account of one Sync; `nothing` says whether everything is paid."""

    def __init__(self) -> None:
        """Start with everything owed: nothing was planned, rendered or read yet."""
        self.changed: set[ObjectName] = set()
        """Services that changed and are not planned."""
        self.unplanned: set[ObjectName] = set()
        """Services that a defect kept from being planned: the next comparison retries them."""
        self.replan = True
        """The settings of the node, or a new Planner, are not planned."""
        self.node = False
        """The node's own part is planned and not rendered."""
        self.unrendered: dict[PlanKey, ServicePlan | None] = {}
        """Plans that are not rendered; None for a removed one."""
        self.relisted: Mapping[PlanKey, EndpointChange] = {}
        """For unrendered plans of which only endpoints changed: how they differ from the plan that
        the ledger has the objects of."""
        self.unread = True
        """The kernel may differ from the ledger."""
        self.suspected = False
        """Others may have changed our objects."""
        self.failed = False
        """The last run failed."""
        self._changes = Changes()
        self._plans = PlanChange()

    @property
    def nothing(self) -> bool:
        """Whether the kernel has everything, apart from objects it rejects."""
        return not (
            self.changed
            or self.replan
            or self.node
            or self.unrendered
            or self.unread
            or self.suspected
        )

    # Changes, from the Store to the ledger

    def take(self, changes: Changes) -> None:
        """Add the changes that the Store has gathered since the last call."""
        self.changed |= changes.services
        self.replan |= changes.node
        self._changes = _united(self._changes, changes)

    def planned(self, change: PlanChange) -> None:
        """Move changed Services to unrendered plans, by the result of a Planner."""
        self.changed.clear()
        self.unplanned |= change.failed
        self.node |= change.settings_changed
        # What an earlier run left unrendered, or was rendered with other settings, is rendered as a
        # whole.
        left = self.unrendered or change.settings_changed
        self.relisted = {} if left else change.relisted
        self.unrendered.update(dict.fromkeys(change.removed))
        self.unrendered.update(change.changed)
        self._plans = self._plans.then(change)

    def retry_unplanned(self) -> None:
        """Plan Services again that a defect kept from being planned."""
        self.changed |= self.unplanned
        self.unplanned.clear()

    # The kernel

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write to the kernel; unless the block succeeds, everything has to be read again."""
        before, self.unread = self.unread, True
        yield
        self.unread = before

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Compare with the kernel; a suspicion that is raised during the block remains."""
        before, self.suspected = self.suspected, False
        try:
            yield
        except BaseException:
            self.suspected |= before
            raise

    # The reports

    @property
    def unreported(self) -> Iterable[PlanKey]:
        """Keys of plans that the next report adds or changes."""
        return self._plans.changed.keys()

    def take_report(self) -> tuple[Changes, PlanChange]:
        """Return all changes and plans since the last call: they are in force now."""
        report = self._changes, self._plans
        self._changes, self._plans = Changes(), PlanChange()
        if not self.unrendered:  # an emptied dictionary would keep room for all that it once held
            self.unrendered = {}
        self.failed = False
        return report


def _united(one: Changes, other: Changes) -> Changes:
    """Return two batches of changes as one."""
    if not (one or one.trigger_times):
        return other
    times = dict(one.trigger_times)
    for name, more in other.trigger_times.items():
        times[name] = (*times.get(name, ()), *more)[:MOST_TRIGGERS]
    return Changes(
        services=one.services | other.services,
        service_objects=one.service_objects | other.service_objects,
        endpoints=one.endpoints | other.endpoints,
        ejections=one.ejections | other.ejections,
        node=one.node or other.node,
        trigger_times=times,
        received=one.received if one.received is not None else other.received,
    )


# -- The ledger ------------------------------------------------------------------------------------

_NO_OBJECTS: Ruleset = {}

Owner: TypeAlias = PlanKey | str
"""The owner of a kernel object: a ServicePort, NODE, or STALE (objects without an owner)."""

NODE = "the node"
STALE = "leftovers"
ADOPTED = "objects of an earlier process"
"""Objects that an earlier process wrote and that no owner wants, kept while a rejected owner may
need them: the kernel does not tell which of them its last version was made of."""

_MOST_USED, _SMALLEST_PART, _MOST_PARTS = 200, 1000, 25
"""Services in the first part of a Diff, and at least in each other one; and the most parts: see
`ObjectLedger.parts`. Small ones take little memory, but many of them more of the kernel's time."""
_FEW = 1000
"""Owners that are packed in any order."""


class ObjectLedger:
    """The Ruleset by owner, so that a sync costs what changed."""

    def __init__(self) -> None:
        """Start empty."""
        self.rejected: dict[Owner, str] = {}
        """The kernel's error, by owner whose wanted objects are not in force."""
        self._recorded = 0
        """Number of objects of all owners."""
        self._missing: dict[Owner, int] = {}
        """Number of objects that rejected owners keep here, but that others removed."""
        self._want: dict[Owner, Ruleset | bytes] = {}
        self._have: dict[Owner, Ruleset | bytes] = {}
        self._packer = Packer()
        self._loose: set[Owner] = set()
        """Owners that were accepted since the last `pack`."""
        self._dirty: set[Owner] = set()
        self._amended: dict[Owner, Ruleset] = {}
        """What those dirty owners want of which it is known how it differs from what they have."""
        self._known, self._steps = Diff({}, {}, {}), 0
        """Their Diffs in one, and the number of their steps: larger if two of them share a key."""
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
        if owner in self._amended:
            self._compare_amended()
        self._dirty.add(owner)
        self.rejected.pop(owner, None)
        if ruleset:
            self._want[owner] = self._packer.pack(ruleset) if packed else ruleset
        else:
            self._want.pop(owner, None)

    def amend(self, owner: Owner, wants: Ruleset, change: Diff) -> None:
        """Change the objects that an owner wants, from what `wants` returns, by a Diff.

        Theory. If it has in the kernel what it has wanted so far, nothing needs to be compared
        later. With `changes` and `mark_written` that takes a third of the time of `put`.
        """
        want, have = patch(wants, change), self._have.get(owner)
        if not want or self.rejected or (wants is not have and self._want.get(owner) is not have):
            self.put(owner, want)
            return
        self._amended[owner] = self._want[owner] = want
        self._dirty.add(owner)
        self._steps += self._known.include(change)

    def _compare_amended(self) -> None:
        """Treat amended owners as all dirty ones."""
        self._amended, self._known, self._steps = {}, Diff({}, {}, {}), 0

    def wants(self, owner: Owner) -> Ruleset:
        """Return the objects that an owner wants."""
        return self._packer.unpack(self._want.get(owner, _NO_OBJECTS))

    def drop_claimed(self, owners: Iterable[Owner]) -> None:
        """Drop from outdated owners the objects that dirty owners want."""
        claims = [(other, self.wants(other)) for other in self._dirty]
        for owner in owners:
            want = self.wants(owner)
            lost = {key for other, claim in claims if other != owner for key in claim.keys() & want}
            if lost:
                self._dirty.add(owner)
                self._compare_amended()
                self._want[owner] = {k: v for k, v in want.items() if k not in lost}

    @property
    def outstanding(self) -> int:
        """Number of owners that changed since the last write; with a known Diff an eighth each."""
        return len(self._dirty) - len(self._amended) * 7 // 8

    def changes(self) -> Diff | None:
        """Return the Diff of the dirty owners; None if two of them want, or drop, one object."""
        if len(self._known) != self._steps:
            return None
        others = self._dirty.difference(self._amended)
        pairs = ((self._has(each), self.wants(each)) for each in others)
        try:
            return diff_of_owners(pairs, self._known)
        except ValueError:
            return None

    def mark_written(self) -> None:
        """Record that the Diff of `changes` is in force."""
        if self.rejected or self._missing:
            self._compare_amended()
        self._have.update(self._amended)
        self._recorded += len(self._known.added) - len(self._known.removed)
        self._loose.update(self._amended)
        # Of all other owners only a rejected one may still have an object that is wanted now.
        self._accept(self._dirty.difference(self._amended), self.rejected.keys() - self._dirty)
        self.mark_compared()

    def mark_compared(self) -> None:
        """Record that everything was compared with the kernel: no owner is dirty."""
        self._dirty.clear()
        self._compare_amended()

    def wanted(self, owners: Iterable[Owner] | None = None) -> dict[Any, Any]:
        """Return the objects that some or all owners want, rejected ones included."""
        if owners is not None:
            return _flat(map(self.wants, owners))
        return _flat(map(self._packer.unpack, self._want.values()))

    def effective(self) -> dict[Any, Any]:
        """Return the objects that the kernel should have now.

        Rejected owners come first, so a later claim overrides them.
        """
        if not self.rejected:
            return self.wanted()
        ordered = sorted(self.owners, key=lambda owner: owner not in self.rejected)
        return _flat(map(self._effective, ordered))

    def parts(self, first: Iterable[ObjectName], least: int) -> Iterator[Diff] | None:
        """Return `effective` as Diffs for an empty kernel, each made when it is asked for.

        Each has whole Services: traffic to a port of theirs that comes later would be refused.

        Args:
            first: Services of the first part, beside the objects that belong to none.
            least: objects that are worth parts.

        Returns:
            None if they are fewer, or if an owner is rejected. The Diffs end with an ApplyError if
            two owners claim one object.
        """
        if self.rejected or sum(map(self._packer.size, self._want.values())) < least:
            return None
        services: dict[ObjectName | None, list[Owner]] = {None: []}
        for owner in self._want:
            name = owner.name.object_name if isinstance(owner, PlanKey) else None
            services.setdefault(name, []).append(owner)
        used = dict.fromkeys([None, *islice((n for n in first if n in services), _MOST_USED)])
        rest = [name for name in services if name not in used]
        size = max(_SMALLEST_PART, len(rest) // _MOST_PARTS)
        together = [[*used], *(rest[at : at + size] for at in range(0, len(rest), size))]
        return self._checked(
            [owner for name in names for owner in services[name]] for names in together
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
        self._compare_amended()
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
                    self._loose.add(owner)
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
            owners: the owners whose part the kernel refused.
            why: the kernel's error.
            kernel: the objects in the kernel: owners that the ledger knows no objects of get
                those that an earlier process wrote for them.
        """
        self._compare_amended()
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
            Whether there are some to remove from the kernel now, as leftovers.
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

    def pack(self) -> None:
        """Keep the objects that are in force as bytes until somebody asks for them."""
        # In the order in which they were rendered, and all before the first one is dropped: memory
        # that was allocated together is then free together, and goes back to the system. Otherwise
        # each arena of Python would be kept for a few packed parts (16 MB at 10,000 Services).
        ordered = (
            self._loose
            if len(self._loose) < _FEW
            else filter(self._loose.__contains__, [*self._want])
        )
        packed = {}
        for owner in ordered:
            part = self._have.get(owner)
            if part is self._want.get(owner) and part and not isinstance(part, bytes):
                packed[owner] = self._packer.pack(part)
        self._want.update(packed)
        self._have.update(packed)
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
