"""From what changed to what the kernel has: plan, render, diff, apply; the only owner of have/want.

The Ruleset is kept per owner (a ServicePort in one family, or the node: holdings.py), so that a
sync costs what changed. A batch that the kernel refuses is halved until the culprit stands alone:
it keeps what it had, gets a Finding, and everybody else goes in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import msgspec

from steersman.compile.notes import FindingIndex
from steersman.compile.plan import PlanChange, Planner
from steersman.model.errors import ApplyError
from steersman.model.findings import Finding, Severity
from steersman.model.inputs import HostFacts
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import NodePlan, ServicePlan
from steersman.model.ruleset import Diff, Ruleset, diff
from steersman.modes.base import ByOthers, Mode
from steersman.run.holdings import ADOPTED, NODE, STALE, Holdings, Owner
from steersman.run.owed import Owed
from steersman.run.state import State, Synced, SyncResult
from steersman.source.store import Store

T = TypeVar("T")

log = logging.getLogger(__name__)

_SLICE = 48
"""ServicePorts rendered before others may run, a few milliseconds."""
_INLINE = 500
"""Objects or owners up to which a computation on them is not worth a thread."""
_IN_VAIN = 16
"""Culprits in a row after which what is left of a namespace is refused as one, and namespaces with
culprits in a row after which everything is: the reason is hardly theirs. Each culprit costs a look
at the whole kernel, and all are tried again at the next comparison."""


class Sync:
    """The have/want loop body. `State` is replaced after each run; nothing else is shared.

    What is owed to the kernel is one account (owed.py). `run` may fail or be cancelled at any
    await: the next run goes on from what is owed then.
    """

    def __init__(
        self,
        store: Store,
        planner: Planner,
        mode: Mode,
        facts: HostFacts,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        on_synced: Callable[[Synced], None] = lambda _synced: None,
        on_refused: Callable[[bool], None] = lambda _partial: None,
    ) -> None:
        """Make the loop body; nothing is read or written before `run`.

        Args:
            store: the cluster's objects.
            planner: makes the plans.
            mode: renders them, and writes to the kernel.
            facts: this machine.
            clock: monotonic seconds.
            wall: seconds since 1970.
            on_synced: called with the report of each run.
            on_refused: called if the kernel refuses a batch; True: one of changes only.
        """
        self.store = store
        self.planner = planner
        self.mode = mode
        self.state = State(mode=mode.name)
        self._facts = facts
        self._next: Planner | None = None
        """Takes the place of `planner` at the next run."""
        self._owed = Owed()
        self._held = Holdings()
        self._broken: dict[Owner, str] = {}
        """Why the objects of an owner could not be rendered."""
        self._published: dict[PlanKey, ServicePlan] = {}
        """The plans that are in force: those of the last sync that reached the kernel."""
        self._clock = clock
        self._wall = wall
        self._on_synced = on_synced
        self._on_refused = on_refused
        self._token: Hashable | None = None
        self._phases: dict[str, float] = {}

    def use_planner(self, planner: Planner) -> None:
        """Plan and render everything with another configuration at the next run."""
        planner.succeed(self._next or self.planner)
        self._next = planner

    @property
    def facts(self) -> HostFacts:
        """This machine, as of the last `use_facts`."""
        return self._facts

    def use_facts(self, facts: HostFacts) -> bool:
        """Take new facts of this machine; return whether they differ (then a run is due)."""
        changed = facts != self._facts
        self._facts = facts
        self._owed.replan |= changed
        return changed

    @property
    def owes(self) -> bool:
        """Whether another run is due: something came while the last one was under way."""
        return self._next is not None or not self._owed.nothing

    def suspect(self) -> None:
        """Compare the kernel with what it should have at the next run, and repair it.

        Costs one fingerprint if nobody touched the kernel since the last comparison.
        """
        self._owed.suspected = True

    async def run(self) -> SyncResult | None:
        """Bring the kernel up to date (behaviour 2, 7).

        Returns:
            What was done; None if nothing was to be done, or the initial lists are not in.

        Raises:
            Exception: the kernel could not be programmed (BusyError: just now); everything that
                was owed is owed still, run again.
        """
        if not self.store.synced:
            return None
        owed, reason = self._owed, self._reason()
        self._phases = {}
        try:
            owed.take(self.store.take())
            await self._plan()
            dirty = await self._render()
            whole, change = await self._write()
        except BaseException:
            owed.failed = True
            raise
        result = SyncResult(
            revision=self.state.revision + 1,
            reason=reason,
            dirty=dirty,
            added=len(change.added),
            removed=len(change.removed),
            changed=len(change.changed),
            phases=self._phases,
            refused=len(self._held.refused.keys() - {ADOPTED}) + len(self._broken),
        )
        return self._publish(result, change, whole)

    async def check(self) -> SyncResult | None:
        """Compare the kernel with what it should have, now; see `suspect` and `run`."""
        self.suspect()
        return await self.run()

    def _reason(self) -> str:
        if self.state.result is None:
            return "start"
        if self._owed.failed:
            return "retry"
        return "drift" if self._owed.suspected else "changes"

    async def preview(self) -> Diff:
        """Return what a sync would do, and do nothing (`--dry-run`)."""
        self._owed.take(self.store.take())
        await self._plan()
        await self._render()
        return diff(await self._read(), self._held.wanted())

    def objects(self) -> Iterator[tuple[Any, Any]]:
        """Every kernel object that is in force, as far as known."""
        return self._held.in_force()

    # Plan and render, a few milliseconds at a time

    async def _plan(self) -> None:
        owed, planner = self._owed, self._next or self.planner
        if owed.suspected:
            owed.retry_unplanned()
        if not (owed.changed or owed.replan or self._next):
            return
        with self._timed("plan"):
            owed.replan = False  # what is asked for from here on is for the next run
            steps = planner.steps(self.store.snapshot, self._facts, owed.changed.copy())
            try:
                while True:
                    next(steps)
                    await asyncio.sleep(0)
            except StopIteration as end:
                change: PlanChange = end.value
            except BaseException:  # it stopped half-way: another one plans everything
                if self._next in (None, planner):
                    self._next = planner.fresh()
                raise
            if planner is not self.planner:
                change = self._succeeded(planner, change)
            owed.planned(change)
            if change.settings_changed:
                owed.unrendered.update(planner.services)

    def _succeeded(self, planner: Planner, change: PlanChange) -> PlanChange:
        """Go on with another Planner; it knows nothing of plans that only the last one made."""
        services, owed = planner.services, self._owed
        gone = frozenset(
            key
            for known in (self._held.owners, self._published, owed.unrendered, owed.unreported)
            for key in known
            if isinstance(key, PlanKey) and key not in services
        )
        self.planner = planner
        if self._next is planner:
            self._next = None
        return msgspec.structs.replace(change, removed=change.removed | gone)

    async def _render(self) -> int:
        """Render what is owed; return how many ServicePorts that was."""
        owed, settings = self._owed, self.planner.settings
        if owed.suspected:  # what a defect kept from being rendered is tried again
            owed.node |= NODE in self._broken
            keys = [owner for owner in self._broken if isinstance(owner, PlanKey)]
            owed.unrendered.update({key: self.planner.services.get(key) for key in keys})
        if not (owed.node or owed.unrendered):
            return 0
        dirty, cost = 0, 0
        with self._timed("render"):
            if owed.node:
                self._put(NODE, lambda: self.mode.render_node(settings))
                owed.node = False
            for key in tuple(owed.unrendered):
                plan = owed.unrendered[key]
                if plan is None:
                    self._put(key, dict)
                else:
                    self._put(key, partial(self.mode.render_service, plan, settings))
                    cost += 1 + len(plan.reachable) // 16
                    dirty += 1
                del owed.unrendered[key]
                if cost >= _SLICE:
                    cost = 0
                    await asyncio.sleep(0)
            self._held.give_way(self._broken)
        return dirty

    def _put(self, owner: Owner, render: Callable[[], Ruleset]) -> None:
        try:
            ruleset = render()
        except Exception as error:  # a defect: it must not cost the other Services
            if owner not in self._broken:
                log.exception("cannot render the rules of %s", owner)
            self._broken[owner] = f"{type(error).__name__}: {error}"
        else:
            self._broken.pop(owner, None)
            self._held.put(owner, ruleset)

    # Write

    async def _write(self) -> tuple[bool, Diff]:
        """Write what is owed; return whether everything was compared, and what was written."""
        owed = self._owed
        if owed.suspected and not owed.unread:
            with owed.looking():
                token = await self.mode.fingerprint()
                owed.unread = token is None or token != self._token or bool(self._held.refused)
        if not owed.unread:
            change = await self._in_thread(self._held.changes, self._held.outstanding)
            if change is not None and (not change or await self._try(change, changes_only=True)):
                await self._in_thread(self._held.written, self._held.outstanding)
                return False, change
        return True, await self._reconcile()

    async def _reconcile(self) -> Diff:
        """Read the kernel and bring it to what is wanted, whatever it has."""
        owed, held = self._owed, self._held
        with owed.looking():
            owed.unread = True
            token = await self.mode.fingerprint()
            kernel = await self._read()
            with self._timed("diff"):
                size = len(kernel) + held.objects + held.outstanding
                change = await self._in_thread(lambda: diff(kernel, held.effective()), size)
            if not change or isinstance(token, ByOthers):
                self._token = token
            if not change or await self._try(change, changes_only=False):
                accepted = held.owners - held.refused.keys()
                await self._in_thread(lambda: held.accept(accepted), len(accepted))
                parts = [change, *await self._settle([*held.refused.keys() - {STALE, ADOPTED}])]
                parts += await self._settle([*held.refused.keys() & {STALE}])
            else:
                parts = await self._halve()
            held.compared()
            owed.unread = held.release()
        written = Diff(added={}, removed={}, changed={})
        for part in parts:
            written.added.update(part.added)
            written.removed.update(part.removed)
            written.changed.update(part.changed)
        return written

    async def _in_thread(self, work: Callable[[], T], size: int) -> T:
        """Do something pure with many objects beside the event loop, with few at once.

        It is always done when this returns or raises: nobody else may touch the ledger meanwhile.
        """
        if size <= _INLINE:
            return work()
        thread = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            await asyncio.wait([thread])
            raise

    async def _try(self, change: Diff, *, changes_only: bool) -> bool:
        with self._timed("apply"):
            try:
                with self._owed.writing():
                    await self.mode.apply(change)
            except ApplyError:
                self._on_refused(changes_only)
                return False
        return True

    async def _halve(self) -> list[Diff]:
        """Apply what can be applied; return that."""
        written = await self._settle([NODE])
        written += await self._settle([*self._held.owners - {NODE, ADOPTED}])
        return written + await self._settle([STALE])

    async def _settle(self, owners: list[Owner]) -> list[Diff]:
        """Apply the part of some owners; where it is refused, halve it down to the culprits.

        Owners of a namespace stand together and culprits count by namespace: one tenant whose
        objects are refused must not have others refused along with them.
        """
        random.shuffle(owners)  # who is refused along with others comes earlier another time
        groups: dict[str, list[Owner]] = {}
        for owner in owners:
            groups.setdefault(_namespace(owner), []).append(owner)
        parts, written = [[*chain.from_iterable(groups.values())]] if owners else [], []
        in_vain: Counter[str] = Counter()
        refused: set[str] = set()
        while parts:
            part = parts.pop()
            first, last = _namespace(part[0]), _namespace(part[-1])
            most = _IN_VAIN // max(1, len(refused))  # the more there are, the sooner it is enough
            kernel = await self._read()
            change = self._held.part(kernel, part)
            error = await self._refusal(change)
            if error is None:
                self._held.accept(part)
                written.append(change)
                if change:
                    refused.clear()
                    for namespace in set(map(_namespace, part)):
                        in_vain.pop(namespace, None)
            elif len(part) == 1 or most == 0 or (first == last and in_vain[first] >= most):
                others = f"; with {len(part) - 1} others, not tried alone" if part[1:] else ""
                self._held.refuse(part, f"{error}{others}", kernel)
                in_vain[first] += 1
                refused.add(first)
            else:
                middle = len(part) // 2
                parts += part[middle:], part[:middle]
        return written

    async def _refusal(self, change: Diff) -> ApplyError | None:
        """Apply a Diff; what the kernel says where it refuses."""
        try:
            with self._timed("apply"):
                if change:
                    await self.mode.apply(change)
        except ApplyError as error:
            return error
        return None

    async def _read(self) -> Ruleset:
        with self._timed("read"):
            return await self.mode.read()

    # Report

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self._phases[phase] = self._phases.get(phase, 0.0) + self._clock() - start

    def _publish(self, result: SyncResult, written: Diff, whole: bool) -> SyncResult | None:
        """Replace the State and report; None if nothing differs from before."""
        changes, plans = self._owed.settle()
        for key in plans.removed:
            self._published.pop(key, None)
        self._published.update(plans.changed)
        plan = self.planner.plan
        unwritten = self._unwritten()
        findings = (*self.store.findings, *plan.findings, *unwritten.listed)
        news = bool(written or whole or plans.changed or plans.removed)
        before = self.state
        same = (plan.settings, findings) == (before.plan.settings, before.findings)
        if before.result and same and not news:
            self._on_synced(Synced(self.state, None, (changes,), (plans,), written, whole))
            return None
        self.state = State(
            revision=result.revision,
            mode=self.mode.name,
            snapshot=self.store.snapshot,
            plan=NodePlan(plan.settings, self._published, plan.findings, plan.unlisted),
            result=result,
            findings=findings,
            unlisted=Counter(plan.unlisted) + Counter(unwritten.beyond),
            objects=self._held.objects,
            slices=self.store.slices,
            at=self._wall(),
        )
        self._on_synced(Synced(self.state, result, (changes,), (plans,), written, whole))
        return result

    def _unwritten(self) -> FindingIndex:
        """Return what the kernel refuses and what cannot be rendered, bounded as in plans."""
        mode, by_object = self.mode.name, dict[ObjectName, list[Finding]]()
        for made, owners in ((_refused, self._held.refused), (_broken, self._broken)):
            for owner, why in owners.items():
                no_port = ObjectName("", "")
                name = owner.name.object_name if isinstance(owner, PlanKey) else no_port
                by_object.setdefault(name, []).append(made(owner, why, mode))
        index = FindingIndex()
        for name, findings in by_object.items():
            index.put(name, findings)
        return index


def _refused(owner: Owner, why: str, mode: str) -> Finding:
    if owner == ADOPTED:
        return Finding(ADOPTED, "", f"{mode}: {why}")
    return _finding(owner, f"{mode}: the kernel refuses its rules ({why})")


def _broken(owner: Owner, why: str, mode: str) -> Finding:
    return _finding(owner, f"{mode}: its rules cannot be rendered ({why}), please report this")


def _finding(owner: Owner, reason: str) -> Finding:
    name = f"Service {owner.name.object_name}" if isinstance(owner, PlanKey) else owner
    field = f"port {owner}" if isinstance(owner, PlanKey) else ""
    return Finding(name, field, f"{reason}; what it had before stays in force", Severity.ERROR)


def _namespace(owner: Owner) -> str:
    return owner.name.namespace if isinstance(owner, PlanKey) else ""
