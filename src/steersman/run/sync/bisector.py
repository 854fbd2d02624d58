"""Find the owners whose objects the kernel rejects, and put everything else in force.

Theory. A batch is written all or nothing, and the kernel rarely says which object was wrong. So a
refused batch is split in two halves, each of which is tried alone, down to single owners:

    a b c d e f g h      refused                   Owners are sorted by namespace. A part is never
    a b c d  |           in force                  split once too many of its namespace were
             | e f g h   refused                   rejected in a row: then the rest of it is
             | e f |     refused                   rejected with its last error, untried. One
             | e |       rejected  ...             tenant with a thousand bad Services costs
                   | g h in force                  _MOST_REJECTIONS reads, and costs others nothing.

A rejected owner keeps the objects it had (ledger.py), and all rejected owners are tried again at
the next comparison, in another random order: an owner that was rejected untried gets its turn.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from itertools import chain

from steersman.host.worker import KernelWorker
from steersman.model.errors import ApplyError
from steersman.model.names import NODE, Owner, PlanKey
from steersman.model.ruleset import Diff, Ruleset
from steersman.run.sync.ledger import ADOPTED, STALE, ObjectLedger

_MOST_REJECTIONS = 16
"""Consecutive rejections after which the rest of a namespace is rejected untried, and namespaces
with consecutive rejections after which every part is: their own objects are hardly the reason. Each
rejection costs a read of the whole kernel."""


class Bisector:
    """Writes the objects of owners part by part, and records the result in the ledger."""

    def __init__(
        self,
        apply: Callable[[Diff], Awaitable[None]],
        read: Callable[[], Awaitable[Ruleset]],
        ledger: ObjectLedger,
        worker: KernelWorker,
    ) -> None:
        """Create a bisector; `apply` raises ApplyError if the kernel refuses a Diff."""
        self._apply = apply
        self._read = read
        self._ledger = ledger
        self._worker = worker

    async def write_all(self) -> list[Diff]:
        """Write everything that can be written, after one batch of it was refused.

        Returns:
            The Diffs that are in force now.
        """
        written = await self._write([NODE])
        written += await self._write(self._ledger.owners - {NODE, ADOPTED})
        return written + await self._write([STALE])

    async def retry_rejected(self) -> list[Diff]:
        """Try rejected owners again, after everything else is in force; return what was written."""
        rejected = self._ledger.rejected
        written = await self._write(rejected.keys() - {STALE, ADOPTED})
        return written + await self._write(rejected.keys() & {STALE})

    async def _write(self, owners: Iterable[Owner]) -> list[Diff]:
        """Write the part of some owners, bisecting it if the kernel refuses it."""
        shuffled = list(owners)
        random.shuffle(shuffled)  # an owner that was rejected untried comes earlier another time
        namespaces: dict[str, list[Owner]] = {}
        for owner in shuffled:
            namespaces.setdefault(_namespace(owner), []).append(owner)
        parts = [[*chain.from_iterable(namespaces.values())]] if shuffled else []
        written: list[Diff] = []
        consecutive_rejections: Counter[str] = Counter()
        rejecting: set[str] = set()
        """Namespaces with rejections since anything was written."""
        while parts:
            part = parts.pop()
            first, last = _namespace(part[0]), _namespace(part[-1])
            # The more namespaces reject, the sooner it is enough: the limit is shared.
            limit = _MOST_REJECTIONS // max(1, len(rejecting))
            kernel = await self._read()
            change = await self._worker.compute(
                partial(self._ledger.part, kernel, part), len(kernel)
            )
            # Without an answer they may be in force: the next comparison must take nothing back.
            rejected = self._ledger.rejected
            before = {owner: rejected.pop(owner) for owner in part if owner in rejected}
            try:
                await self._apply(change)
            except ApplyError as error:
                rejected |= before
                exhausted = first == last and consecutive_rejections[first] >= limit
                if len(part) > 1 and limit > 0 and not exhausted:
                    middle = len(part) // 2
                    parts += part[middle:], part[:middle]
                    continue
                untried = f"; with {len(part) - 1} others, not tried alone" if part[1:] else ""
                why = f"{error}{untried}"
                await self._worker.compute(
                    partial(self._ledger.reject, part, why, kernel), len(kernel)
                )
                consecutive_rejections[first] += 1
                rejecting.add(first)
            else:
                await self._worker.compute(partial(self._ledger.accept, part), len(kernel))
                written.append(change)
                if change:
                    rejecting.clear()
                    for namespace in set(map(_namespace, part)):
                        consecutive_rejections.pop(namespace, None)
        return written


def _namespace(owner: Owner) -> str:
    return owner.name.namespace if isinstance(owner, PlanKey) else ""
