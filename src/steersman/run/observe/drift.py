"""Tell everyone about drift: the log, metrics, an Event about the node, and a Finding.

The Finding stays as long as drift is not repaired, or keeps coming back: two programs that rewrite
the rules of each other. All of it is bounded, however fast the other program is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from steersman.model.drift import Drift, DriftState, by_others, fight
from steersman.model.errors import BusyError
from steersman.model.findings import Finding, Severity
from steersman.model.ruleset import Diff, Ruleset, diff
from steersman.run.observe.events import Recorder
from steersman.run.observe.metrics import Metrics
from steersman.run.serve.http import Answer, Request
from steersman.run.serve.page_builder import PageBuilder, TooManyPagesError
from steersman.run.sync.state import SyncReport
from steersman.run.sync.sync import Sync
from steersman.source.store import Store

log = logging.getLogger(__name__)

_REMEMBERED = 32
_MOST_LINES = 1000
_QUIET = 60.0
"""Seconds between two log lines, and two texts of the Finding, while another program goes on."""


class DriftLog:
    """What other programs changed, and what was done about it."""

    def __init__(
        self,
        store: Store,
        recorder: Recorder,
        metrics: Metrics,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Start without drift.

        Args:
            store: takes the Finding.
            recorder: takes the Events.
            metrics: count repairs.
            wall: seconds since 1970.
        """
        self._store = store
        self._recorder = recorder
        self._metrics = metrics
        self._wall = wall
        self.repairs: deque[Drift] = deque(maxlen=_REMEMBERED)
        """What was repaired, oldest first."""
        self.repaired = 0
        """How often drift was repaired."""
        self.not_repaired: Drift | None = None
        """What the last sync found and could not repair."""
        self._unlogged = 0
        self._logged_at = float("-inf")
        self._found_at = float("-inf")

    def observe(self, report: SyncReport) -> None:
        """Take the drift that a successful sync repaired, if there was any."""
        self.not_repaired = None
        self._metrics.drift_pending_since().set(0)
        if (drift := report.drift) is not None:
            self.repairs.append(drift)
            self.repaired += 1
            metrics = self._metrics
            metrics.drift_repairs().inc()
            metrics.drift_objects().inc(drift.objects)
            self._tell(drift, "repaired")
        self._report()

    def unrepaired(self, drift: Drift) -> None:
        """Take the drift that a failed sync found; it is retried."""
        self._metrics.drift_pending_since().set(drift.at)
        if self.not_repaired != drift:
            self.not_repaired = drift
            self._tell(drift, "not repaired yet, retrying")
        self._report()

    @property
    def summary(self) -> tuple[int, Drift | None]:
        """The number of repairs so far, and the last drift, be it repaired or not."""
        return self.repaired, self.not_repaired or next(reversed(self.repairs), None)

    def _tell(self, drift: Drift, outcome: str) -> None:
        self._metrics.drift_last().set(drift.at)
        # The text of an Event has no number, so that the recorder drops repetitions.
        programs = sorted({writer.program for writer in drift.writers})
        who = ", ".join(programs) or "an unknown program"
        note = f"rules of Services were changed by {who}: {outcome}"
        self._recorder.node("Warning", "RulesChangedByOthers", "CompareRules", note)
        if drift.at - self._logged_at < _QUIET:
            self._unlogged += 1
            return
        more = f"; {self._unlogged} more such changes were not logged" if self._unlogged else ""
        self._unlogged, self._logged_at = 0, drift.at
        example = f", such as {drift.examples[0]}" if drift.examples else ""
        text = "drift: %s%s, changed by %s: %s%s"
        log.warning(text, drift.what, example, drift.who, outcome, more)

    def _report(self) -> None:
        """Report the Finding, or withdraw it."""
        now = self._wall()
        if (drift := self.not_repaired) is not None:
            text = f"{drift.what}, changed by {drift.who}; they are not repaired yet, see the log"
            self._store.report("drift", (Finding("the node", "rules", text, Severity.ERROR),))
            return
        text = fight(self.repairs, now)
        if text and now - self._found_at < _QUIET:
            return  # the numbers in the text change all the time
        self._found_at = now if text else float("-inf")
        found = (Finding("the node", "rules", text),) if text else ()
        self._store.report("drift", found)


class DriftPage:
    """Serves `/drift?lines=N`: compares the kernel now, and tells what was repaired so far."""

    def __init__(
        self, drift: DriftLog, sync: Callable[[], Sync], wall: Callable[[], float] = time.time
    ) -> None:
        """Create the page.

        Args:
            drift: knows the repairs.
            sync: returns the body of the sync loop of the mode that serves.
            wall: seconds since 1970.
        """
        self._drift = drift
        self._sync = sync
        self._wall = wall
        self._started = wall()
        self._builder = PageBuilder()

    async def serve(self, request: Request) -> Answer:
        """Answer with a DriftState; clients that ask at the same time share one comparison."""
        try:
            lines = int(request.query.get("lines", "10"))
        except ValueError:
            return Answer("lines: give a number", 400)
        lines, sync = max(0, min(lines, _MOST_LINES)), self._sync()
        try:
            pieces = await self._builder.page((sync, lines), lambda: self._compare(sync, lines))
        except TooManyPagesError:
            return Answer("too many comparisons are asked for; ask again\n", 503)
        except (BusyError, OSError) as error:
            return Answer(f"the kernel cannot be read now: {error}", 503)
        return Answer(pieces=pieces, content_type="application/json")

    async def _compare(self, sync: Sync, lines: int) -> Iterable[bytes]:
        differs = await compare(sync, lines)
        now, drift = self._wall(), self._drift
        state = DriftState(
            mode=sync.mode.name,
            at=now,
            started=self._started,
            objects=sync.state.objects,
            differs=differs or drift.not_repaired,
            repairs=tuple(drift.repairs),
            repaired=drift.repaired,
            fight=fight(drift.repairs, now),
        )
        return (msgspec.json.encode(state),)


async def compare(sync: Sync, lines: int) -> Drift | None:
    """Compare the kernel with the objects in force, and write nothing.

    Syncs go on while the kernel is read, and what they change meanwhile is left out. Only if
    something else differs do they wait for a second comparison, which can then be trusted: a sync
    may have changed an object, and changed it back.

    Args:
        sync: of the mode that serves.
        lines: lines of the repair that the Drift keeps.

    Returns:
        What other programs changed; None if nothing, or if the objects in force are not known.
    """
    async with sync.between_runs() as objects:
        before = sync.state
    if objects is None:
        return None
    have, repair = await _repair_of_others(sync, objects)
    if not repair:
        return None
    async with sync.between_runs() as objects:  # also waits for a sync that is under way
        changed = sync.state is not before
    if objects is None:
        return None
    if changed:
        after, nothing = await asyncio.to_thread(dict, objects), object()
        keys = (key for part in repair.parts for key in part)
        if all(have.get(key, nothing) != after.get(key, nothing) for key in keys):
            return None
        async with sync.between_runs() as objects:
            if objects is None:
                return None
            _, repair = await _repair_of_others(sync, objects)
    return sync.drift_of(repair, (), lines)


async def _repair_of_others(sync: Sync, objects: Iterable[tuple[Any, Any]]) -> tuple[Ruleset, Diff]:
    """Read the kernel; return the objects, and what repairs the changes by other programs."""
    kernel = await sync.mode.read()

    def work() -> tuple[Ruleset, Diff]:
        have = dict(objects)
        return have, by_others(diff(kernel, have), have, sync.mode.changed_by_others)

    return await asyncio.to_thread(work)
