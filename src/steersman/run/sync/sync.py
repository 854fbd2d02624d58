"""From changed objects to the kernel: plan, render, diff, apply. The only owner of have and want.

    Store --names--> Planner --owners--> ledger --owners--> kernel
            plan               render              write

Each of the three has a log of what changed in it (model/change_log.py), and each step has a cursor
in the log before it, which it moves once it has succeeded. So a run may fail or be cancelled at any
await: the next one finds the same names, and works on their present state. The first sync, a retry,
a reload, a rehearsal and the first sync after a switch of the mode are all the same call.

The Ruleset is kept per owner (ledger.py: a ServicePort in one family, or the node), so a sync costs
what changed. A batch that the kernel refuses is bisected (bisector.py): the rejected owner keeps
the objects it had and gets a Finding, everything else goes in. Writing takes one of two ways:

    changes     the kernel is as the ledger says: write the Diff of what was rendered, read nothing
    everything  at the start, after a failed write, or if the fingerprint shows that others touched
                the kernel: read it, diff it with the whole ledger, write that

All steps yield to the event loop every few milliseconds, or run in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import msgspec

from steersman.compile.planner import Planner
from steersman.model.drift import Drift, Writer, by_others, drift_of
from steersman.model.errors import ApplyError
from steersman.model.names import ObjectName, Owner, PlanKey
from steersman.model.plan import NodePlan
from steersman.model.ruleset import Diff, Ruleset, diff
from steersman.modes.base import ByOthers, Mode
from steersman.run.sync.bisector import Bisector
from steersman.run.sync.in_force import InForce
from steersman.run.sync.ledger import ADOPTED, ObjectLedger
from steersman.run.sync.renderer import Renderer
from steersman.run.sync.state import (
    RefusedBatches,
    State,
    SyncReport,
    SyncResult,
    Written,
    unwritten_findings,
)
from steersman.source.store import Store

log = logging.getLogger(__name__)

_EXAMPLES, _WRITERS = 5, 8
"""Lines of its repair that a Drift keeps, and programs."""
_PARTS_FROM = 5000
"""Objects from which an empty kernel is filled in parts: a part takes about ten milliseconds."""


class KernelKnowledge:
    """What a Sync knows of the kernel; only a run that succeeds makes it certain again."""

    def __init__(self) -> None:
        """Start without having read anything."""
        self.unread = True
        """The kernel may differ from the ledger: a write is under way or failed, or nothing was
        read yet. Everything has to be read."""
        self.suspected = False
        """Others may have changed our objects: compare the fingerprint, then decide."""

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Write to the kernel; unless the block succeeds, everything has to be read again."""
        before, self.unread = self.unread, True
        yield
        self.unread = before

    @contextlib.contextmanager
    def comparing(self) -> Iterator[None]:
        """Compare with the kernel; a suspicion that is raised during the block remains."""
        before, self.suspected = self.suspected, False
        try:
            yield
        except BaseException:
            self.suspected |= before
            raise


class Sync:
    """The body of the sync loop. `state` is replaced after each run; nothing else is shared."""

    def __init__(
        self,
        store: Store,
        planner: Planner,
        mode: Mode,
        in_force: InForce | None = None,
        *,
        revision: int = 0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Create the loop body; nothing is read or written before `run`.

        If another mode served before, `in_force` has its plans and `revision` is the number of its
        last sync. `wall` returns seconds since 1970.
        """
        self.store = store
        self.planner = planner
        self.mode = mode
        self.state = State(revision, mode.name)
        self.in_force = in_force or InForce()
        self._unplanned = store.log.cursor()
        self._unrendered = planner.log.cursor()
        self._unpublished = planner.log.cursor()
        """The plans that no report has named."""
        self._unreported = store.log.cursor()
        """The changes of the Store that no report has named."""
        self._seen: Counter[str] = Counter()
        """The changes of the Store up to the last plan, by kind."""
        self._kernel = KernelKnowledge()
        self.failed = False
        """Whether the last run failed."""
        self._ledger = ObjectLedger()
        self._bisector = Bisector(self._apply, self._read, self._ledger, mode.worker)
        self._renderer = Renderer(mode, planner.services, self._ledger)
        self.broken: Mapping[Owner, str] = self._renderer.broken
        """The error of each owner whose objects could not be rendered."""
        self._wall = wall
        self._token: Hashable | None = None
        """The kernel's fingerprint when it was last known to equal the ledger."""
        self._phases: dict[str, float] = {}
        self._refused_batches = RefusedBatches()
        self._running = asyncio.Lock()
        self.drift: Drift | None = None
        """Changes by other programs that were found and are not repaired yet."""

    @property
    def owes(self) -> bool:
        """Whether another run is due: something is not known to be in the kernel."""
        steps = self._unplanned.behind or self._unrendered.behind or self._ledger.owes
        return steps or self._kernel.unread or self._kernel.suspected

    def suspect(self) -> None:
        """Compare the kernel with the ledger at the next run, and repair it.

        Costs one fingerprint if nothing touched the kernel since the last comparison.
        """
        self._kernel.suspected = True

    def distrust(self) -> None:
        """Read the whole kernel at the next run, whatever its fingerprint says."""
        self.suspect()
        self._kernel.unread = True

    async def run(self) -> SyncReport | None:
        """Bring the kernel up to date (behaviour 2, 7).

        Returns:
            The report for the observers; None while the initial lists are missing.

        Raises:
            Exception: the kernel could not be programmed (BusyError: not now); everything stays
                owed, run again.
        """
        if not self.store.synced:
            return None
        reason = "changes"
        if self.state.result is None:
            reason = "start"
        elif self.failed:
            reason = "retry"
        elif self._kernel.suspected:
            reason = "drift"
        self._phases, drift = {}, self.drift
        try:
            async with self._running:
                await self._plan()
                await self._render()
                compared, written = await self._write()
        except BaseException:
            self.failed = True
            raise
        self.failed = False
        dirty = len(self._renderer.rendered)
        self._renderer.rendered.clear()
        if reason == "drift" and self.drift is drift:  # it found nothing
            # On a busy node changes come along with each comparison.
            reason = "changes" if dirty else "comparison"
        result = SyncResult(
            revision=self.state.revision + 1,
            reason=reason,
            dirty=dirty,
            added=written.added,
            removed=written.removed,
            changed=written.changed,
            phases=self._phases,
            refused=len(self._ledger.rejected.keys() - {ADOPTED}) + len(self.broken),
        )
        return self._publish(result, written, compared)

    async def check(self) -> SyncReport | None:
        """Compare the kernel with the ledger now; see `suspect` and `run`."""
        self.suspect()
        return await self.run()

    async def pack(self) -> None:
        """Keep what the last syncs wrote in little memory."""
        async with self._running:
            ledger = self._ledger
            ledger.use_packed(await self.mode.worker.compute(ledger.packed, ledger.unpacked))

    @contextlib.asynccontextmanager
    async def between_runs(self) -> AsyncIterator[Iterable[tuple[Any, Any]] | None]:
        """Let no run begin meanwhile; gives the objects that are in force now.

        They are copied while they are iterated, which may be done later, and in a thread. None if
        they are not known: no run has reached the kernel yet, or the last one failed.
        """
        async with self._running:
            known = self.state.result is not None and not self._kernel.unread
            yield self._ledger.in_force() if known else None

    async def rehearse(self) -> Diff:
        """Return what a sync would write, and write nothing."""
        async with self._running:
            await self._plan()
            await self._render()
            kernel, ledger = await self._read(), self._ledger
            return await self.mode.worker.compute(
                lambda: diff(kernel, ledger.wanted()), ledger.objects
            )

    def objects(self) -> Iterator[tuple[Any, Any]]:
        """Yield every kernel object that is in force, as far as known."""
        return self._ledger.in_force()

    def not_in_force(self) -> frozenset[ObjectName]:
        """Return the Services of which the kernel has an older version than the Planner."""
        owners = (*self._ledger.rejected, *self.broken)
        found = {each.name.object_name for each in owners if isinstance(each, PlanKey)}
        return frozenset(found | self.planner.failed)

    # Plan and render, a few milliseconds at a time

    async def _plan(self) -> None:
        # A new Planner plans everything, whatever is named.
        changes, revision = self._unplanned.changed()
        self._seen = Counter(self.store.seen)
        # A defect may have had a reason that is gone: each comparison tries again.
        retried = self.planner.failed if self._kernel.suspected else ()
        if self._unplanned.behind or retried:
            names = {change.name for change in changes if change.of_service}.union(retried)
            with self._timed("plan"):
                store = self.store
                for _ in self.planner.steps(store.snapshot, store.facts, names):
                    await asyncio.sleep(0)
        self._unplanned.move(revision)

    async def _render(self) -> None:
        owners, revision = self._unrendered.changed()
        if self._kernel.suspected:
            owners += self.broken
        if owners:
            with self._timed("render"):
                await self._renderer.render(owners, self.planner.settings)
        self._unrendered.move(revision)

    # Write

    async def _write(self) -> tuple[bool, Written]:
        """Write the changes of the ledger, or compare everything.

        Returns:
            Whether the whole kernel was compared, and what was written.
        """
        knowledge, ledger = self._kernel, self._ledger
        # Somebody may have touched the kernel: if its fingerprint differs, read all of it. Rejected
        # owners are retried by a comparison only, as their reason may lie outside their objects.
        looks_for_drift, token = False, None
        if knowledge.suspected and not knowledge.unread:
            with knowledge.comparing():
                token = await self.mode.worker.do(self.mode.fingerprint)
                knowledge.unread = token is None or token != self._token or bool(ledger.rejected)
                looks_for_drift = knowledge.unread
        # The kernel is as the ledger says: write only the changes. Two owners may claim one object
        # (then there is no Diff), or the kernel may refuse the batch: both need a comparison.
        if not knowledge.unread:
            number = len(ledger.unwritten)
            change = await self.mode.worker.compute(ledger.changes, number)
            if change is not None and (not change or await self._accepts((change,), partial=True)):
                with knowledge.writing():  # if it is cancelled, the ledger may not say so
                    await self.mode.worker.compute(ledger.mark_written, number)
                knowledge.unread = ledger.release_adopted()
                return False, Written.by(change)
        return True, await self._write_everything(looks_for_drift, token)

    async def _write_everything(self, looks_for_drift: bool, token: Hashable | None) -> Written:
        """Read the kernel, and write the difference to the ledger.

        Args:
            looks_for_drift: whether the kernel was as the ledger says, so that all other
                differences come from other programs.
            token: then, the fingerprint that has just changed: some modes list all rules for it.
        """
        knowledge, ledger = self._kernel, self._ledger
        with knowledge.comparing():
            knowledge.unread = True
            if not looks_for_drift:
                token = await self.mode.worker.do(self.mode.fingerprint)
            kernel = await self._read()
            found_at = self._wall()
            with self._timed("diff"):
                size = len(kernel) + ledger.objects + len(ledger.unwritten)
                change, parts = Diff(), None
                if not kernel and self.mode.fill is not None:
                    parts = await self.mode.worker.compute(lambda: ledger.parts(_PARTS_FROM), size)
                if parts is None:
                    change = await self.mode.worker.compute(
                        lambda: diff(kernel, ledger.effective()), size
                    )
            writers: tuple[Writer, ...] = ()
            if self.mode.writers is not None:
                writers = (await self.mode.worker.do(self.mode.writers.take))[-_WRITERS:]
            # A fingerprint stays valid if nothing is written, or if own writes do not change it.
            if isinstance(token, ByOthers) or not (parts or change):
                self._token = token
            try:
                accepts = not (parts or change) or await self._accepts(
                    parts or (change,), partial=False
                )
            finally:
                # Clients wait for the repair, so what others did is noted behind it.
                if looks_for_drift and (parts or change):
                    repair = None if parts else change
                    found = await self._changed_by_others(repair, writers, found_at)
                    self.drift = found or self.drift
            if accepts:
                accepted = ledger.owners - ledger.rejected.keys()
                await self.mode.worker.compute(lambda: ledger.accept(accepted), len(accepted))
                done = [change, *await self._bisector.retry_rejected()]
            else:
                done = await self._bisector.write_all()
            ledger.mark_compared()
            knowledge.unread = ledger.release_adopted()
        return Written(added=ledger.objects) if parts and accepts else Written.by(*done)

    async def _changed_by_others(
        self, change: Diff | None, writers: tuple[Writer, ...], found_at: float
    ) -> Drift | None:
        """Describe the changes by other programs that a repair undoes; None if there are none.

        Args:
            change: the repair, which may have more than that; None if they have removed everything.
            found_at: in seconds since 1970.
        """
        ledger, words = self._ledger, self.mode.words
        if change is None:
            some = Diff(dict(islice(ledger.in_force(), _EXAMPLES)))
            drift = drift_of(some, words.describe, _EXAMPLES, found_at, writers)
            return drift and msgspec.structs.replace(drift, missing=ledger.objects)
        # Part of the Diff repairs what others changed: the rest was owed.
        have = await self.mode.worker.compute(lambda: dict(ledger.in_force()), ledger.objects)
        repair = by_others(change, have, words.changed_by_others)
        return drift_of(repair, words.describe, _EXAMPLES, found_at, writers)

    async def _accepts(self, parts: Iterable[Diff], *, partial: bool) -> bool:
        """Apply a whole batch; return whether the kernel accepted it.

        Args:
            parts: the Diff in a tuple, or those that fill an empty kernel.
            partial: the batch holds only changes, not the difference to the whole kernel.
        """
        try:
            with self._kernel.writing():
                if isinstance(parts, tuple) or self.mode.fill is None:
                    for part in parts:
                        await self._apply(part)
                else:
                    with self._timed("apply"):
                        await self.mode.worker.do(self.mode.fill, parts)
        except ApplyError:
            self._refused_batches = self._refused_batches.plus(partial)
            return False
        return True

    async def _apply(self, change: Diff) -> None:
        with self._timed("apply"):
            if change:
                await self.mode.worker.do(self.mode.apply, change)

    async def _read(self) -> Ruleset:
        with self._timed("read"):
            return await self.mode.worker.do(self.mode.read)

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._phases[phase] = self._phases.get(phase, 0.0) + time.monotonic() - start

    # Report

    def _publish(self, result: SyncResult, written: Written, compared: bool) -> SyncReport:
        """Replace the State, unless nothing differs from before."""
        # 1. What is in force: from here on all observers may look at it.
        planned = self._unplanned.at
        owners, published = self._unpublished.changed()
        changes, _ = self._unreported.changed(until=planned)
        self.in_force.update(
            self, self.planner.services, owners, (changes, planned), self.not_in_force()
        )
        self._unpublished.move(published)
        self._unreported.move(planned)
        # 2. What is wrong: with objects, and with owners that have not what they want.
        before, plan, rejected = self.state, self.planner.plan, self._ledger.rejected
        findings, unlisted = (*self.store.findings, *plan.findings), plan.unlisted
        refusals: tuple[tuple[str, str], ...] = ()
        if rejected or self.broken:
            unwritten = unwritten_findings(self.mode.name, rejected, self.broken)
            findings += unwritten.listed
            unlisted = Counter(unlisted) + Counter(unwritten.unlisted)
            failed = islice(chain(rejected.items(), self.broken.items()), 3)
            refusals = tuple((str(owner), text) for owner, text in failed)
        # 3. The State. If nothing differs, it stays, and only the changes are reported as synced.
        has_changed = written or compared or owners or plan.settings != before.plan.settings
        if differs := bool(has_changed or not before.result or findings != before.findings):
            self.state = State(
                revision=result.revision,
                mode=self.mode.name,
                snapshot=self.store.snapshot,
                plan=NodePlan(plan.settings, self.in_force.plans, plan.findings, plan.unlisted),
                result=result,
                findings=findings,
                unlisted=unlisted,
                objects=self._ledger.objects,
                slices=self.store.slices,
                at=self._wall(),
            )
        # 4. The report takes what has come together since the last one.
        refused_batches, self._refused_batches = self._refused_batches, RefusedBatches()
        drift, self.drift = self.drift, None
        if drift is not None:
            drift = msgspec.structs.replace(drift, repaired_at=self._wall())
        return SyncReport(
            self.state,
            result if differs else None,
            self.store.take_arrivals(planned),
            written,
            compared,
            refused_batches,
            drift,
            refusals,
            self._seen,
        )
