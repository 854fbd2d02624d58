"""From what changed to what the kernel has: plan, render, diff, apply; the only owner of have/want.

The Ruleset is kept per owner (a ServicePort in one family, or the node: holdings.py), so that a
sync costs what changed. A batch that the kernel refuses is halved until the culprit stands alone:
it keeps what it had, gets a Finding, and everybody else goes in.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import msgspec

from steersman.compile.plan import PlanChange, Planner
from steersman.model.names import PlanKey
from steersman.model.plan import Finding, Severity
from steersman.model.snapshot import HostFacts
from steersman.modes.base import ApplyError, Mode
from steersman.modes.diff import Diff, Ruleset, diff
from steersman.run.holdings import NODE, STALE, Holdings, Owner
from steersman.run.state import State, Synced, SyncResult
from steersman.source.store import Changes, Store

_IN_VAIN = 16
"""Culprits in a row after which what is left is refused as one: the reason is hardly theirs. Each
costs a look at the whole kernel, and all are tried again at the next comparison."""


class Sync:
    """The have/want loop body. `State` is replaced after each run; nothing else is shared."""

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
        """Make the loop body; nothing is read or written before `run`."""
        self.store = store
        self.planner = planner
        self.mode = mode
        self.state = State(mode=mode.name)
        self._facts = facts
        self._facts_changed = True
        self._want_all_anew = True
        self._held = Holdings()
        self._clock = clock
        self._wall = wall
        self._on_synced = on_synced
        self._on_refused = on_refused
        self._verified = False
        self._token: Hashable | None = None
        self._left: set[PlanKey] = set()
        """Plans that earlier Planners made: what is gone of them, nobody else says."""
        self._phases: dict[str, float] = {}
        self._taken: list[Changes] = []
        self._planned: list[PlanChange] = []

    def use_planner(self, planner: Planner) -> None:
        """Plan everything anew with another configuration at the next sync."""
        self._left |= self.planner.plan.services.keys()
        self.planner = planner
        self._facts_changed = True
        self._want_all_anew = True

    @property
    def facts(self) -> HostFacts:
        """This machine as last told."""
        return self._facts

    def use_facts(self, facts: HostFacts) -> bool:
        """Take new facts of this machine; return whether they differ (then a sync is due)."""
        changed = facts != self._facts
        self._facts = facts
        self._facts_changed |= changed
        return changed

    async def run(self, reason: str = "changes") -> SyncResult | None:
        """Bring the kernel up to date; None while the initial lists are not in (SPEC 2).

        Raises:
            BusyError: the kernel could not be programmed now; nothing is lost, run again.
        """
        if not self.store.synced:
            return None
        self._phases = {}
        dirty = self._plan_and_render()
        whole = not self._verified
        change = await self._reconcile() if not self._verified else await self._apply_dirty()
        result = SyncResult(
            revision=self.state.revision + 1,
            reason=reason if self.state.result else "start",
            dirty=dirty,
            added=len(change.added),
            removed=len(change.removed),
            changed=len(change.changed),
            phases=self._phases,
            refused=len(self._held.refused),
        )
        self._publish(result, change, whole)
        return result

    async def check(self) -> SyncResult | None:
        """Compare the kernel with what it should have and repair it (rules flushed by others).

        Costs one fingerprint where nobody touched the kernel since the last look.
        """
        if not self.state.result:
            return None
        token = await self.mode.fingerprint()
        if token is not None and token == self._token and not self._held.refused:
            return None
        self._verified = False
        return await self.run("drift")

    async def preview(self) -> Diff:
        """Return what a sync would do, and do nothing (`--dry-run`)."""
        self._phases = {}
        self._plan_and_render()
        return diff(await self._read(), self._held.wanted())

    def objects(self) -> Iterator[tuple[Any, Any]]:
        """Every kernel object that is in force, as far as known."""
        return self._held.in_force()

    # Plan and render

    def _plan_and_render(self) -> int:
        with self._timed("plan"):
            changes = self.store.take()
            self._taken.append(changes)
            everything = changes.node or self._facts_changed
            change = self.planner.update(
                self.store.snapshot, self._facts, set(changes.services), everything
            )
            self._facts_changed = False
            change = self._with_left(change)
            self._planned.append(change)
        with self._timed("render"):
            return self._render(change)

    def _with_left(self, change: PlanChange) -> PlanChange:
        services = self.planner.plan.services
        gone = frozenset(key for key in self._left if key not in services)  # mostly of none
        self._left = set()
        return msgspec.structs.replace(change, removed=change.removed | gone) if gone else change

    def _render(self, change: PlanChange) -> int:
        settings = self.planner.plan.settings
        plans = change.changed
        if self._want_all_anew:
            self._held.clear()
        if change.settings_changed or self._want_all_anew:
            self._want_all_anew = False
            plans = dict(self.planner.plan.services)
            self._held.put(NODE, self.mode.render_node(settings))
        for key in change.removed:
            self._held.put(key, {})
        for key, plan in plans.items():
            self._held.put(key, self.mode.render_service(plan, settings))
        return len(plans)

    # Apply

    async def _apply_dirty(self) -> Diff:
        with self._timed("diff"):
            change = self._held.changes()
        if change is None or (change and not await self._try(change)):
            return await self._reconcile()
        self._held.written()
        return change

    async def _reconcile(self) -> Diff:
        """Read the kernel and bring it to what is wanted, whatever it has."""
        token = await self.mode.fingerprint()
        kernel = await self._read()
        with self._timed("diff"):
            change = diff(kernel, self._held.effective())
        if not change:
            self._token = token
        if not change or await self._try(change):
            self._held.accept(self._held.owners - self._held.refused.keys())
            await self._settle([*self._held.refused.keys() - {STALE}])
            await self._settle([*self._held.refused.keys() & {STALE}])
        else:
            change = await self._halve()
        self._held.compared()
        self._verified = True
        return change

    async def _try(self, change: Diff) -> bool:
        with self._timed("apply"):
            try:
                await self.mode.apply(change)
            except ApplyError:
                self._on_refused(self._verified)
                self._verified = False
                return False
            except Exception:  # how far it came is not known: SPEC 7 has all compared then
                self._verified = False
                raise
        return True

    async def _halve(self) -> Diff:
        """Apply what can be applied; return that."""
        written = Diff(added={}, removed={}, changed={})
        parts: tuple[list[Owner], ...] = ([NODE], [*self._held.owners - {NODE}], [STALE])
        for part in parts:
            for change in await self._settle(part):
                written.added.update(change.added)
                written.removed.update(change.removed)
                written.changed.update(change.changed)
        return written

    async def _settle(self, owners: list[Owner]) -> list[Diff]:
        """Apply the part of some owners; where it is refused, halve it down to the culprits."""
        random.shuffle(owners)  # who is refused along with others comes earlier another time
        parts, written, in_vain = [owners] if owners else [], [], 0
        while parts:
            part = parts.pop()
            kernel = await self._read()
            change = self._held.part(kernel, part)
            error = await self._refusal(change)
            if error is None:
                self._held.accept(part)
                written.append(change)
                in_vain = 0 if change else in_vain
            elif len(part) == 1 or in_vain >= _IN_VAIN:
                others = f"; with {len(part) - 1} others, not tried alone" if part[1:] else ""
                self._held.refuse(part, f"{error}{others}", kernel)
                in_vain += 1
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

    def _publish(self, result: SyncResult, written: Diff, whole: bool) -> None:
        plan = self.planner.plan
        refused = tuple(
            _refusal(owner, why, self.mode.name) for owner, why in self._held.refused.items()
        )
        self.state = State(
            revision=result.revision,
            mode=self.mode.name,
            snapshot=self.store.snapshot,
            plan=plan,
            result=result,
            findings=self.store.findings + plan.findings + refused,
            unlisted=plan.unlisted,
            objects=self._held.objects,
            slices=self.store.slices,
            at=self._wall(),
        )
        taken, planned = tuple(self._taken), tuple(self._planned)
        self._taken, self._planned = [], []
        self._on_synced(Synced(self.state, result, taken, planned, written, whole))


def _refusal(owner: Owner, why: str, mode: str) -> Finding:
    name = f"Service {owner.name.object_name}" if isinstance(owner, PlanKey) else owner
    field = f"port {owner}" if isinstance(owner, PlanKey) else ""
    reason = f"{mode}: the kernel refuses its rules ({why}); what it had before stays in force"
    return Finding(name, field, reason, Severity.ERROR)
