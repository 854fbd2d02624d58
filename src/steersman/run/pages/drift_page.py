"""The page `/drift`: compares the kernel beside syncs, and tells what was repaired so far."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from steersman.model.drift import Drift, DriftState, by_others, drift_of, fight
from steersman.model.errors import BusyError
from steersman.model.ruleset import Diff, Ruleset, diff
from steersman.run.observe.drift import DriftLog
from steersman.run.serve.http import Answer, Request
from steersman.run.serve.page_builder import PageBuilder, TooManyPagesError
from steersman.run.sync.sync import Sync

_MOST_LINES = 1000


class DriftPage:
    """Serves `/drift?lines=N`."""

    def __init__(self, drift: DriftLog, sync: Callable[[], Sync]) -> None:
        self._drift = drift
        self._sync = sync
        self._started = time.time()
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
        now, drift = time.time(), self._drift
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
    something else differs do they wait for a second comparison, which is exact: an object may have
    been missed in the first one, or changed by a sync and changed back.

    Returns:
        What other programs changed; None if nothing, or if the objects in force are not known.
    """
    async with sync.between_runs() as objects:
        pass
    if objects is None:
        return None
    mode = sync.mode
    if mode.read_beside is None:
        kernel = await mode.worker.do(mode.read)
    else:
        kernel = await asyncio.to_thread(mode.read_beside)
    before, repair = await _repair_of_others(sync, kernel, objects)
    if not repair:
        return None
    async with sync.between_runs() as objects:  # also waits for a sync that is under way
        pass
    if objects is None:
        return None
    after, nothing = await asyncio.to_thread(dict, objects), object()
    keys = (key for part in repair.parts for key in part)
    if all(before.get(key, nothing) != after.get(key, nothing) for key in keys):
        return None
    async with sync.between_runs() as objects:
        if objects is None:
            return None
        _, repair = await _repair_of_others(sync, await mode.worker.do(mode.read), objects)
    return drift_of(repair, mode.words.describe, lines, time.time())


async def _repair_of_others(
    sync: Sync, kernel: Ruleset, objects: Iterable[tuple[Any, Any]]
) -> tuple[Ruleset, Diff]:
    """Return the objects in force, and what repairs the changes by other programs."""

    def work() -> tuple[Ruleset, Diff]:
        have = dict(objects)
        return have, by_others(diff(kernel, have), have, sync.mode.words.changed_by_others)

    return await asyncio.to_thread(work)
