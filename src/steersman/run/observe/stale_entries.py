"""Delete stale connections after syncs (behaviour 12).

After a sync, conntrack may still send clients of a changed Service to its previous endpoints. So
each changed Service is owed a clean-up, in every connection table (conntrack, and the mode's own if
it has one) and in every family:

    SyncReport --note--> Debts (table, family) --pass--> list the table, delete stale entries
                           ^                                    |
                           +-- failed, or changed meanwhile ----+

A debt is removed only by a pass that began after the change and deleted everything it had to. So a
pass may fail, be interrupted or overtaken at any point: the debt remains, and is retried after
growing pauses. In addition every Service that can have stale entries is cleaned once an hour, at
the start, and after rules were missing from the kernel. Then the connections of all Services that
began without rules are deleted, too: they wait for an answer to untranslated packets.

All of this runs in a task of its own. Listing takes a thread; the rest yields to the loop.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TypeAlias

from steersman.compile.conntrack import (
    ServedPort,
    destinations_at,
    is_concerned,
    served_ports,
    stale,
)
from steersman.host.sysctl import SysctlError
from steersman.model.conntrack import Cleanup, Confirm, Stale
from steersman.model.names import Family, ObjectName
from steersman.model.plan import NodePlan, ServicePlan
from steersman.modes.base import Mode
from steersman.run.observe.metrics import Metrics
from steersman.run.sync.runner import Clock, MonotonicClock
from steersman.run.sync.state import State, SyncReport

log = logging.getLogger(__name__)

HOUR = 3600.0
"""Seconds in which every Service is cleaned once."""
AT_ONCE = 1000
"""Services in one pass; the hourly clean-up of more is spread over the hour."""
_SLICE = 1000
"""Endpoints (or Services) examined before other tasks may run; about 2 ms."""
_RETRY, _LONGEST = 1.0, 60.0  # seconds after a failure; doubled each time
_SHARE = 4
"""After a pass it rests for this many times its duration: at most a fifth of a core."""

Delete: TypeAlias = Callable[[Stale, Confirm], Awaitable[Cleanup]]
"""Deletes stale entries of one table."""
DeleteUntranslated: TypeAlias = Callable[[Family, Collection[ServicePlan]], Awaitable[Cleanup]]
"""Deletes unanswered connections to these Services that no rule has translated."""
_UNTRANSLATED = "untranslated connections"
_ALL = (ObjectName("", ""),)
"""The one debt of a family that is about all its Services: see `DeleteUntranslated`."""


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
        """Whether the last failure was about some entries only; then new debts need not wait."""
        self.warned = False
        """Whether a failure was logged since the last success."""

    def __len__(self) -> int:
        return len(self._marks)

    def owe(self, names: Iterable[ObjectName]) -> None:
        """Record that Services changed: passes that have begun do not count for them."""
        self._last += 1
        self._marks.update(dict.fromkeys(names, self._last))
        if self.answers:
            self.not_before = 0.0

    def oldest(self, count: int) -> Mapping[ObjectName, int]:
        """Return the oldest debts, with marks for `paid`; they remain."""
        return dict(pair for pair, _ in zip(self._marks.items(), range(count), strict=False))

    def paid(self, debts: Mapping[ObjectName, int]) -> None:
        """Remove debts that a pass has paid, except of Services that changed since `oldest`."""
        for name, mark in debts.items():
            if self._marks.get(name) == mark:
                del self._marks[name]


class StaleEntryCleaner:
    """Keeps account of the debts, and pays them."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        mode: Mode | None = None,
        delete: Delete | None = None,
        untranslated: DeleteUntranslated | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Start without debts.

        Args:
            metrics: counts durations and deletions.
            mode: its own connection table is cleaned, too, if it has one.
            delete: deletes conntrack entries; None for the kernel's.
            untranslated: deletes those that began without rules; None for the kernel's.
            clock: for tests.
        """
        self._metrics = metrics
        self._clock = clock or MonotonicClock()
        tables: dict[str, Delete] = {"conntrack": delete or _delete_entries}
        if mode is not None and mode.has_connection_table:
            flush_stale = mode.flush_stale

            async def flush(what: Stale, confirm: Confirm) -> Cleanup:
                return Cleanup(await flush_stale(what, confirm), 0, complete=True)

            tables = {f"{mode.name} mode": flush, **tables}
        self._tables = tables
        self._untranslated = untranslated or _delete_untranslated
        # Untranslated connections come first: their clients wait, and send again after a second.
        places = (_UNTRANSLATED, *tables)
        self._owed = {(table, family): Debts() for table in places for family in Family}
        self._state: State | None = None
        self._plan: NodePlan | None = None
        """The plan in force, also if connections end in this process."""
        self._all_owed = 0
        """How often everything became owed."""
        self._all_noted = 0
        """How many of these are in the debts."""
        self._wake = asyncio.Event()
        self._rest = 0.0
        """When the next pass of any kind may begin."""
        self._hourly_at = 0.0
        """When the next part of the hourly clean-up is due."""
        self._pause = HOUR
        self._parts: list[list[ObjectName]] = []
        """The remaining parts of the hourly clean-up."""

    @property
    def owed(self) -> int:
        """Number of debts, over all tables and families."""
        return sum(map(len, self._owed.values())) + (self._all_owed - self._all_noted)

    # Debts

    def note(self, report: SyncReport) -> None:
        """Record the Services whose entries a sync may have made stale.

        If connections end in this process, entries lead to it, and the mode cleans up itself.
        """
        plan = self._plan = report.state.plan
        result, written = report.result, report.written
        starting = result is not None and result.reason == "start"
        repaired = starting or (report.compared and bool(written.added or written.changed))
        # Connections made while rules were missing are not translated, if conntrack has any.
        if repaired and plan.settings.traits.tracks_connections:
            for family in plan.settings.families:
                self._owed[_UNTRANSLATED, family].owe(_ALL)
            self._wake.set()
        if plan.settings.traits.terminates_connections:
            return
        self._state = report.state
        if repaired:
            self._all_owed += 1
        else:
            # Changed Services, and others that won or lost a destination to them.
            names = {
                *report.changes.services,
                *(key.name.object_name for key in report.plans.changed),
            }
            services = report.state.snapshot.services
            self._owe(n for n in names if n in services and is_concerned(services[n]))

    def _owe(self, names: Iterable[ObjectName]) -> None:
        names = tuple(names)
        assert self._state is not None
        for (table, family), owed in self._owed.items():
            if names and table != _UNTRANSLATED and family in self._state.plan.settings.families:
                owed.owe(names)
                self._wake.set()

    async def _add_due(self) -> None:
        """Record all Services as debts if they are, or the next part of them once it is due."""
        if self._state is None:
            return
        # Everything: after the start, or after rules were missing. The count tells whether this
        # happened once more while all Services were listed.
        if self._all_noted != self._all_owed:
            count = self._all_owed
            self._owe(await self._concerned(self._state))
            self._all_noted = count
            self._parts = []
            self._hourly_at = self._clock.time() + HOUR
        # A part of the hourly clean-up; the list is made when the first part is due.
        elif self._clock.time() >= self._hourly_at:
            if not self._parts:
                names = await self._concerned(self._state)
                self._parts = [names[at : at + AT_ONCE] for at in range(0, len(names), AT_ONCE)]
                self._pause = HOUR / max(len(self._parts), 1)
            self._owe(self._parts.pop(0) if self._parts else ())
            self._hourly_at = self._clock.time() + self._pause

    async def _concerned(self, state: State) -> list[ObjectName]:
        """Return all Services that can have stale entries; yields to the loop."""
        services, names = state.snapshot.services, list[ObjectName]()
        for number, name in enumerate(tuple(services)):
            if (service := services.get(name)) is not None and is_concerned(service):
                names.append(name)
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
        return names

    # Passes

    async def run(self) -> None:
        """Pay the debts until cancelled."""
        while True:
            self._wake.clear()
            await self._add_due()
            for (table, family), owed in self._owed.items():
                if owed and owed.not_before <= self._clock.time() >= self._rest:
                    await self._pay(table, family, owed)
            # Wait for the next debt, or the next part of the hourly clean-up.
            due = [owed.not_before for owed in self._owed.values() if owed]
            times = [max(min(due), self._rest)] if due else []
            if self._state is not None:
                times.append(self._hourly_at)
            wait = min(times, default=self._clock.time() + HOUR) - self._clock.time()
            if wait > 0:
                await self._clock.wait(self._wake, wait)

    async def _pay(self, table: str, family: Family, owed: Debts) -> None:
        """Make one pass for the oldest debts."""
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
        elif not result.complete:  # usual if connections come and go all the time
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
        began, label = self._clock.time(), family.kubernetes
        if table == _UNTRANSLATED:
            assert self._plan is not None
            result = await self._untranslated(family, tuple(self._plan.services.values()))
        else:
            what = await self._stale(debts, family)
            if not what:  # the Services are gone, or have no endpoints
                return Cleanup(0, 0, complete=True)
            began = self._clock.time()
            result = await self._tables[table](what, lambda: self._confirmed(debts, family))
        # Rest in proportion, so that a full table never costs more than a share of a core.
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
        """Retry later; only the first failure in a row is logged as a warning."""
        pause = min(_RETRY * 2 ** min(owed.failures, 10), _LONGEST)
        owed.failures += 1
        owed.not_before = self._clock.time() + pause
        level = log.warning if warn and not owed.warned else log.debug
        owed.warned |= warn
        text = "%s %s: stale entries remain: %s; retrying in %gs"
        level(text, family.kubernetes, table, why, pause)

    async def _stale(self, names: Iterable[ObjectName], family: Family) -> Stale:
        """Return how to find stale entries of some Services, and perhaps a few that are not.

        Which addresses of other Services have the number of a node port is left to `_confirmed`:
        to know it, all plans have to be looked at, and as a rule nothing is found.
        """
        return await asyncio.to_thread(stale, family, await self._ports(names, family))

    async def _ports(self, names: Iterable[ObjectName], family: Family) -> list[ServedPort]:
        """Return the ports of some Services as they are now; yields to the loop."""
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
        return ports

    async def _confirmed(self, names: Iterable[ObjectName], family: Family) -> Stale:
        """Return how to recognise the stale entries among those that were found."""
        ports = await self._ports(names, family)
        assert self._state is not None
        # Few Services of UDP have node ports: an index would cost all nodes 80 bytes for each plan.
        own: list[bytes] = []
        if numbers := {port.node_port for port in ports} - {0}:
            plans = tuple(self._state.plan.services.values())
            for at in range(0, len(plans), _SLICE):
                own += destinations_at(numbers, plans[at : at + _SLICE], family)
                await asyncio.sleep(0)
        return await asyncio.to_thread(stale, family, ports, own)


async def _delete_entries(what: Stale, confirm: Confirm) -> Cleanup:
    from steersman.netfilter.conntrack import delete_stale  # noqa: PLC0415 - not on Windows

    return await delete_stale(what, confirm)


async def _delete_untranslated(family: Family, plans: Collection[ServicePlan]) -> Cleanup:
    from steersman.netfilter import conntrack, conntrack_watch  # noqa: PLC0415 - not on Windows

    try:
        return await asyncio.to_thread(conntrack_watch.delete_untranslated, family, plans)
    except OSError as error:
        try:
            conntrack.usage()
        except SysctlError:  # this kernel tracks no connections
            return Cleanup(0, 0, complete=True)
        if error.errno == errno.EPERM:  # a process without rights has no rules, either
            return Cleanup(0, 0, complete=True)
        raise
