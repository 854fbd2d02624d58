"""The only writer: Diffs into kernel transactions.

The texts of the skeleton go through `nft -f -`, everything else as one netlink transaction. A
table of somebody else's making (upstream's has the same name) is replaced together with all
elements in one transaction, so that there is no moment without rules.
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from steersman.host.exec import Exec
from steersman.host.netlink import Netlink, NetlinkError, Request
from steersman.host.nlmsg import text
from steersman.model.names import Family
from steersman.modes.base import ApplyError, BusyError
from steersman.modes.diff import Diff, Ruleset
from steersman.modes.nftables import wire
from steersman.modes.nftables.counters import Counters
from steersman.modes.nftables.elements import encode
from steersman.modes.nftables.expressions import hairpin_rules, learning_rules
from steersman.modes.nftables.layout import TABLE, Form, Kind, prefix
from steersman.modes.nftables.read import (
    AFFINITY_KINDS,
    CLUSTER_KINDS,
    Mark,
    Table,
    cluster_ip,
    generation,
    memory,
    read_digests,
    read_table,
    service_memory,
    text_hash,
)
from steersman.modes.nftables.skeleton import HEADER, foundation
from steersman.modes.nftables.takeover import hairpin_meanwhile, loadable
from steersman.modes.nftables.text import describe, ruleset_text
from steersman.modes.nftables.transaction import Step, transaction

_BUSY = (errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
_OBJECTS = (Kind.CHAIN, Kind.AFFINITY, Kind.MEMBERS)
UNKNOWN = "# not as steersman made it"
"""Value of a skeleton in the kernel that differs from ours."""


class HeldError(BusyError):
    """A chain or set is still in use."""


class Tables:
    """Our tables in the kernel. Everything blocks but the run of nft; one call at a time."""

    def __init__(self, netlink: Netlink, execute: Exec) -> None:
        """Take the socket and the door to nft."""
        self.netlink = netlink
        weakref.finalize(self, netlink.close)  # modes are dropped, not closed
        self._exec = execute
        self._marks: dict[Family, Mark | None] = {}
        """Tables that exist; None where they are not ours."""
        self._cluster_ips: dict[bytes, int] = {}
        self._generation = generation(netlink)
        self._strangers = 0
        self._stale: dict[bytes, Any] = {}
        self._learning: set[Family] = set()
        self.counters = Counters(netlink)
        self._destroy = self._can_destroy()

    def _can_destroy(self) -> bool:
        """Whether the kernel can delete what may not be there; an empty transaction tells."""
        probe = wire.request(wire.DESTROYTABLE, Family.IPV4, text(1, "steersman-no-such-table"))
        return not self.netlink.batch(wire.batch([probe]))

    # Read

    def read(self) -> dict[bytes, Any]:
        """Read everything afresh. Texts of skeletons are given by their hashes (resolve_texts)."""
        self.strangers()
        objects: dict[bytes, Any] = {}
        marks: dict[Family, Mark | None] = {}
        learning: set[Family] = set()
        for family in Family:
            table = read_table(self.netlink, family, text_hash(foundation(family)))
            if table:
                marks[family] = table.mark
                learning |= {family} if table.learning else set()
                objects.update(_skeleton(family, table))
                objects.update(table.objects)
        self._marks, self._learning = marks, learning
        self._cluster_ips = {}
        self._count(objects, 1, self._cluster_ips)
        return objects

    def strangers(self) -> int:
        """How often the ruleset was changed by others, as far as it was looked."""
        now = generation(self.netlink)
        self._strangers += now != self._generation
        self._generation = now
        return self._strangers

    def _made_transaction(self) -> None:
        """Take note of the generation that our own transaction made."""
        now = generation(self.netlink)
        self._strangers += (now - self._generation) & 0xFFFFFFFF != 1
        self._generation = now

    # Write

    def needs_nft(self, change: Diff) -> bool:
        """Whether the Diff has texts in it."""
        return any(
            prefix(kind, family) in part
            for part in (change.added, change.changed)
            for family in Family
            for kind in (Kind.SKELETON, Kind.RULES)
        )

    async def load_texts(self, change: Diff) -> Diff:
        """Load what is text; return the rest of the Diff.

        Raises:
            ApplyError: nft refuses it.
        """
        new = {**change.added, **{key: pair[1] for key, pair in change.changed.items()}}
        families = [f for f in Family if {prefix(k, f) for k in _TEXTS} & new.keys()]
        script, loaded = "", dict[bytes, Any]()
        for family in families:
            script += new.get(prefix(Kind.SKELETON, family), "")
            script += new.get(prefix(Kind.RULES, family), "")
            if prefix(Kind.SKELETON, family) in new and family in self._marks:
                script = f"delete table {HEADER[family]} {TABLE}\n{script}"
                loaded |= loadable(family, new)
                script += hairpin_meanwhile(family, loaded)
        counts: dict[bytes, int] = {}
        self._count(loaded, 1, counts)
        known = {bytes((Kind.CLUSTER_IPS,)) + address: b"" for address in counts}
        await self._nft(script + ruleset_text({**loaded, **known}))
        self._made_transaction()
        for family in families:
            self._mark(family, new)
        self._cluster_ips.update(counts)
        return _without(change, loaded)

    async def _nft(self, script: str) -> None:
        result = await self._exec.run(["nft", "-f", "-"], script.encode())
        if result.returncode:
            message = result.message[:500]
            if "resource busy" in message or "Cannot allocate" in message:
                raise BusyError(f"nft: {message}")
            raise ApplyError(f"nft: {message}")

    def _mark(self, family: Family, new: Mapping[bytes, Any]) -> None:
        """Write the rules that nft cannot, then say in the kernel what was loaded."""
        old = self._marks.get(family)
        if prefix(Kind.SKELETON, family) in new:
            old = None
            self._learning.discard(family)
            self._send([Step(request, ()) for request in hairpin_rules(family)])
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
            self._send([Step(request, ()) for request in requests])
        self._marks[family] = mark

    def write(self, change: Diff) -> None:
        """Carry out a Diff without texts, in one transaction.

        Raises:
            ApplyError: the kernel refused it; nothing of it is in force.
            BusyError: the kernel had no time or memory.
        """
        dropped = {f for f in Family if prefix(Kind.SKELETON, f) in change.removed}
        change = _outside(change, dropped)
        self.counters.keep(change)
        counts = self._changed_counts(change)
        steps = [Step(wire.delete_table(f), (prefix(Kind.SKELETON, f),)) for f in dropped]
        self._commit(steps, self._with_cluster_ips(change, counts))
        for family in dropped:
            self._marks.pop(family, None)
            self._learning.discard(family)
        self._keep_counts(counts, dropped)
        self._forget(change)

    def _commit(self, steps: Sequence[Step], change: Diff) -> None:
        """Send a transaction; where chains are still held, a second one deletes them later.

        Before kernel 6.2 a chain counts as used for a moment after the element that goes to it
        was deleted, also in the same transaction.
        """
        self._collect(change)
        learners = {Family(k[1]) for k in change.added if k[0] in AFFINITY_KINDS} - self._learning
        steps = [*steps, *(Step(r, ()) for family in learners for r in learning_rules(family))]
        rest = transaction(change, destroy=self._destroy)
        try:
            if steps or rest:
                self._send([*steps, *rest])
        except HeldError:
            left = {k: v for k, v in change.removed.items() if k[0] in _OBJECTS}
            others = {k: v for k, v in change.removed.items() if k not in left}
            fewer = Diff(change.added, others, change.changed)
            self._send([*steps, *transaction(fewer, destroy=self._destroy)])
            self._stale |= left
        self._learning |= learners

    def _collect(self, change: Diff) -> None:
        """Delete what an earlier transaction had to leave."""
        if not self._stale:
            return
        left = {k: v for k, v in self._stale.items() if k not in change.added}
        self._stale = {}
        try:
            self._send(transaction(Diff(removed=left), destroy=self._destroy)) if left else None
        except (ApplyError, BusyError):  # drift finds what is left now
            return

    def _send(self, steps: Sequence[Step]) -> None:
        refused = self.netlink.batch(wire.batch([step.request for step in steps]))
        if not refused:
            self._made_transaction()
            return
        index, error = min(refused.items())
        keys = steps[index - 1].keys if 0 < index <= len(steps) else ()
        if error.errno == errno.EBUSY and keys and keys[0][0] in _OBJECTS:
            raise HeldError(str(error))
        if error.errno in _BUSY:
            raise BusyError(f"nftables: {error}")
        what = describe(keys) if keys else "its fixed rules"
        raise ApplyError(f"nf_tables refuses {what}: {_reason(error)}")

    # The clusterIPs that are known, each once however many ports they have

    @staticmethod
    def _count(objects: Ruleset, by: int, counts: dict[bytes, int]) -> None:
        for key, value in objects.items():
            if key[0] in CLUSTER_KINDS and (address := cluster_ip(key, value)):
                counts[address] = counts.get(address, 0) + by

    def _changed_counts(self, change: Diff) -> dict[bytes, int]:
        by: dict[bytes, int] = {}
        self._count(change.added, 1, by)
        self._count(change.removed, -1, by)
        self._count({key: pair[1] for key, pair in change.changed.items()}, 1, by)
        self._count({key: pair[0] for key, pair in change.changed.items()}, -1, by)
        return {key: self._cluster_ips.get(key, 0) + delta for key, delta in by.items() if delta}

    def _keep_counts(self, counts: Mapping[bytes, int], dropped: set[Family]) -> None:
        self._cluster_ips.update(counts)
        for key in counts:
            if self._cluster_ips[key] <= 0:
                del self._cluster_ips[key]
        if dropped:
            self._cluster_ips = {k: n for k, n in self._cluster_ips.items() if k[0] not in dropped}

    def _with_cluster_ips(self, change: Diff, counts: Mapping[bytes, int]) -> Diff:
        """Add the elements of `cluster-ips` that come and go with this Diff."""
        kind = bytes((Kind.CLUSTER_IPS,))
        added, removed = dict(change.added), dict(change.removed)
        for address, count in counts.items():
            had = address in self._cluster_ips
            if count > 0 and not had:
                added[kind + address] = b""
            elif count <= 0 and had:
                removed[kind + address] = b""
        return Diff(added, removed, change.changed)

    # Affinity of endpoints that are gone

    def _forget(self, change: Diff) -> None:
        """Delete what the data path remembers of removed members."""
        gone: dict[tuple[Family, str], set[bytes]] = {}
        for key in change.removed:
            if key[0] == Kind.MEMBER:
                members, _, endpoint = key[2:].partition(b"\0")
                family = Family(key[1])
                if bytes((Kind.MEMBERS, family)) + members not in change.removed:
                    name = service_memory(members)
                    gone.setdefault((family, name), set()).add(endpoint)
        for (family, name), endpoints in gone.items():
            clients = [
                client
                for client, endpoint in memory(self.netlink, family, name)
                if endpoint in endpoints
            ]
            self._delete_clients(family, name, clients)

    def _delete_clients(self, family: Family, name: str, clients: Iterable[bytes]) -> None:
        kind = wire.DESTROYSETELEM if self._destroy else wire.DELSETELEM
        for client in clients:  # one each: without DESTROY an expired one would refuse the rest
            items = encode(Form.SET, [(client, b"")], keys_only=True)
            requests: list[Request] = list(wire.elements(kind, family, name, items))
            if not self.netlink.batch(wire.batch(requests)):
                self._made_transaction()


_TEXTS = (Kind.SKELETON, Kind.RULES)


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
    added: dict[bytes, Any] = {}
    changed: dict[bytes, Any] = {}
    for key, value in change.added.items():
        if key in loaded and loaded[key] != value:
            changed[key] = (loaded[key], value)
        elif key not in loaded and key[0] not in _TEXTS:
            added[key] = value
    changed |= {k: v for k, v in change.changed.items() if k[0] not in _TEXTS}
    return Diff(added, dict(change.removed), changed)


def _reason(error: NetlinkError) -> str:
    return str(error).partition(": ")[2] or str(error)
