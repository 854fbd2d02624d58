"""From changed objects to the kernel: plan, render, diff, apply. The only owner of have and want.

    Store --take--> changed --plan--> unrendered --render--> ledger (dirty) --write--> kernel

All changes owed to the kernel are one account (ledger.py): a run may fail or be cancelled at any
await, and the next run goes on from there. The Ruleset is kept per owner (ledger.py: a ServicePort
in one family, or the node), so a sync costs what changed. A batch that the kernel refuses is
bisected (bisector.py): the rejected owner keeps the objects it had and gets a Finding, everything
else goes in. Writing takes one of two ways:

    changes     the kernel is as the ledger says: write the Diff of the dirty owners, read nothing
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
from typing import Any, TypeVar

import msgspec

from steersman.compile.planner import PlanChange, Planner
from steersman.host.process import to_thread_to_end
from steersman.model.drift import Drift, Writer, by_others
from steersman.model.errors import ApplyError
from steersman.model.findings import clipped, printable
from steersman.model.inputs import HostFacts
from steersman.model.names import PlanKey
from steersman.model.plan import NodePlan, ServicePlan
from steersman.model.ruleset import Diff, Ruleset, diff
from steersman.modes.base import ByOthers, Mode
from steersman.run.sync.bisector import Bisector
from steersman.run.sync.ledger import ADOPTED, ObjectLedger, Owed, Owner
from steersman.run.sync.parts import Renderer, Usage
from steersman.run.sync.state import (
    RefusedBatches,
    State,
    SyncReport,
    SyncResult,
    Written,
    unwritten_findings,
)
from steersman.source.store import Store

T = TypeVar("T")

log = logging.getLogger(__name__)

_EXAMPLES, _EXAMPLE_LENGTH, _WRITERS = 5, 160, 8
"""Lines of its repair that a Drift keeps, their characters, and the number of programs."""
_PARTS_FROM = 5000
"""Objects from which an empty kernel is filled in parts: a part takes about ten milliseconds."""
_FILL_FROM = 1000
"""ServicePorts from which an empty kernel is filled while they are rendered, where that helps."""
_INLINE = 500
"""Objects or owners up to which a computation on them is not worth a thread."""


class Sync:
    """The body of the sync loop. `state` is replaced after each run; nothing else is shared."""

    def __init__(
        self,
        store: Store,
        planner: Planner,
        mode: Mode,
        facts: HostFacts,
        *,
        revision: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Create the loop body; nothing is read or written before `run`.

        Args:
            store: the cluster's objects.
            planner: makes the plans.
            mode: renders them, and writes to the kernel.
            facts: this machine.
            revision: number of the last sync, if another mode served before.
            clock: monotonic seconds.
            wall: seconds since 1970.
        """
        self.store = store
        self.planner = planner
        self.mode = mode
        self.state = State(revision, mode.name)
        self._facts = facts
        self._next: Planner | None = None
        """Replaces `planner` at the next run."""
        self._owed = Owed()
        self._ledger = ObjectLedger()
        self._bisector = Bisector(self._apply, self._read, self._ledger)
        self._renderer = Renderer(self._owed, self._ledger)
        self._seen: tuple[Hashable | None, Ruleset] | None = None
        """The fingerprint and the objects of the kernel, if they were read before rendering."""
        self._published: dict[PlanKey, ServicePlan] = {}
        """The plans that are in force: those of the last sync that reached the kernel."""
        self._clock = clock
        self._wall = wall
        self._token: Hashable | None = None
        """The kernel's fingerprint when it was last known to equal the ledger."""
        self.usage = Usage()
        """Decides what comes first if everything has to be written again."""
        self._phases: dict[str, float] = {}
        self._refused_batches = RefusedBatches()
        self._running = asyncio.Lock()
        self.drift: Drift | None = None
        """Changes by other programs that were found and are not repaired yet."""

    @property
    def broken(self) -> Mapping[Owner, str]:
        """The error of each owner whose objects could not be rendered."""
        return self._renderer.broken

    def use_planner(self, planner: Planner) -> None:
        """Plan and render everything with another configuration at the next run."""
        planner.inherit_holders(self.newest_planner)
        self._next = planner

    @property
    def newest_planner(self) -> Planner:
        """The Planner of the next run."""
        return self._next or self.planner

    @property
    def facts(self) -> HostFacts:
        """This machine, as of the last `use_facts`."""
        return self._facts

    def use_facts(self, facts: HostFacts) -> bool:
        """Use new facts of this machine; return whether they differ (then a run is due)."""
        changed = facts != self._facts
        self._facts = facts
        self._owed.replan |= changed
        return changed

    @property
    def owes(self) -> bool:
        """Whether another run is due: something changed during the last one."""
        return self._next is not None or not self._owed.nothing

    def suspect(self) -> None:
        """Compare the kernel with the ledger at the next run, and repair it.

        Costs one fingerprint if nothing touched the kernel since the last comparison.
        """
        self._owed.suspected = True

    def distrust(self) -> None:
        """Read the whole kernel at the next run, whatever its fingerprint says."""
        self.suspect()
        self._owed.unread = True

    @property
    def failed(self) -> bool:
        """Whether the last run failed."""
        return self._owed.failed

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
        owed = self._owed
        reason = "changes"
        if self.state.result is None:
            reason = "start"
        elif owed.failed:
            reason = "retry"
        elif owed.suspected:
            reason = "drift"
        self._phases, self._seen, drift = {}, None, self.drift
        try:
            async with self._running:
                owed.take(self.store.take())
                await self._plan()
                filled = await self._fill()
                await self._render()
                compared, written = (True, filled) if filled else await self._write()
        except BaseException:
            owed.failed = True
            raise
        dirty = self._renderer.take_count()
        result = SyncResult(
            revision=self.state.revision + 1,
            # On a busy node changes come along with each comparison: they are no drift.
            reason="changes" if reason == "drift" and dirty and self.drift is drift else reason,
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
            await _in_thread(self._ledger.pack, self._ledger.unpacked)

    @contextlib.asynccontextmanager
    async def between_runs(self) -> AsyncIterator[Iterable[tuple[Any, Any]] | None]:
        """Let no run begin meanwhile; gives the objects that are in force now.

        They are copied while they are iterated, which may be done later, and in a thread. None if
        they are not known: no run has reached the kernel yet, or the last one failed.
        """
        async with self._running:
            known = self.state.result is not None and not self._owed.unread
            yield self._ledger.in_force() if known else None

    async def rehearse(self) -> Diff:
        """Return what a sync would write, and write nothing.

        It takes no changes out of the Store: another Sync needs them.
        """
        await self._plan()
        await self._render()
        return await asyncio.to_thread(diff, await self._read(), self._ledger.wanted())

    def objects(self) -> Iterator[tuple[Any, Any]]:
        """Yield every kernel object that is in force, as far as known."""
        return self._ledger.in_force()

    # Plan and render, a few milliseconds at a time

    async def _plan(self) -> None:
        owed, planner = self._owed, self.newest_planner
        if owed.suspected:
            owed.retry_unplanned()
        if not (owed.changed or owed.replan or self._next):
            return
        with self._timed("plan"):
            owed.replan = False  # a request from here on is for the next run
            steps = planner.steps(self.store.snapshot, self._facts, owed.changed.copy())
            try:
                while True:
                    next(steps)
                    await asyncio.sleep(0)
            except StopIteration as end:
                change: PlanChange = end.value
            except BaseException:  # it stopped half-way: a fresh Planner plans everything
                if self._next in (None, planner):
                    self._next = planner.fresh()
                raise
            if planner is not self.planner:
                # Go on with the new Planner. It does not know plans that only the last one made:
                # any trace of them is a plan to remove.
                known = (self._ledger.owners, self._published, owed.unrendered, owed.unreported)
                gone = frozenset(
                    key
                    for keys in known
                    for key in keys
                    if isinstance(key, PlanKey) and key not in planner.services
                )
                self.planner = planner
                if self._next is planner:
                    self._next = None
                change = msgspec.structs.replace(change, removed=change.removed | gone)
            owed.planned(change)
            if change.settings_changed:
                owed.unrendered.update(planner.services)

    async def _render(self) -> None:
        owed = self._owed
        if owed.suspected:
            self._renderer.retry(self.planner.services)
        if owed.node or owed.unrendered:
            with self._timed("render"):
                await self._renderer.render(self.mode, self.planner.settings)

    # Write

    async def _fill(self) -> Written | None:
        """Write the first rules while they are rendered, if the kernel has none of a Service.

        Returns:
            What was written; None if everything is left to `_render` and `_write`.
        """
        owed, ledger, mode = self._owed, self._ledger, self.mode
        if len(owed.unrendered) < _FILL_FROM or not mode.fills or ledger.owners:
            return None
        owed.suspected = False  # everything is read, until a sync succeeds
        token, kernel = self._seen = await mode.fingerprint(), await self._read()
        mode.take_writers()
        try:
            with owed.writing(), self._timed("apply"):
                async with contextlib.aclosing(
                    self._renderer.parts(mode, self.planner.settings)
                ) as parts:
                    nodes = await anext(parts)
                    if not kernel.keys() <= nodes.keys():
                        return None
                    await mode.fill(diff(kernel, nodes), parts)
        except ApplyError:
            self._refused_batches = self._refused_batches.plus(partial=False)
            self._seen = None
            return None
        self._token = token if isinstance(token, ByOthers) else None
        await _in_thread(lambda: ledger.accept(ledger.owners), len(ledger.owners))
        ledger.mark_compared()
        owed.unread = False
        return Written.by(diff(kernel, ledger.wanted()))

    async def _write(self) -> tuple[bool, Written]:
        """Write the changes of the ledger, or compare everything.

        Returns:
            Whether the whole kernel was compared, and what was written.
        """
        owed, ledger = self._owed, self._ledger
        # Somebody may have touched the kernel: if its fingerprint differs, read all of it. Rejected
        # owners are retried by a comparison only, as their reason may lie outside their objects.
        looks_for_drift = False
        if owed.suspected and not owed.unread:
            with owed.comparing():
                token = await self.mode.fingerprint()
                owed.unread = token is None or token != self._token or bool(ledger.rejected)
                looks_for_drift = owed.unread
        # The kernel is as the ledger says: write only the changes. Two owners may claim one object
        # (then there is no Diff), or the kernel may refuse the batch: both need a comparison.
        if not owed.unread:
            change = await _in_thread(ledger.changes, ledger.outstanding)
            if change is not None and (not change or await self._accepts((change,), partial=True)):
                await _in_thread(ledger.mark_written, ledger.outstanding)
                return False, Written.by(change)
        return True, await self._write_everything(looks_for_drift)

    async def _write_everything(self, looks_for_drift: bool) -> Written:
        """Read the kernel, and write the difference to the ledger.

        Args:
            looks_for_drift: whether the kernel was as the ledger says, so that all other
                differences come from other programs.
        """
        owed, ledger = self._owed, self._ledger
        with contextlib.nullcontext() if self._seen else owed.comparing():
            owed.unread = True
            token, kernel = self._seen or (await self.mode.fingerprint(), await self._read())
            self._seen = None  # a kernel full of rules is large
            with self._timed("diff"):
                size = len(kernel) + ledger.objects + ledger.outstanding
                change, parts = Diff(), None
                if not kernel and self.mode.writes_in_parts:
                    busiest = self.usage.busiest()
                    parts = await _in_thread(lambda: ledger.parts(busiest, _PARTS_FROM), size)
                if parts is None or looks_for_drift:
                    change = await _in_thread(lambda: diff(kernel, ledger.effective()), size)
            writers = self.mode.take_writers()
            # A fingerprint stays valid if nothing is written, or if own writes do not change it.
            if isinstance(token, ByOthers) or not (parts or change):
                self._token = token
            try:
                accepts = not (parts or change) or await self._accepts(
                    parts or (change,), partial=False
                )
            finally:
                if looks_for_drift and change:
                    # Note which part of the Diff repairs what others changed: the rest was owed.
                    # It takes as long as a part of the repair, so clients need not wait for it.
                    have = await _in_thread(lambda: dict(ledger.in_force()), ledger.objects)
                    repair = by_others(change, have, self.mode.changed_by_others)
                    self.drift = self.drift_of(repair, writers[-_WRITERS:], _EXAMPLES) or self.drift
            if accepts:
                accepted = ledger.owners - ledger.rejected.keys()
                await _in_thread(lambda: ledger.accept(accepted), len(accepted))
                done = [change, *await self._bisector.retry_rejected()]
            else:
                done = await self._bisector.write_all()
            # Adopted objects that no owner needs any more are removed by another comparison.
            ledger.mark_compared()
            owed.unread = ledger.release_adopted()
        return Written(added=ledger.objects) if parts and accepts else Written.by(*done)

    def drift_of(self, repair: Diff, writers: tuple[Writer, ...], most: int) -> Drift | None:
        """Describe the repair of what other programs changed; None if it is empty.

        Args:
            repair: as `by_others` returns it.
            writers: these programs.
            most: lines of the repair that the Drift keeps.
        """
        if not repair:
            return None
        some = Diff(*({k: part[k] for k in islice(part, most)} for part in repair.parts))
        lines = self.mode.describe(some).splitlines()[:most]
        return Drift(
            self._wall(),
            missing=len(repair.added),
            foreign=len(repair.removed),
            changed=len(repair.changed),
            examples=tuple(clipped(printable(line), _EXAMPLE_LENGTH) for line in lines),
            writers=writers,
        )

    async def _accepts(self, parts: Iterable[Diff], *, partial: bool) -> bool:
        """Apply a whole batch; return whether the kernel accepted it.

        Args:
            parts: the Diff in a tuple, or those that fill an empty kernel.
            partial: the batch holds only changes, not the difference to the whole kernel.
        """
        try:
            with self._owed.writing():
                if isinstance(parts, tuple):
                    await self._apply(*parts)
                else:
                    with self._timed("apply"):
                        await self.mode.apply_parts(parts)
        except ApplyError:
            self._refused_batches = self._refused_batches.plus(partial)
            return False
        return True

    async def _apply(self, change: Diff) -> None:
        with self._timed("apply"):
            if change:
                await self.mode.apply(change)

    async def _read(self) -> Ruleset:
        with self._timed("read"):
            return await self.mode.read()

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self._phases[phase] = self._phases.get(phase, 0.0) + self._clock() - start

    # Report

    def _publish(self, result: SyncResult, written: Written, compared: bool) -> SyncReport:
        """Replace the State, unless nothing differs from before."""
        changes, plans = self._owed.take_report()
        refused, self._refused_batches = self._refused_batches, RefusedBatches()
        for key in plans.removed:
            self._published.pop(key, None)
        self._published.update(plans.changed)
        plan = self.planner.plan
        drift, self.drift = self.drift, None
        if drift is not None:
            drift = msgspec.structs.replace(drift, repaired_at=self._wall())
        before, unwritten = (
            self.state,
            unwritten_findings(self.mode.name, self._ledger.rejected, self.broken),
        )
        findings = (*self.store.findings, *plan.findings, *unwritten.listed)
        # If nothing differs from before: keep the State, but report the changes as synced.
        news = bool(written or compared or plans.changed or plans.removed)
        failed = islice(chain(self._ledger.rejected.items(), self.broken.items()), 3)
        why = tuple((str(owner), text) for owner, text in failed)
        report = SyncReport(before, None, changes, plans, written, compared, refused, drift, why)
        same = (plan.settings, findings) == (before.plan.settings, before.findings)
        if before.result and same and not news:
            return report
        self.state = State(
            revision=result.revision,
            mode=self.mode.name,
            snapshot=self.store.snapshot,
            plan=NodePlan(plan.settings, self._published, plan.findings, plan.unlisted),
            result=result,
            findings=findings,
            unlisted=Counter(plan.unlisted) + Counter(unwritten.unlisted),
            objects=self._ledger.objects,
            slices=self.store.slices,
            at=self._wall(),
        )
        return msgspec.structs.replace(report, state=self.state, result=result)


async def _in_thread(work: Callable[[], T], size: int) -> T:
    """Run a pure computation on many objects in a thread, on few at once.

    It has always ended when this returns or raises: no other task may touch the ledger before.
    """
    return work() if size <= _INLINE else await to_thread_to_end(work)
