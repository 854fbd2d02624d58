"""The only writer: Diffs into kernel transactions.

The texts of the skeleton go through `nft -f -`, everything else as one netlink transaction. A
table of somebody else's making (upstream's has the same name) is replaced together with all
elements in one transaction, so that there is no moment without rules.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from steersman.host.exec import Exec, run_program
from steersman.host.netlink import Netlink
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.model.ruleset import Diff
from steersman.modes.nftables import wire
from steersman.modes.nftables.counters import Counters
from steersman.modes.nftables.derived import Counts, Derived
from steersman.modes.nftables.dormant import DORMANT, woken
from steersman.modes.nftables.forget import forget
from steersman.modes.nftables.layout import TABLE, Kind, prefix
from steersman.modes.nftables.read import (
    Mark,
    Table,
    read_digests,
    read_table,
    text_hash,
)
from steersman.modes.nftables.sender import OBJECTS, HeldError, Sender
from steersman.modes.nftables.skeleton import HEADER, foundation
from steersman.modes.nftables.takeover import guarded_meanwhile, loadable
from steersman.modes.nftables.text import ruleset_text
from steersman.modes.nftables.transaction import Step, transaction

UNKNOWN = "# not as steersman made it"
"""Value of a skeleton in the kernel that differs from ours."""


_TRIED_ALONE = 16
"""Objects left over that are tried one by one at a write, if they cannot be deleted together."""
_TOO_LONG = os.strerror(errno.EMSGSIZE)


class TooLongError(ApplyError):
    """More than nft can send in one transaction."""


class Tables:
    """Our tables in the kernel. Everything blocks but the run of nft; one call at a time."""

    def __init__(self, netlink: Netlink, execute: Exec) -> None:
        """Take the socket and the door to nft."""
        self.netlink = netlink
        self.sender = Sender(netlink)
        self._exec = execute
        self._marks: dict[Family, Mark | None] = {}
        """Tables that exist; None where they are not ours."""
        self._derived = Derived()
        self._stale: dict[bytes, Any] = {}
        """Chains and sets that could not be deleted yet; one leaves only when it was deleted, is
        wanted again, or is found by `read`."""
        self._awake: set[tuple[Family, str]] = set()
        self.counters = Counters(netlink)

    # Read

    def read(self) -> dict[bytes, Any]:
        """Read everything afresh. Texts of skeletons are given by their hashes (resolve_texts)."""
        self.sender.strangers()
        objects: dict[bytes, Any] = {}
        marks: dict[Family, Mark | None] = {}
        awake: set[tuple[Family, str]] = set()
        counts: Counts = {}
        for family in Family:
            table = read_table(self.netlink, family, text_hash(foundation(family)))
            if table:
                marks[family] = table.mark
                awake |= {(family, chain) for chain in table.awake}
                objects.update(_skeleton(family, table))
                objects.update(table.objects)
                counts |= table.derived
        self._marks, self._awake = marks, awake
        self._stale = {}  # whoever reads compares, and removes them by itself
        self._derived.read(counts)
        return objects

    # Write

    async def load_texts(self, change: Diff) -> Diff:
        """Load what is text; return the rest of the Diff.

        Raises:
            ApplyError: nft refuses it.
        """
        new = change.added  # at the start it is all there is, and the peak of memory is near
        if change.changed:
            new = {**new, **{key: pair[1] for key, pair in change.changed.items()}}
        families = [f for f in Family if {prefix(k, f) for k in _TEXTS} & new.keys()]
        scripts, loaded = list[str](), dict[bytes, Any]()
        for family in families:
            script = new.get(prefix(Kind.SKELETON, family), "")
            script += new.get(prefix(Kind.RULES, family), "")
            if prefix(Kind.SKELETON, family) in new:
                table = f"table {HEADER[family]} {TABLE}"  # since it was read, one may have come
                script = f"add {table}\ndelete {table}\n{script}"
            if prefix(Kind.SKELETON, family) in new and family in self._marks:
                loaded |= loadable(family, new)
                script += guarded_meanwhile(family, loaded)
            scripts.append(script)
        follows = Derived().loaded({key: new[key] for key in loaded})
        await self._load([*scripts, ruleset_text({**loaded, **follows})])
        for family in families:
            self._mark(family, new)
        self._derived.loaded(loaded)
        self._wake(woken(loaded))
        return _without(change, loaded)

    async def _load(self, scripts: Sequence[str]) -> None:
        """Load scripts in one transaction.

        In a user namespace (rootless clusters) nft cannot send as much at once as it likes: there
        they take one each.
        """
        try:
            await self._nft("".join(scripts))
        except TooLongError:
            for script in filter(None, scripts):
                await self._nft(script)

    async def _nft(self, script: str) -> None:
        argv = ["nft", "-f", "-"]
        result = await run_program(self._exec, argv, script.encode(), package="nftables")
        if result.returncode:
            message = result.message[:500]
            if "resource busy" in message or "Cannot allocate" in message:
                raise BusyError(f"nft: {message}")
            raise (TooLongError if _TOO_LONG in message else ApplyError)(f"nft: {message}")
        self.sender.made_transaction()

    def _mark(self, family: Family, new: Mapping[bytes, Any]) -> None:
        """Say in the kernel what was loaded."""
        old = self._marks.get(family)
        if prefix(Kind.SKELETON, family) in new:
            old = None
            self._sleep({family})
        foundation = new.get(prefix(Kind.SKELETON, family))
        rules = new.get(prefix(Kind.RULES, family))
        mark = Mark(
            text_hash(foundation) if foundation else old.foundation if old else "",
            text_hash(rules) if rules else old.rules if old else "",
            *read_digests(self.netlink, family),
        )
        requests = [wire.new_chain(family, mark.chain)]
        if old and old != mark:
            requests.append(wire.delete_chain(family, old.chain))
        if old != mark:
            self.sender.send([Step(request, ()) for request in requests])
        self._marks[family] = mark

    def _wake(self, chains: set[tuple[Family, str]]) -> None:
        """Put our own rules in the place of those that nft wrote meanwhile."""
        if chains:
            self.sender.send(_waking(chains))
        self._awake |= chains

    def _sleep(self, families: set[Family]) -> None:
        """Forget what is known of the chains in tables that are gone or new."""
        self._awake = {each for each in self._awake if each[0] not in families}
        self._stale = {k: v for k, v in self._stale.items() if k[1] not in families}

    def write(self, change: Diff) -> None:
        """Carry out a Diff without texts, in one transaction.

        Raises:
            ApplyError: the kernel refused it; nothing of it is in force.
            BusyError: the kernel had no time or memory.
        """
        dropped = {f for f in Family if prefix(Kind.SKELETON, f) in change.removed}
        change = _outside(change, dropped)
        counts = self._derived.after(change)
        steps = [Step(wire.delete_table(f), (prefix(Kind.SKELETON, f),)) for f in dropped]
        with self.counters.kept(change):
            self._commit(steps, self._derived.complete(change, counts))
        for family in dropped:
            self._marks.pop(family, None)
        self._sleep(dropped)
        self._derived.keep(counts, dropped)
        forget(self.sender, change.removed)

    def _commit(self, steps: Sequence[Step], change: Diff) -> None:
        """Send a transaction; where chains are still held, a second one deletes them later.

        Before kernel 6.2 a chain counts as used for a moment after the element that goes to it
        was deleted, also in the same transaction.
        """
        self._collect()
        back = [key for key in self._stale if key in change.added]
        waking = woken(change.added) - self._awake
        steps = [*steps, *_waking(waking), *_emptied(back)]
        rest = transaction(change, destroy=self.sender.destroys)
        try:
            if steps or rest:
                self.sender.send([*steps, *rest])
        except HeldError:
            left = {k: v for k, v in change.removed.items() if k[0] in OBJECTS}
            others = {k: v for k, v in change.removed.items() if k not in left}
            fewer = Diff(change.added, others, change.changed)
            self.sender.send([*steps, *transaction(fewer, destroy=self.sender.destroys)])
            self._stale |= left
        for key in back:
            self._stale.pop(key, None)
        self._awake |= waking

    def _collect(self) -> None:
        """Delete what an earlier transaction had to leave, as far as it can be by now."""
        if not self._stale or self._deleted(self._stale):
            self._stale = {}
            return
        for key in [*self._stale][:_TRIED_ALONE]:  # one may be held for long, by others' rules
            value = self._stale.pop(key)
            if not self._deleted({key: value}):
                self._stale[key] = value  # at the end: the next ones are tried the next time

    def _deleted(self, objects: Mapping[bytes, Any]) -> bool:
        """Try to delete chains and sets."""
        removed = Diff(removed=dict(objects))
        try:
            self.sender.send(transaction(removed, destroy=self.sender.destroys))
        except (ApplyError, BusyError):
            return False
        return True


def _waking(chains: Iterable[tuple[Family, str]]) -> list[Step]:
    return [Step(request, ()) for f, chain in sorted(chains) for request in DORMANT[chain].rules(f)]


def _emptied(objects: Iterable[bytes]) -> list[Step]:
    """Empty sets that were to be deleted and are wanted again; chains are refilled anyway."""
    return [
        Step(wire.flush_set(Family(key[1]), key[2:].decode()), (key,))
        for key in objects
        if key[0] != Kind.CHAIN
    ]


_TEXTS = (Kind.SKELETON, Kind.RULES)


def has_texts(change: Diff) -> bool:
    """Whether a Diff brings texts."""
    texts = [prefix(kind, family) for family in Family for kind in _TEXTS]
    return any(text in part for part in (change.added, change.changed) for text in texts)


def _skeleton(family: Family, table: Table) -> dict[bytes, str]:
    """The texts that are in force, as their hashes."""
    out = {prefix(Kind.SKELETON, family): UNKNOWN}
    if table.mark:
        out[prefix(Kind.SKELETON, family)] = table.mark.foundation
        out[prefix(Kind.RULES, family)] = table.mark.rules if table.intact else UNKNOWN
    return out


def resolve_texts(objects: dict[bytes, Any], texts: Iterable[str]) -> dict[bytes, Any]:
    """Put the texts in the place of their hashes, where they are known."""
    known = {text_hash(each): each for each in texts}
    for family in Family:
        for kind in _TEXTS:
            key = prefix(kind, family)
            if key in objects:
                objects[key] = known.get(objects[key], UNKNOWN)
    return objects


def _outside(change: Diff, dropped: set[Family]) -> Diff:
    """Leave out what goes with its table."""
    if not dropped:
        return change
    removed = {key: value for key, value in change.removed.items() if key[1] not in dropped}
    return Diff(change.added, removed, change.changed)


def _without(change: Diff, loaded: Mapping[bytes, Any]) -> Diff:
    """What remains to do when the texts and these elements are in."""
    added = dict(change.added)
    changed = {k: v for k, v in change.changed.items() if k[0] not in _TEXTS}
    for key in [prefix(kind, family) for kind in _TEXTS for family in Family]:
        added.pop(key, None)
    for key, value in loaded.items():
        wanted = added.pop(key, value)
        if wanted != value:
            changed[key] = (value, wanted)
    return Diff(added, dict(change.removed), changed)
