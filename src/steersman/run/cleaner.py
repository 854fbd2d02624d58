"""Deletes stale connections after syncs (behaviour 12): what is owed to conntrack, and paying it.

After a sync, clients of a changed Service may still be sent by conntrack where the Service no
longer sends them. Each such Service is owed a clean-up, in every table that remembers connections
(conntrack, and the mode's own, if it has one) and in every family. A debt is noted when the sync
is reported and removed only by a pass that began later and deleted everything it had to; nothing
else removes it. So a pass may fail, be interrupted or overtaken at any point: what is owed stays
owed, and is tried again with growing pauses. Every Service that can have stale entries is owed a
clean-up once an hour in any case, also at the start and after rules were missing from the kernel.

All of this happens in a task of its own. Listing takes a thread; the rest yields to the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeAlias

from steersman.compile.conntrack import (
    Destinations,
    ServedPort,
    is_concerned,
    served_ports,
    stale,
)
from steersman.compile.planner import PlanChange
from steersman.model.conntrack import Cleanup, Confirm, Stale
from steersman.model.names import Family, ObjectName
from steersman.modes.base import Mode
from steersman.run.metrics import Metrics
from steersman.run.runner import Clock, MonotonicClock
from steersman.run.state import State, SyncReport

log = logging.getLogger(__name__)

HOUR = 3600.0
"""Seconds in which every Service is looked at once."""
AT_ONCE = 1000
"""Services in one pass; the hourly look at more of them is spread over the hour."""
_SLICE = 1000
"""Endpoints (or Services) that are looked at before the loop may go on; about 2 ms."""
_RETRY, _LONGEST = 1.0, 60.0  # seconds after a failure; doubled each time
_SHARE = 4
"""After a pass it rests for so many times its duration: a fifth of a core at the most."""

Delete: TypeAlias = Callable[[Stale, Confirm], Awaitable[Cleanup]]
"""Deletes what is stale in one table."""


class Debts:
    """The Services whose stale entries may still be in one table, in one family."""

    def __init__(self) -> None:
        self._marks: dict[ObjectName, int] = {}
        self._last = 0
        self.failures = 0
        """Passes in a row that failed."""
        self.not_before = 0.0
        """When the next pass may begin."""
        self.answers = True
        """Whether the last failure was about some entries only: then new debts need not wait."""
        self.warned = False
        """Whether a failure was logged since the last success."""

    def __len__(self) -> int:
        return len(self._marks)

    def owe(self, names: Iterable[ObjectName]) -> None:
        """Note that Services changed: passes that have begun do not count for them."""
        self._last += 1
        self._marks.update(dict.fromkeys(names, self._last))
        if self.answers:
            self.not_before = 0.0

    def oldest(self, count: int) -> Mapping[ObjectName, int]:
        """Return what has been owed for longest, with marks for `paid`; it stays owed."""
        return dict(pair for pair, _ in zip(self._marks.items(), range(count), strict=False))

    def paid(self, debts: Mapping[ObjectName, int]) -> None:
        """Forget what a pass has paid, but for Services that changed since `oldest`."""
        for name, mark in debts.items():
            if self._marks.get(name) == mark:
                del self._marks[name]


class Cleaner:
    """Keeps account of what is owed, and pays it."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        mode: Mode | None = None,
        delete: Delete | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Owe nothing yet.

        Args:
            metrics: told of duration and deletions.
            mode: its own connection table is cleaned, too, if it has one.
            delete: deletes conntrack entries; None for the kernel's.
            clock: for tests.
        """
        self._metrics = metrics
        self._clock = clock or MonotonicClock()
        tables: dict[str, Delete] = {"conntrack": delete or _delete_entries}
        if mode is not None and mode.has_connection_table:
            tables = {f"{mode.name} mode": _forgetting(mode), **tables}
        self._tables = tables
        self._owed = {(table, family): Debts() for table in tables for family in Family}
        self._destinations = Destinations()
        self._unindexed: list[PlanChange] = []
        """What the index of destinations does not have yet."""
        self._state: State | None = None
        self._all_owed = 0
        """How often everything became owed."""
        self._all_noted = 0
        """How much of that is in the debts."""
        self._wake = asyncio.Event()
        self._rest = 0.0
        """When the next pass may begin, whatever is owed."""
        self._look_at = 0.0
        """When the next part of the hourly look is due."""
        self._pause = HOUR
        self._parts: list[list[ObjectName]] = []
        """What of the hourly look is left."""

    @property
    def owed(self) -> int:
        """How much is owed, over all tables and families."""
        return sum(map(len, self._owed.values())) + (self._all_owed - self._all_noted)

    # What is owed

    def note(self, report: SyncReport) -> None:
        """Note what a sync may have left behind.

        Where connections end in this process, entries lead to it; the mode looks after them.
        """
        plan = report.state.plan
        if plan.settings.traits.terminates_connections:
            return
        self._state = report.state
        change, result, written = report.plans, report.result, report.written
        if self._unindexed or len(change.changed) > _SLICE:
            self._unindexed.append(change)
            self._wake.set()
        else:
            self._destinations.update(change.changed, change.removed)
        starting = result is not None and result.reason == "start"
        if starting or (report.compared and (written.added or written.changed)):
            self._all_owed += 1  # what came while rules were missing is untranslated
            self._wake.set()
        else:
            # Changed Services, and others that won or lost a destination to them.
            names = {*report.changes.services, *(key.name.object_name for key in change.changed)}
            services = report.state.snapshot.services
            self._owe(n for n in names if n in services and is_concerned(services[n]))

    def _owe(self, names: Iterable[ObjectName]) -> None:
        names = tuple(names)
        assert self._state is not None
        for (_, family), owed in self._owed.items():
            if names and family in self._state.plan.settings.families:
                owed.owe(names)
                self._wake.set()

    async def _look(self) -> None:
        """Owe everything, if it is, or the next part of the hourly look at everything."""
        if self._state is None:
            return
        if self._all_noted != self._all_owed:
            count = self._all_owed
            self._owe(await self._concerned(self._state))
            self._all_noted = count
            self._parts = []
            self._look_at = self._clock.time() + HOUR
        elif self._clock.time() >= self._look_at:
            if not self._parts:
                names = await self._concerned(self._state)
                self._parts = [names[at : at + AT_ONCE] for at in range(0, len(names), AT_ONCE)]
                self._pause = HOUR / max(len(self._parts), 1)
            self._owe(self._parts.pop(0) if self._parts else ())
            self._look_at = self._clock.time() + self._pause

    async def _concerned(self, state: State) -> list[ObjectName]:
        """All Services that can have stale entries; yields to the loop."""
        services, names = state.snapshot.services, list[ObjectName]()
        for number, name in enumerate(tuple(services)):
            if (service := services.get(name)) is not None and is_concerned(service):
                names.append(name)
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
        return names

    async def _index(self) -> None:
        """Bring the index of destinations up to date; yields to the loop."""
        while self._unindexed:
            change = self._unindexed[0]
            self._destinations.update({}, change.removed)
            for number, (key, plan) in enumerate(change.changed.items()):
                self._destinations.update({key: plan}, ())
                if number % _SLICE == _SLICE - 1:
                    await asyncio.sleep(0)
            self._unindexed.pop(0)

    # Paying it

    async def run(self) -> None:
        """Pay what is owed until cancelled."""
        while True:
            self._wake.clear()
            await self._index()
            await self._look()
            for (table, family), owed in self._owed.items():
                if owed and owed.not_before <= self._clock.time() >= self._rest:
                    await self._pay(table, family, owed)
            wait = self._next() - self._clock.time()
            if wait > 0:
                await self._clock.wait(self._wake, wait)

    def _next(self) -> float:
        """When there is something to do, as far as it is known."""
        due = [owed.not_before for owed in self._owed.values() if owed]
        times = [max(min(due), self._rest)] if due else []
        if self._state is not None:
            times.append(self._look_at)
        return min(times, default=self._clock.time() + HOUR)

    async def _pay(self, table: str, family: Family, owed: Debts) -> None:
        """Make one pass for what has been owed for longest."""
        debts = owed.oldest(AT_ONCE)
        try:
            result = await self._pass(table, family, debts)
        except Exception as error:
            owed.answers = False
            self._failed(table, family, owed, f"{type(error).__name__}: {error}")
            return
        if result.failed:
            owed.answers = True
            self._failed(table, family, owed, f"the kernel keeps {result.failed} of them")
        elif not result.complete:  # usual where connections come and go all the time
            owed.answers = True
            self._failed(table, family, owed, "the table changed while it was listed", warn=False)
        else:
            owed.paid(debts)
            owed.failures = 0
            if owed.warned:
                owed.warned = False
                log.info("%s %s: resolved: no stale entries remain", family.kubernetes, table)

    async def _pass(self, table: str, family: Family, debts: Mapping[ObjectName, int]) -> Cleanup:
        """Delete the stale entries of some Services."""
        what = await self._stale(debts, family)
        if not what:  # the Services are gone by now, or have no endpoints
            return Cleanup(0, 0, complete=True)
        began, label = self._clock.time(), family.kubernetes
        result = await self._tables[table](what, lambda: self._stale(debts, family))
        seconds = self._clock.time() - began
        self._rest = self._clock.time() + min(_SHARE * seconds, _LONGEST)
        if result.deleted:
            log.info("%s %s: %d stale entries deleted", label, table, result.deleted)
        self._metrics.conntrack_deleted(label).inc(result.deleted)
        self._metrics.conntrack_seconds(label).observe(seconds)
        return result

    def _failed(
        self, table: str, family: Family, owed: Debts, why: str, *, warn: bool = True
    ) -> None:
        """Keep what is owed, and try again later; only the first failure in a row is logged."""
        pause = min(_RETRY * 2 ** min(owed.failures, 10), _LONGEST)
        owed.failures += 1
        owed.not_before = self._clock.time() + pause
        level = log.warning if warn and not owed.warned else log.debug
        owed.warned |= warn
        text = "%s %s: stale entries remain: %s; retrying in %g s"
        level(text, family.kubernetes, table, why, pause)

    async def _stale(self, names: Iterable[ObjectName], family: Family) -> Stale:
        """Tell stale entries of some Services, as of now; yields to the loop."""
        await self._index()
        ports: list[ServedPort] = []
        looked = 0
        for name in names:
            state = self._state
            assert state is not None
            for port in served_ports(name, state.plan, state.snapshot, family):
                ports.append(port)
                looked += len(port.endpoints)
            looked += 10
            if looked >= _SLICE:
                looked = 0
                await asyncio.sleep(0)
        assert self._state is not None
        numbers = {port.node_port for port in ports} - {0}
        own = tuple(self._destinations.at(numbers, self._state.plan, family))
        return await asyncio.to_thread(stale, family, ports, own)


async def _delete_entries(what: Stale, confirm: Confirm) -> Cleanup:
    from steersman.netfilter.conntrack import delete_stale  # noqa: PLC0415 - not on Windows

    return await delete_stale(what, confirm)


def _forgetting(mode: Mode) -> Delete:
    async def forget(what: Stale, confirm: Confirm) -> Cleanup:
        return Cleanup(await mode.flush_stale(what, confirm), 0, complete=True)

    return forget
