"""From what changed to what the kernel has: plan, render, diff, apply; the only owner of have/want.

The Ruleset is kept per owner (a ServicePort in one family, or the node), so that a sync costs what
changed. A batch that the kernel refuses is halved until the culprit stands alone: it keeps what it
had, gets a Finding, and everybody else goes in.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from steersman.compile.plan import PlanChange, Planner
from steersman.model.names import PlanKey
from steersman.model.plan import Finding, Severity
from steersman.model.snapshot import HostFacts
from steersman.modes.base import ApplyError, Mode
from steersman.modes.diff import Diff, Ruleset, diff, merge
from steersman.run.state import State, Synced, SyncResult
from steersman.source.store import Changes, Store

Owner: TypeAlias = PlanKey | str
"""Who a kernel object belongs to: a ServicePort, NODE, or STALE (nobody any more)."""

NODE = "the node"
STALE = "leftovers"


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
        self._clock = clock
        self._wall = wall
        self._on_synced = on_synced
        self._on_refused = on_refused
        self._want: dict[Owner, Ruleset] = {}
        self._have: dict[Owner, Ruleset] = {}
        self._objects = 0
        self._dirty: set[Owner] = set()
        self._verified = False
        self._token: Hashable | None = None
        self._refused: dict[Owner, str] = {}
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
            refused=len(self._refused),
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
        if token is not None and token == self._token and not self._refused:
            return None
        self._verified = False
        return await self.run("drift")

    async def preview(self) -> Diff:
        """Return what a sync would do, and do nothing (`--dry-run`)."""
        self._phases = {}
        self._plan_and_render()
        return diff(await self._read(), _flat(self._want.values()))

    def objects(self) -> Iterator[tuple[Any, Any]]:
        """Every kernel object that is in force, as far as known."""
        for part in tuple(self._have.values()):
            yield from part.items()

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
            for owner in tuple(self._want):
                self._put(owner, {})
        if change.settings_changed or self._want_all_anew:
            self._want_all_anew = False
            plans = dict(self.planner.plan.services)
            self._put(NODE, self.mode.render_node(settings))
        for key in change.removed:
            self._put(key, {})
        for key, plan in plans.items():
            self._put(key, self.mode.render_service(plan, settings))
        return len(plans)

    def _put(self, owner: Owner, ruleset: Ruleset) -> None:
        self._dirty.add(owner)
        self._refused.pop(owner, None)
        if ruleset:
            self._want[owner] = ruleset
        else:
            self._want.pop(owner, None)

    # Apply

    async def _apply_dirty(self) -> Diff:
        with self._timed("diff"):
            change = self._merged()
        if change is None or (change and not await self._try(change)):
            return await self._reconcile()
        self._accept(self._dirty)
        self._dirty.clear()
        return change

    def _merged(self) -> Diff | None:
        """The Diffs of what is dirty as one; None where an object changes hands between owners."""
        parts = (diff(self._have.get(o, {}), self._want.get(o, {})) for o in self._dirty)
        try:
            return merge(parts)
        except ValueError:
            return None

    async def _reconcile(self) -> Diff:
        """Read the kernel and bring it to what is wanted, whatever it has."""
        token = await self.mode.fingerprint()
        kernel = await self._read()
        with self._timed("diff"):
            change = diff(kernel, _flat(map(self._effective, self._refused_first())))
        if not change:
            self._token = token
        if not change or await self._try(change):
            self._accept(self._owners() - self._refused.keys())
            for owner in list(self._refused):
                await self._settle([owner])
        else:
            change = await self._halve()
        self._dirty.clear()
        self._verified = True
        return change

    def _owners(self) -> set[Owner]:
        return self._want.keys() | self._have.keys()

    def _refused_first(self) -> list[Owner]:
        """All owners, so that an object is whose version is good: of a refused one it was."""
        return sorted(self._owners(), key=lambda owner: owner not in self._refused)

    def _effective(self, owner: Owner) -> Ruleset:
        """What an owner should have now: the last good version where the new one is refused."""
        return (self._have if owner in self._refused else self._want).get(owner, {})

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
        owners = [key for key in self._owners() if key != NODE]
        written = Diff(added={}, removed={}, changed={})
        for part in ([NODE], owners, [STALE]):
            for change in await self._settle(part):
                written.added.update(change.added)
                written.removed.update(change.removed)
                written.changed.update(change.changed)
        return written

    async def _settle(self, owners: Sequence[Owner]) -> list[Diff]:
        """Apply the part of some owners; where it is refused, halve it down to the culprits."""
        if not owners:
            return []
        kernel = await self._read()
        change = self._part(kernel, owners)
        try:
            with self._timed("apply"):
                if change:
                    await self.mode.apply(change)
        except ApplyError as error:
            if len(owners) == 1:
                self._refused[owners[0]] = str(error)
                self._adopt(owners[0], kernel)
                return []
            middle = len(owners) // 2
            return await self._settle(owners[:middle]) + await self._settle(owners[middle:])
        self._accept(owners)
        return [change]

    def _adopt(self, owner: Owner, kernel: Ruleset) -> None:
        """Note what an earlier process made of an owner whose part is refused: it stays."""
        if owner in self._have or owner not in self._want:
            return
        others = _keys(map(self._effective, self._owners() - {owner}))
        wanted = self._want[owner].keys() - others
        if found := {key: kernel[key] for key in wanted if key in kernel}:
            self._have[owner] = found
            self._objects += len(found)

    def _part(self, kernel: Ruleset, owners: Sequence[Owner]) -> Diff:
        if owners[0] == STALE:
            claimed = _keys(map(self._effective, self._owners()))
            return Diff(removed={k: v for k, v in kernel.items() if k not in claimed})
        want = _flat(self._want.get(owner, {}) for owner in owners)
        taken = _keys(map(self._effective, self._owners().difference(owners)))
        keys = set(want) | (_keys(self._have.get(owner, {}) for owner in owners) - taken)
        return diff({key: kernel[key] for key in keys if key in kernel}, want)

    def _accept(self, owners: Iterable[Owner]) -> None:
        for owner in owners:
            self._refused.pop(owner, None)
            self._objects -= len(self._have.get(owner, ()))
            if owner in self._want:
                self._have[owner] = self._want[owner]
                self._objects += len(self._want[owner])
            else:
                self._have.pop(owner, None)
            for loser in self._refused:  # what it had may have another owner now
                self._lose(loser, self._want.get(owner, {}))

    def _lose(self, owner: Owner, taken: Ruleset) -> None:
        had = self._have.get(owner, {})
        if lost := taken.keys() & had.keys():
            self._have[owner] = {k: v for k, v in had.items() if k not in lost}
            self._objects -= len(lost)

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
            _refusal(owner, why, self.mode.name) for owner, why in self._refused.items()
        )
        self.state = State(
            revision=result.revision,
            mode=self.mode.name,
            snapshot=self.store.snapshot,
            plan=plan,
            result=result,
            findings=self.store.findings + plan.findings + refused,
            objects=self._objects,
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


def _flat(parts: Iterable[Ruleset]) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for part in parts:
        out.update(part)
    return out


def _keys(parts: Iterable[Mapping[Any, Any]]) -> set[Any]:
    return {key for part in parts for key in part}
