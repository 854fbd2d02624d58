"""Delete stale connections after syncs (behaviour 12).

After a sync, conntrack may still send clients of a changed Service to its previous endpoints, also
from addresses and ports that the Service has left. So each changed Service and each destination
that was left is owed a clean-up, in every connection table (conntrack, and the mode's own if it has
one) and in every family:

    SyncReport --note--> Debts (table, family) --pass--> list the table, delete stale entries
                           ^                                    |
                           +-- failed, or changed meanwhile ----+

A debt is removed only by a pass that began after the change and deleted everything it had to. So a
pass may fail, be interrupted or overtaken at any point: the debt remains, and is retried after
growing pauses.

A changed Service is cleaned at once, and once more two seconds later: a packet may be held up on
its way between the old rules and its exit from the node, and makes its entry at the exit. In
addition every Service that can have stale entries is cleaned once an hour, at the start, and after
rules were missing from the kernel. Then the connections of all Services that began without rules
are deleted, too: they wait for an answer to untranslated packets.

Each family is cleaned by a task of its own. The mode's thread lists and deletes, between its other
calls; the rest yields to the loop.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import islice, takewhile
from math import inf
from typing import NamedTuple, TypeAlias

from steersman.compile.conntrack import (
    ServedPort,
    destinations_at,
    is_concerned,
    left_destinations,
    numbers_to_look_up,
    served_ports,
    stale,
)
from steersman.host.sysctl import SysctlError
from steersman.host.worker import KernelWorker
from steersman.model.change_log import ChangeLog, Cursor
from steersman.model.conntrack import Cleanup, Confirm, Stale
from steersman.model.names import Family, ObjectName, PlanKey, Protocol
from steersman.model.plan import NodePlan, ServicePlan
from steersman.modes.base import Mode
from steersman.run.observe.metrics import Metrics
from steersman.run.sync.in_force import InForce, Name, services_of
from steersman.run.sync.runner import Clock, MonotonicClock
from steersman.run.sync.state import State, SyncReport

log = logging.getLogger(__name__)

HOUR = 3600.0
"""Seconds in which every Service is cleaned once."""
AT_ONCE = 1000
"""Services in one pass; the hourly clean-up of more is spread over the hour."""
AGAIN = 2.0
"""Seconds after which a changed Service is cleaned once more."""
_SLICE = 1000
"""Endpoints (or Services) examined before other tasks may run; about 2 ms."""
_RETRY, _LONGEST = 1.0, 60.0  # seconds after a failure; doubled each time
_SHARE = 9
"""After a pass a family rests for this many times its CPU time, so that it takes a tenth of a core
(at most a minute)."""
_LONGEST_REST = 0.5
"""Seconds of this rest that a changed Service waits for at most."""

Delete: TypeAlias = Callable[[Stale, Confirm], Awaitable[Cleanup]]
"""Deletes stale entries of one table."""
DeleteUntranslated: TypeAlias = Callable[[Family, Collection[ServicePlan]], Awaitable[Cleanup]]
"""Deletes unanswered connections to these Services that no rule has translated."""
_UNTRANSLATED = "untranslated connections"
_ALL = (ObjectName("", ""),)
"""The one debt of a family that is about all its Services: see `DeleteUntranslated`."""
Key: TypeAlias = ObjectName | bytes
"""A Service, or a destination that one has left (packed as in `Stale`)."""


class Batch(NamedTuple):
    """Debts that a pass pays; they remain debts until it has succeeded."""

    keys: tuple[Key, ...]
    cursor: Cursor[Key]
    revision: int
    """Where the cursor moves then."""


class Debts:
    """What may still have stale entries in one table, in one family."""

    def __init__(self, *, again: bool = True) -> None:
        """Start without debts.

        Args:
            again: whether changed Services are cleaned once more, `AGAIN` seconds later.
        """
        self._changed: ChangeLog[Key] = ChangeLog()
        """What changed: it comes first."""
        self._due: ChangeLog[Key] = ChangeLog()
        """Services and destinations to clean for another reason."""
        self._changed_paid, self._due_paid = self._changed.cursor(), self._due.cursor()
        self._again: dict[Key, float] | None = {} if again else None
        """When changes that were paid are due once more, the first one first."""
        self.failures = 0
        """Passes in a row that failed."""
        self.not_before = 0.0
        """When the next pass may begin."""
        self.answers = True
        """Whether the last failure was about some entries only; then changes need not wait."""
        self.warned = False
        """Whether a failure was logged since the last success."""

    def __len__(self) -> int:
        return len(self._changed) + len(self._due)

    def owe(self, keys: Iterable[Key], *, changed: bool = True) -> None:
        """Record what to clean: passes that have begun do not count for it."""
        log = self._changed if changed else self._due
        for key in keys:
            log.touch(key)
        if changed and self.answers:
            self.not_before = 0.0

    def next(self, count: int) -> Batch:
        """Return the oldest debts of those that come first."""
        changed = self._changed_paid.behind
        log, cursor = (
            (self._changed, self._changed_paid) if changed else (self._due, self._due_paid)
        )
        keys = tuple(cursor.changed()[0][:count])
        return Batch(keys, cursor, log.revision_of(keys[-1]) if keys else cursor.at)

    def paid(self, batch: Batch, now: float) -> None:
        """Remove debts that a pass has paid, except for what changed since `next`."""
        batch.cursor.move(batch.revision)
        if batch.cursor is self._changed_paid and self._again is not None:
            for key in batch.keys:
                self._again.pop(key, None)
                self._again[key] = now + AGAIN

    def begin(self, now: float, rested: float, ended: float) -> float:
        """Return when the next pass may begin; infinity if there is nothing to do.

        Args:
            rested: when the family has rested from its passes.
            ended: the end of its last pass.
        """
        again = self._again or {}
        keys = tuple(takewhile(lambda key: again[key] <= now, again))
        self.owe(keys, changed=False)
        for key in keys:
            del again[key]
        times = [*islice(again.values(), 1)]
        if self._changed_paid.behind:
            times.append(max(self.not_before, min(rested, ended + _LONGEST_REST)))
        if self._due_paid.behind:
            times.append(max(self.not_before, rested))
        return min(times, default=inf)


class StaleEntryCleaner:
    """Keeps account of the debts, and pays them."""

    def __init__(
        self,
        metrics: Metrics,
        in_force: InForce,
        *,
        mode: Mode,
        delete: Delete | None = None,
        untranslated: DeleteUntranslated | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Start without debts.

        Args:
            mode: its own connection table is cleaned, too, if it has one.
            delete: deletes conntrack entries; None for the kernel's.
            untranslated: deletes those that began without rules; None for the kernel's.
        """
        self._metrics = metrics
        self._cursor = in_force.log.cursor()
        clock = self._clock = clock or MonotonicClock()
        worker = mode.worker
        tables: dict[str, Delete] = {"conntrack": delete or partial(_delete_entries, worker)}
        if (table := mode.connection_table) is not None:

            async def flush(what: Stale, confirm: Confirm) -> Cleanup:
                began, deleted = clock.time(), 0
                if found := await worker.do_slowly(table.find_stale(what)):
                    # Endpoints may have come back meanwhile.
                    deleted = await worker.do(table.delete_stale, found, await confirm())
                return Cleanup(deleted, 0, complete=True, seconds=clock.time() - began)

            tables = {f"{mode.name} mode": flush, **tables}
        self._tables = tables
        self._untranslated = untranslated or partial(_delete_untranslated, worker)
        # Untranslated connections come first: their clients wait, and send again after a second.
        places = (_UNTRANSLATED, *tables)
        self._owed = {
            family: {table: Debts(again=table != _UNTRANSLATED) for table in places}
            for family in Family
        }
        self._wake = {family: asyncio.Event() for family in Family}
        self._state: State | None = None
        self._plan: NodePlan | None = None
        """The plan in force, also if connections end in this process."""
        self._held: dict[PlanKey, ServicePlan] = {}
        """The plans of UDP as of the last report."""
        self._everything = asyncio.Event()
        """All Services are owed a clean-up."""
        self._listing = False
        """Whether the Services are being listed for this."""

    @property
    def owed(self) -> int:
        """Number of debts, over all tables and families."""
        everything = self._everything.is_set() or self._listing
        return everything + sum(len(owed) for of in self._owed.values() for owed in of.values())

    # Debts

    def note(self, report: SyncReport) -> None:
        """Record the Services whose entries a sync may have made stale.

        If connections end in this process, entries lead to it, and the mode cleans up itself.
        """
        names, revision = self._cursor.changed()
        plan = self._plan = report.state.plan
        result, written = report.result, report.written
        starting = result is not None and result.reason == "start"
        repaired = starting or (report.compared and bool(written.added or written.changed))
        # Connections made while rules were missing are not translated, if conntrack has any.
        if repaired and plan.settings.traits.tracks_connections:
            for family in plan.settings.families:
                self._owed[family][_UNTRANSLATED].owe(_ALL)
                self._wake[family].set()
        if not plan.settings.traits.terminates_connections:
            self._state = report.state
            if repaired:
                self._everything.set()
            if starting:
                self._hold(plan.services, plan.services)
            else:
                self._note_changes(names, report.state)
        self._cursor.move(revision)

    def _note_changes(self, names: Iterable[Name], state: State) -> None:
        plans, services = state.plan.services, state.snapshot.services
        changed = [each for each in names if isinstance(each, PlanKey)]
        for key in changed:
            if before := self._held.get(key):
                self._owe(left_destinations(before, plans.get(key)), families=(key.family,))
        # Changed Services, and others that won or lost a destination to them.
        concerned = {*services_of(names), *(key.name.object_name for key in changed)}
        self._owe([n for n in concerned if n in services and is_concerned(services[n])])
        self._hold(changed, plans)

    def _hold(self, changed: Iterable[PlanKey], plans: Mapping[PlanKey, ServicePlan]) -> None:
        for key in changed:
            if key.name.protocol is Protocol.UDP and key in plans:
                self._held[key] = plans[key]
            else:
                self._held.pop(key, None)

    def _owe(
        self, keys: Collection[Key], *, changed: bool = True, families: Iterable[Family] = ()
    ) -> None:
        assert self._state is not None
        for family in (families or self._state.plan.settings.families) if keys else ():
            for table in self._tables:
                self._owed[family][table].owe(keys, changed=changed)
            self._wake[family].set()

    async def _owe_everything(self) -> None:
        """Record all Services as debts when they are, and once an hour in parts."""
        parts: list[list[ObjectName]] = []
        pause = HOUR
        await self._everything.wait()
        while True:
            if self._everything.is_set():
                self._everything.clear()
                parts, pause = [await self._concerned()], HOUR
            elif not parts:  # the list is made when the first part is due
                names = await self._concerned()
                parts = [names[at : at + AT_ONCE] for at in range(0, len(names), AT_ONCE)]
                pause = HOUR / max(len(parts), 1)
            self._owe(parts.pop(0) if parts else (), changed=False)
            self._listing = False
            await self._clock.wait(self._everything, pause)

    async def _concerned(self) -> list[ObjectName]:
        """Return all Services that can have stale entries; yields to the loop."""
        assert self._state is not None
        self._listing = True
        services, names = self._state.snapshot.services, list[ObjectName]()
        for number, name in enumerate(tuple(services)):
            if (service := services.get(name)) is not None and is_concerned(service):
                names.append(name)
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
        return names

    # Passes

    async def run(self) -> None:
        """Pay the debts until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._owe_everything())
            for family in Family:
                group.create_task(self._clean(family))

    async def _clean(self, family: Family) -> None:
        wake, clock = self._wake[family], self._clock
        rested = ended = clock.time()
        while True:
            wake.clear()
            for table, owed in self._owed[family].items():
                if owed.begin(clock.time(), rested, ended) <= clock.time():
                    seconds = await self._pay(table, family, owed)
                    ended = clock.time()
                    rested = min(max(rested, ended) + _SHARE * seconds, ended + _LONGEST)
            tables = self._owed[family].values()
            begin = min(owed.begin(clock.time(), rested, ended) for owed in tables)
            if (wait := min(begin - clock.time(), HOUR)) > 0:
                await clock.wait(wake, wait)

    async def _pay(self, table: str, family: Family, owed: Debts) -> float:
        """Make one pass for the debts that come first; return the CPU seconds it took."""
        batch = owed.next(AT_ONCE)
        try:
            result = await self._pass(table, family, batch.keys)
        except Exception as error:
            owed.answers = False
            self._failed(table, family, owed, f"{type(error).__name__}: {error}")
            return 0.0
        if result.failed:
            owed.answers = True
            self._failed(table, family, owed, f"the kernel keeps {result.failed} of them")
        elif not result.complete:  # usual if connections come and go all the time
            owed.answers = True
            self._failed(table, family, owed, "the table changed while it was listed", warn=False)
        else:
            owed.paid(batch, self._clock.time())
            owed.failures = 0
            if owed.warned:
                owed.warned = False
                log.info("%s %s: resolved: no stale entries remain", family.kubernetes, table)
        return result.seconds

    async def _pass(self, table: str, family: Family, debts: Collection[Key]) -> Cleanup:
        began, label = self._clock.time(), family.kubernetes
        if table == _UNTRANSLATED:
            assert self._plan is not None
            result = await self._untranslated(family, tuple(self._plan.services.values()))
        else:
            # Perhaps a few are not stale: `_confirmed` finds out who else holds a destination, for
            # which all plans have to be looked at, and as a rule nothing is found.
            ports, left = await self._ports(debts, family), _left(debts)
            what = await asyncio.to_thread(stale, family, ports, (), left)
            if not what:  # the Services are gone, or have no endpoints
                return Cleanup(0, 0, complete=True)
            began = self._clock.time()
            result = await self._tables[table](what, lambda: self._confirmed(debts, family))
        if result.deleted:
            log.info("%s %s: %d stale entries deleted", label, table, result.deleted)
        self._metrics.conntrack_deleted(label).inc(result.deleted)
        self._metrics.conntrack_seconds(label).observe(self._clock.time() - began)
        return result

    def _failed(
        self, table: str, family: Family, owed: Debts, why: str, *, warn: bool = True
    ) -> None:
        """Retry later; only the first failure in a row is logged as a warning."""
        pause = min(_RETRY * 2 ** min(owed.failures, 10), _LONGEST)
        owed.failures += 1
        owed.not_before = self._clock.time() + pause
        level = log.warning if warn and not owed.warned else log.debug
        owed.warned |= warn
        text = "%s %s: stale entries remain: %s; retrying in %gs"
        level(text, family.kubernetes, table, why, pause)

    async def _ports(self, debts: Iterable[Key], family: Family) -> list[ServedPort]:
        """Return the ports of the Services among some debts as they are now; yields to the loop."""
        ports: list[ServedPort] = []
        looked = 0
        for name in (key for key in debts if not isinstance(key, bytes)):
            state = self._state
            assert state is not None
            for port in served_ports(name, state.plan, state.snapshot, family):
                ports.append(port)
                looked += len(port.endpoints)
            looked += 10
            if looked >= _SLICE:
                looked = 0
                await asyncio.sleep(0)
        return ports

    async def _confirmed(self, debts: Iterable[Key], family: Family) -> Stale:
        """Return how to recognise the stale entries among those that were found."""
        ports, left = await self._ports(debts, family), _left(debts)
        assert self._state is not None
        # Few Services of UDP have node ports: an index would cost all nodes 80 bytes for each plan.
        held: list[bytes] = []
        if numbers := numbers_to_look_up(ports, left):
            plans = tuple(self._state.plan.services.values())
            for at in range(0, len(plans), _SLICE):
                held += destinations_at(numbers, plans[at : at + _SLICE], family)
                await asyncio.sleep(0)
        return await asyncio.to_thread(stale, family, ports, held, left)


def _left(debts: Iterable[Key]) -> list[bytes]:
    return [key for key in debts if isinstance(key, bytes)]


async def _delete_entries(worker: KernelWorker, what: Stale, confirm: Confirm) -> Cleanup:
    from steersman.netfilter.conntrack.stale import delete_stale  # noqa: PLC0415 - not on Windows

    return await delete_stale(worker, what, confirm)


async def _delete_untranslated(
    worker: KernelWorker, family: Family, plans: Collection[ServicePlan]
) -> Cleanup:
    from steersman.netfilter.conntrack import unanswered, usage  # noqa: PLC0415 - not on Windows

    try:
        return await worker.do_slowly(unanswered.delete_untranslated(family, plans))
    except OSError as error:
        try:
            usage.usage()
        except SysctlError:  # this kernel tracks no connections
            return Cleanup(0, 0, complete=True)
        if error.errno == errno.EPERM:  # a process without rights has no rules, either
            return Cleanup(0, 0, complete=True)
        raise
