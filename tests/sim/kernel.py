"""The node's kernel: rules by mode, transactions that fail in every way, and other programs.

`SimMode` renders with the real code of a mode and keeps what it renders in a dict. The kernel is
strict: it refuses to remove an absent object and to create one that exists. It watches every
transaction for what must never happen: a Service half-written, or a protected rule taken away.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from steersman.failover.watch import FailureWatch
from steersman.host.exec import Exec, SubprocessExec
from steersman.host.worker import Changes, Pause
from steersman.model.conntrack import Stale
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family, PlanKey
from steersman.model.plan import NodeSettings, ServicePlan, Traits
from steersman.model.ruleset import Diff, Ruleset
from steersman.model.stats import ConnectionStats, NodeTotals, frontend_label
from steersman.modes.base import Mode, Support
from steersman.modes.capabilities import Carrier, ConnectionTable
from steersman.modes.iptables.mode import IptablesMode
from steersman.modes.nftables.mode import NftablesMode, slots_of
from steersman.modes.registry import Factory
from steersman.modes.specs import ModeOptions
from tests.sim.endpoints import Endpoints
from tests.sim.netlink import Flow
from tests.sim.universe import Universe
from tests.support.modes.inline import Inline

T = TypeVar("T")

RENDER_SECONDS = 80e-6
"""What rendering one ServicePort costs, about what was measured."""
_RENDERED = 24
"""Versions of a Service that are remembered as whole."""


@dataclass
class Fault:
    """How some of the next operations fail.

    what: busy, refused, again (no fork), late (done, then a time-out), lost (done, then ENOBUFS),
    partly (one family done, then a time-out), partly_refused, slow.
    """

    operation: str
    what: str
    times: int = 1


def summary(change: Diff) -> str:
    """Return the counts of a Diff in words."""
    return (
        f"{len(change.added)} added, {len(change.changed)} changed, {len(change.removed)} removed"
    )


class Violation(AssertionError):
    """An invariant does not hold."""


class Kernel:
    """Rules by mode, and what was done with them."""

    def __init__(self, universe: Universe, flows: dict[int, Flow]) -> None:
        self.universe = universe
        self.flows = flows
        self.tables: dict[str, dict[Any, Any]] = {}
        self.faults: list[Fault] = []
        self.poison: set[str] = set()
        """Services (`namespace/name`) whose objects are refused."""
        self.generation = 0
        self.strangers = 0
        self.applied: Counter[object] = Counter()
        """Transactions by process."""
        self.vandalized: set[PlanKey | None] = set()
        """Owners whose objects others have changed; None for the node."""
        self.owners: dict[Any, PlanKey] = {}
        self.rendered: dict[PlanKey, deque[Mapping[Any, Any]]] = {}
        self.guard: Callable[[str, Diff], None] = lambda _table, _change: None
        """Looks at every transaction of ours before it is in force."""
        self.counts: Counter[str] = Counter()
        self.unknown: set[str] = set()
        """Services that were refused when the process was restarted: of their old rules it keeps
        only what it wants still, as it cannot tell whose the others are."""
        self.knows_a_part: Callable[[PlanKey], bool] = lambda _owner: False
        """Whether the process keeps only what a ServicePort wants of its old rules for the same
        reason: its first write of a mode was refused."""
        self.failures: list[str] = []
        """Invariants that did not hold, as found within a process."""
        self.carried: dict[str, float] = {}
        """Tables whose rules carry connections, and until when."""
        self._listeners: list[asyncio.Future[None]] = []
        self.deaf = False
        """Notifications of changes by others are lost."""
        self.held_up = 0.0
        """Seconds that the system call under way takes, beside the usual ones."""
        self.endpoints = Endpoints(universe, self.fail)

    def table(self, name: str) -> dict[Any, Any]:
        return self.tables.setdefault(name, {})

    def fail(self, text: str) -> None:
        """Take note of an invariant that does not hold; the next look at all finds it."""
        self.universe.note(f"FAILED: {text}")
        self.failures.append(text)

    # Other programs

    def edit(self, name: str, change: Callable[[dict[Any, Any]], object]) -> None:
        """Have another program change a table of ours."""
        before = dict(self.table(name))
        change(self.table(name))
        after = self.table(name)
        touched = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
        self.vandalized.update(self.owners.get(key) for key in touched)
        self.generation += 1
        self.strangers += 1
        if not self.deaf:
            waiting, self._listeners = self._listeners, []
            for each in waiting:
                if not each.done() and not each.get_loop().is_closed():
                    loop = each.get_loop()
                    self.universe.inside(loop, lambda e=each: e.set_result(None))  # type: ignore[arg-type, misc]

    async def told_of_strangers(self) -> None:
        """Wait for a notification."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listeners.append(waiter)
        await waiter

    # Operations of ours

    def enter(self, operation: str) -> Fault | None:
        """Begin a system call; the fault that it meets, if any; some raise at once."""
        self.counts[operation] += 1
        fault = next((f for f in self.faults if f.operation == operation and f.times > 0), None)
        if fault is None:
            return None
        fault.times -= 1
        self.universe.note(f"kernel: {operation} is {fault.what}")
        match fault.what:
            case "busy":
                raise BusyError("somebody holds the lock")
            case "again":
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            case "refused":
                raise ApplyError("No such file or directory")
            case "slow":
                self.held_up = self.universe.dice.uniform(0.5, 20.0)
        return fault

    def apply(self, name: str, change: Diff) -> None:
        fault = self.enter("apply")
        what = fault.what if fault else ""
        if what.startswith("partly"):
            change = self._half(change)
        self._check(name, change)
        self._write(name, change)
        if what == "partly_refused":
            raise ApplyError("line 12 failed")
        if what in ("late", "partly"):
            raise TimeoutError("the program did not answer in time")
        if what == "lost":
            raise OSError(errno.ENOBUFS, "answers of the kernel were lost")

    def _half(self, change: Diff) -> Diff:
        """The part of one family: modes write the families one after the other."""

        def first(part: dict[Any, Any]) -> dict[Any, Any]:
            ours = {key: self.owners.get(key) for key in part}
            return {k: part[k] for k, o in ours.items() if o and o.family is Family.IPV4}

        return Diff(first(change.added), first(change.removed), first(change.changed))

    def _check(self, name: str, change: Diff) -> None:
        """Refuse what a kernel refuses."""
        table = self.table(name)
        for key in (*change.removed, *change.changed):
            if key not in table:
                raise ApplyError("No such file or directory")
        for key in change.added:
            if key in table:
                raise ApplyError("File exists")
        for key in (*change.added, *change.changed):
            owner = self.owners.get(key)
            if owner is not None and str(owner.name.object_name) in self.poison:
                raise ApplyError(f"Invalid argument: {owner}")

    def _write(self, name: str, change: Diff) -> None:
        self.guard(name, change)
        table = self.table(name)
        for key in change.removed:
            del table[key]
        table.update(change.added)
        table.update((key, new) for key, (_, new) in change.changed.items())
        self.generation += 1
        self.applied[asyncio.get_running_loop()] += 1
        objects = len(change)
        self.counts["written"] += objects
        self.universe.note(f"kernel: {name} {summary(change)}, now {len(table)}")
        touched = {self.owners.get(k) for part in _parts(change) for k in part}
        for owner in touched - self.vandalized - {None}:
            self._whole(table, owner)

    def _whole(self, table: Mapping[Any, Any], owner: PlanKey | None) -> None:
        """See that a Service is in the kernel as it was once rendered, or not at all."""
        if owner is None:
            return
        versions = self.rendered.get(owner, ())
        known = {key for version in versions for key in version}
        part = {k: table[k] for k in known if k in table and self.owners.get(k) == owner}
        if str(owner.name.object_name) in self.unknown or self.knows_a_part(owner):
            return
        whole = any(version.items() <= part.items() for version in versions if version)
        if part and not whole:
            self.fail(f"{owner} is half-written: {len(part)} objects")

    def remember(self, owner: PlanKey, ruleset: Ruleset) -> None:
        """Take note of a Service's rules as rendered."""
        self.counts["rendered"] += 1
        self.universe.charge(RENDER_SECONDS)
        versions = self.rendered.setdefault(owner, deque(maxlen=_RENDERED))
        if ruleset not in versions:
            versions.append(ruleset)
        for key in ruleset:
            self.owners[key] = owner


def _parts(change: Diff) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]:
    return change.added, change.removed, change.changed


class SimWorker(Inline):
    """A mode's thread: one call after the other, and each takes its time."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel
        self._alone = asyncio.Lock()

    async def do(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        async with self._alone:
            await self._take_time()
            try:
                return call(*args, **kwargs)
            finally:
                await self._take_time()

    async def do_slowly(self, steps: Generator[Pause | None, None, T]) -> T:
        async with self._alone:
            await self._take_time()
            return await super().do_slowly(steps)

    async def wait_for(self, changes: Changes) -> None:
        """Wait for a stranger: simulated modes have no descriptors."""
        await self._kernel.told_of_strangers()

    async def _take_time(self) -> None:
        held_up, self._kernel.held_up = self._kernel.held_up, 0.0
        await asyncio.sleep(self._kernel.universe.dice.uniform(1e-4, 4e-3) + held_up)


class SimMode(Mode):
    """A mode on the simulated kernel that renders as a real one does."""

    def __init__(
        self, kernel: Kernel, name: str, table: str, like: Mode, variant: str = ""
    ) -> None:
        self.name = name
        self.traits: Traits = like.traits
        self.table = table
        self._kernel = kernel
        self.like = like
        self.variant = variant
        self.carrier = SimCarrier(kernel, table, self._enter)
        self._closed = False
        self.worker = SimWorker(kernel)
        # Whoever begins with a mode does not know what a refused Service had before.
        kernel.unknown |= kernel.poison

    def _enter(self, operation: str) -> None:
        """Begin a system call of a mode that was not released yet."""
        if self._closed:
            self._kernel.fail(f"{operation} by {self.name} mode after it was released")
        self._kernel.enter(operation)

    def probe(self) -> Support:
        self._enter("probe")
        if isinstance(self.like, NftablesMode):
            self.like.slots = slots_of(self._kernel.table(self.table))
        return Support(usable=True)

    def render_node(self, settings: NodeSettings) -> Ruleset:
        return self.like.render_node(settings)

    def render_service(self, plan: ServicePlan, settings: NodeSettings) -> Ruleset:
        ruleset = self.like.render_service(plan, settings)
        self._kernel.remember(plan.key, ruleset)
        return ruleset

    def read(self) -> Ruleset:
        self._enter("read")
        return dict(self._kernel.table(self.table))

    def fingerprint(self) -> Hashable | None:
        self._enter("fingerprint")
        return self._kernel.generation

    def apply(self, change: Diff) -> None:
        self._kernel.apply(self.table, change)

    def close(self) -> None:
        self._closed = True

    def stats(self, plans: Collection[ServicePlan]) -> Generator[None, None, ConnectionStats]:
        self._enter("counts")
        yield
        ends = {(plan.key.name, str(end)): 1 for plan in plans for end in plan.reachable}
        fronts = {(p.key.name, frontend_label(f)): 1 for p in plans for f in p.frontends}
        return ConnectionStats(frontends=fronts, endpoints=ends)

    def watch_failures(self) -> FailureWatch:
        return self._kernel.endpoints.watch(counts_answers=self.connection_table is not None)

    def totals(self) -> NodeTotals:
        self._enter("counts")
        return NodeTotals(connections=7)


class SimCarrier(Carrier):
    """Connections that need the rules of a table."""

    def __init__(self, kernel: Kernel, table: str, enter: Callable[[str], None]) -> None:
        self._kernel = kernel
        self._table = table
        self._enter = enter

    def connections(self) -> int:
        self._enter("counts")
        return int(self._kernel.carried.get(self._table, 0.0) > self._kernel.universe.now)

    def without_new_connections(self, have: Ruleset) -> Ruleset:
        """Return what belongs to Services: the node's part leads new connections to it."""
        return {key: value for key, value in have.items() if self._kernel.owners.get(key)}


class RememberingMode(SimMode):
    """A mode with one table of connections for both families."""

    def __init__(
        self, kernel: Kernel, name: str, table: str, like: Mode, variant: str = ""
    ) -> None:
        super().__init__(kernel, name, table, like, variant)
        self.connection_table = SimConnections(kernel, self._enter)


class SimConnections(ConnectionTable[list[int]]):
    """The table of connections of a mode, by number."""

    def __init__(self, kernel: Kernel, enter: Callable[[str], None]) -> None:
        self._kernel = kernel
        self._enter = enter

    def find_stale(self, stale: Stale) -> Generator[None, None, list[int]]:
        self._enter("forget")
        yield
        flows = self._kernel.flows.items()
        return [number for number, flow in flows if stale.contains(*flow.packed)]

    def delete_stale(self, found: list[int], stale: Stale) -> int:
        flows = self._kernel.flows
        doomed = [n for n in found if n in flows and stale.contains(*flows[n].packed)]
        for number in doomed:
            del flows[number]
        return len(doomed)


class WatchfulMode(SimMode):
    """A mode that hears of changes by others, and whose token counts only those."""

    def fingerprint(self) -> Hashable | None:
        self._enter("fingerprint")
        applied = self._kernel.applied
        return self._kernel.strangers + applied.total() - applied[asyncio.get_running_loop()]

    def changes(self) -> Changes:
        self._enter("lost")
        return Changes(-1, lambda: False)


def mode_factory(kernel: Kernel) -> Factory:
    """Build modes on a simulated kernel."""

    def iptables_like() -> Mode:
        return IptablesMode(SubprocessExec(), ModeOptions(iptables_variant="nft"))

    def create(name: str, _exec: Exec, options: ModeOptions) -> Mode:
        if name == "nftables":
            return WatchfulMode(kernel, name, name, NftablesMode(SubprocessExec()))
        variant = options.iptables_variant or ("nft" if name == "iptables" else "")
        table = f"{name} {variant}" if name == "iptables" else name
        kind = RememberingMode if name == "ebpf" else SimMode
        return kind(kernel, name, table, iptables_like(), variant)

    return create
