"""Our tables in the kernel: read them, and carry out Diffs; the only writer.

Texts (the skeleton and the rules that depend on settings) go through `nft -f -`, everything else as
one netlink transaction:

    load_texts   one run of nft. A table with another foundation (upstream's has the same name) is
                 replaced together with all elements, so that there is no moment without rules;
                 then lazy chains and the marker chain (read.py) go in by netlink.
    write        one transaction with the rest of the Diff and its derived elements, or three
                 (transaction.in_steps). Counters of elements that it replaces are read just before
                 (counters.py).

Before kernel 6.2 a chain counts as used for a moment after the element that goes to it was deleted,
also in the same transaction. Chains and sets that are still in use are left to later transactions.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from steersman.host.exec import Result
from steersman.host.netlink import Netlink
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.model.ruleset import Diff
from steersman.modes.nftables import wire
from steersman.modes.nftables.derived import Counts, DerivedElements
from steersman.modes.nftables.layout import (
    Kind,
    family_number,
    family_of,
    kind_of,
    name_of,
    other_set,
    prefix,
    split_element,
)
from steersman.modes.nftables.read import (
    Marker,
    learned_entries,
    read_digests,
    read_table,
    text_hash,
)
from steersman.modes.nftables.sender import IN_USE_KINDS, InUseError, Sender
from steersman.modes.nftables.skeleton import foundation, table_name
from steersman.modes.nftables.text import interim_firewall, loadable, ruleset_text
from steersman.modes.nftables.transaction import Operation, in_steps, transaction
from steersman.modes.nftables.wire import OURS
from steersman.netfilter.nft import wire as nft
from steersman.netfilter.nft.generations import generation

UNKNOWN = "# not as steersman made it"
"""Value of a text in the kernel that differs from ours."""

_TEXTS = (Kind.SKELETON, Kind.RULES)
TEXT_KEYS = tuple(prefix(kind, family) for kind in _TEXTS for family in Family)
"""Keys of everything that goes in by nft."""
_TRIED_ALONE = 16
"""Leftover objects that one write tries one by one, if they cannot be deleted together."""
_TOO_LONG = os.strerror(errno.EMSGSIZE)


def resolve_texts(objects: dict[bytes, Any], texts: Iterable[str]) -> dict[bytes, Any]:
    """Replace the hashes of texts that were read by the texts, if they are known."""
    known = {text_hash(each): each for each in texts}
    for key in TEXT_KEYS:
        if key in objects:
            objects[key] = known.get(objects[key], UNKNOWN)
    return objects


class _TooLongError(ApplyError):
    """nft cannot send as much in one transaction."""


class KernelTables:
    """Our tables in the kernel; all methods block."""

    def __init__(
        self,
        netlink: Netlink,
        nft: Callable[[Sequence[str], bytes], Result],
    ) -> None:
        """Initialize without reading.

        Args:
            netlink: socket for all transactions; closed with this object.
            nft: runs it to its end, with this standard input; may raise BusyError.
        """
        self.netlink = netlink
        self.changes = 0
        """Transactions that came during the last `read`."""
        self.sender = Sender(netlink)
        self._nft = nft
        self._markers: dict[Family, Marker | None] = {}
        """Markers of the tables that exist; None for a table that is not ours."""
        self._derived = DerivedElements()
        self._leftover: dict[bytes, Any] = {}
        """Chains and sets that could not be deleted yet. One leaves when it is deleted, is wanted
        again, or is found by `read`."""

    # Reading

    def read(self) -> dict[bytes, Any]:
        """Read everything. Texts are given by their hashes (resolve_texts).

        Raises:
            BusyError: it changes faster than it can be read.
        """
        self.sender.foreign.check()
        before = generation(self.netlink)
        objects: dict[bytes, Any] = {}
        markers: dict[Family, Marker | None] = {}
        counts: Counts = {}
        for family in Family:
            ours = text_hash(foundation(family))
            table = read_table(self.netlink, family, ours)
            if table is None:
                continue
            markers[family] = table.marker
            counts |= table.counts
            objects[prefix(Kind.SKELETON, family)] = UNKNOWN
            if table.marker:
                objects[prefix(Kind.SKELETON, family)] = table.marker.foundation
                objects[prefix(Kind.RULES, family)] = (
                    table.marker.rules if table.intact else UNKNOWN
                )
            objects.update(table.objects)
        self._markers = markers
        self._leftover = {}  # the caller compares, and removes them
        self._derived.reset(counts)
        self.changes = (generation(self.netlink) - before) & 0xFFFFFFFF
        return objects

    # Texts

    def load_texts(self, change: Diff) -> Diff:
        """Load the texts of a Diff; return the rest of the Diff.

        Raises:
            ApplyError: nft rejects them.
            BusyError: the kernel had no time or memory.
        """
        new = change.added  # at the start this is all there is: make no copy at the memory peak
        if change.changed:
            new = {**new, **{key: pair[1] for key, pair in change.changed.items()}}
        families = [f for f in Family if {prefix(kind, f) for kind in _TEXTS} & new.keys()]
        # 1. A script per family, and one with the elements of tables that are replaced.
        scripts, loaded = list[str](), dict[bytes, Any]()
        for family in families:
            skeleton = new.get(prefix(Kind.SKELETON, family), "")
            script = skeleton + new.get(prefix(Kind.RULES, family), "")
            if skeleton:
                # A table may have appeared since the last read: delete works on the added one.
                table = table_name(family)
                script = f"add table {table}\ndelete table {table}\n{script}"
                if family in self._markers:
                    elements = loadable(family, new)
                    loaded |= elements
                    script += interim_firewall(family, elements)
            scripts.append(script)
        derived = DerivedElements().load({key: new[key] for key in loaded})
        lazy = {key: derived.pop(key) for key in [*derived] if kind_of(key) == Kind.LAZY}
        scripts.append(ruleset_text({**loaded, **derived}))
        # 2. One run of nft for all of them.
        try:
            self._run_nft("".join(scripts))
        except _TooLongError:
            # In a user namespace (rootless clusters) wmem_max limits nft: a run for each script.
            for script in filter(None, scripts):
                self._run_nft(script)

        # 3. By netlink: markers for the new texts, and the lazy chains that loaded elements need.
        for family in families:
            self._update_marker(family, new)
        self._derived.load(loaded)
        self._send(Diff(lazy))

        # 4. The rest: all other objects, and elements with a final value that nft cannot load.
        added = dict(change.added)
        for key in TEXT_KEYS:
            added.pop(key, None)
        changed = {k: v for k, v in change.changed.items() if kind_of(k) not in _TEXTS}
        for key, value in loaded.items():
            wanted = added.pop(key, value)
            if wanted != value:
                changed[key] = (value, wanted)
        return Diff(added, dict(change.removed), changed)

    def _run_nft(self, script: str) -> None:
        result = self._nft(["nft", "-f", "-"], script.encode())
        if result.returncode:
            message = result.message[:500]
            if "resource busy" in message or "Cannot allocate" in message:
                raise BusyError(f"nft: {message}")
            raise (_TooLongError if _TOO_LONG in message else ApplyError)(f"nft: {message}")
        self.sender.foreign.check(ours=1)

    def _update_marker(self, family: Family, new: Mapping[bytes, Any]) -> None:
        """Replace the marker chain of a table by one that names the texts just loaded."""
        old = self._markers.get(family)
        skeleton = new.get(prefix(Kind.SKELETON, family))
        rules = new.get(prefix(Kind.RULES, family))
        if skeleton is not None:
            old = None
            self._forget({family})
        marker = Marker(
            text_hash(skeleton) if skeleton else old.foundation if old else "",
            text_hash(rules) if rules else old.rules if old else "",
            *read_digests(self.netlink, family),
        )
        if old != marker:
            requests = [nft.new_chain(OURS[family], marker.chain)]
            if old:
                requests.append(nft.delete_chain(OURS[family], old.chain))
            self.sender.send([Operation(request, ()) for request in requests])
        self._markers[family] = marker

    def _forget(self, families: set[Family]) -> None:
        """Forget what was in tables that are gone or new."""
        self._markers = {f: marker for f, marker in self._markers.items() if f not in families}
        self._leftover = {k: v for k, v in self._leftover.items() if family_of(k) not in families}
        self._derived.forget(families)

    # All the rest

    def write(self, change: Diff) -> None:
        """Carry out a Diff without texts.

        Raises:
            ApplyError: the kernel rejected it; nothing of it is in force.
            BusyError: the kernel had no time or memory.
        """
        dropped = {f for f in Family if prefix(Kind.SKELETON, f) in change.removed}
        if dropped:  # their objects go with them
            removed = {k: v for k, v in change.removed.items() if family_number(k) not in dropped}
            change = Diff(change.added, removed, change.changed)
        counts = self._derived.counts_after(change)
        drops = [Operation(nft.delete_table(OURS[f]), (prefix(Kind.SKELETON, f),)) for f in dropped]
        self._commit(drops, self._with_learned(self._derived.complete(change, counts)))
        self._derived.commit(counts)
        if dropped:
            self._forget(dropped)

    def _with_learned(self, change: Diff) -> Diff:
        """Return a Diff with the affinity entries that lead to endpoints that it removes.

        First a transaction keeps clients from learning these endpoints. So the one that removes
        them removes every entry for them.
        """
        leaving: dict[bytes, dict[bytes, bytes]] = {}  # members by their sets, which stay
        for key, value in change.removed.items():
            members = split_element(key)[0] if kind_of(key) == Kind.MEMBER else b""
            if members and members not in change.removed:
                leaving.setdefault(members, {})[key] = value
        if not leaving:
            return change
        gone = {key: value for each in leaving.values() for key, value in each.items()}
        self._send(Diff(removed=gone))
        removed = {key: value for key, value in change.removed.items() if key not in gone}
        for members, keys in leaving.items():
            endpoints = {split_element(key)[1] for key in keys}
            removed |= learned_entries(self.netlink, other_set(members), endpoints)
        return Diff(change.added, removed, change.changed)

    def write_parts(self, parts: Iterable[Diff]) -> None:
        """Carry out Diffs that only add, a transaction each; raises as `write`.

        Another thread makes the next transaction while the kernel works on one: both take about as
        long.
        """
        transactions = self._additions(parts)
        with ThreadPoolExecutor(1) as maker:
            made = maker.submit(next, transactions, None)
            while (operations := made.result()) is not None:
                made = maker.submit(next, transactions, None)
                self.sender.send(operations)

    def _additions(self, parts: Iterable[Diff]) -> Iterator[list[Operation]]:
        """Yield a transaction for each Diff, which only adds."""
        for part in parts:
            counts = self._derived.counts_after(part)
            whole = self._derived.complete(part, counts)
            # In force soon. If it is refused, the caller reads everything again.
            self._derived.commit(counts)
            yield transaction(whole, destroy=self.sender.destroys)

    def _commit(self, drops: list[Operation], change: Diff) -> None:
        """Send a transaction; leave chains and sets that are still in use to later ones."""
        if self._leftover:
            self._delete_leftover()
        wanted_again = [key for key in self._leftover if key in change.added]
        first = [
            *drops,
            *(
                Operation(wire.flush_set(family_of(key), name_of(key)), (key,))
                for key in wanted_again
                if kind_of(key) != Kind.CHAIN  # a chain is flushed when it is refilled
            ),
        ]
        prepared, switch, removal = in_steps(change)
        if prepared:
            self._send(prepared, first)
            first = []
        try:
            self._send_removing(switch, first)
        except (ApplyError, BusyError):
            if prepared:
                self._send_removing(Diff(removed=prepared.added), [])
            raise
        self._send_removing(removal, [])
        for key in wanted_again:
            self._leftover.pop(key, None)

    def _send(self, change: Diff, first: Sequence[Operation] = ()) -> None:
        if operations := [*first, *transaction(change, destroy=self.sender.destroys)]:
            self.sender.send(operations)

    def _send_removing(self, change: Diff, first: Sequence[Operation]) -> None:
        """Send a transaction; keep the chains and sets that are still in use for later."""
        try:
            self._send(change, first)
        except InUseError:
            left = {k: v for k, v in change.removed.items() if kind_of(k) in IN_USE_KINDS}
            others = {k: v for k, v in change.removed.items() if k not in left}
            self._send(Diff(change.added, others, change.changed), first)
            self._leftover |= left

    def _delete_leftover(self) -> None:
        """Delete the objects that earlier transactions had to leave, as far as possible."""
        if self._try_delete(self._leftover):
            self._leftover = {}
            return
        # Rules of another program may keep one of them in use for long: try them one by one.
        for key in [*self._leftover][:_TRIED_ALONE]:
            value = self._leftover.pop(key)
            if not self._try_delete({key: value}):
                self._leftover[key] = value  # at the end: the next write tries others first

    def _try_delete(self, objects: dict[bytes, Any]) -> bool:
        try:
            self._send(Diff(removed=objects))
        except (ApplyError, BusyError):
            return False
        return True
