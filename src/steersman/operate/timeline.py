"""The last hour of syncs of a node, as the page `/time` shows it: chart, table, one sync. Pure.

The chart has a fixed number of columns however many syncs there were: each column is the longest
sync that ended in its seconds. Its edges are whole multiples of BIN, so that a column that is over
never changes again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from steersman.model.findings import clipped, printable
from steersman.model.history import History, SyncRecord
from steersman.operate.answer import (
    Chart,
    QuestionError,
    Series,
    Style,
    View,
    page_number,
    rows_of_page,
)

PHASES = ("plan", "render", "read", "diff", "apply")
"""The phases of a sync, in order."""
HOUR = 3600.0
BIN = 20
"""Seconds of a column of the chart."""
PER_PAGE = 50
_SLOW = 1.0
"""Seconds from which a sync is slow."""
_LATE = 10.0
"""Seconds from which a change took long until it was in force."""
_LONGEST = 300
"""Characters of an error in a row."""

Verdict: TypeAlias = Literal["ok", "slow", "drift", "refused", "failed"]
"""The worst about a sync."""
VERDICTS: tuple[Verdict, ...] = ("ok", "slow", "drift", "refused", "failed")
STYLES: Mapping[Verdict, Style] = {
    "ok": "good",
    "slow": "warn",
    "drift": "warn",
    "refused": "bad",
    "failed": "bad",
}


class Row(msgspec.Struct, frozen=True, rename="camel"):
    """A sync."""

    id: str
    """Names the row in an address: `at` in milliseconds."""
    verdict: Verdict
    what: str
    """What changed, in words."""
    note: str
    """What went wrong, in words; "" if nothing did."""
    record: SyncRecord


class Spread(msgspec.Struct, frozen=True, rename="camel"):
    """How a quantity of the syncs is distributed, in seconds."""

    median: float
    p99: float
    most: float


class Timeline(View, frozen=True, kw_only=True):
    """The last hour of syncs of a node."""

    node: str
    now: float
    """Seconds since 1970 by the node's clock, as all times."""
    since: float
    """From when on everything is known."""
    started: float
    syncs: int
    changes: int
    """Changes of Services and their EndpointSlices."""
    written: int
    """Kernel objects that were added, changed or removed."""
    busy: float
    """Share of the time that syncs took."""
    duration: Spread | None
    """None without a sync."""
    lag: Spread | None
    """From the cause of a change until it was in force; None without changes."""
    verdicts: Mapping[str, int]
    """The number of rows by verdict."""
    phases: Chart
    """Seconds by phase, of the longest sync of each column."""
    lags: Chart
    """The greatest lag of each column, in seconds."""
    rows: tuple[Row, ...]
    """Newest first: those of the page that was asked for."""
    matching: int
    """The number of rows that were asked for, on all pages."""
    only: str = ""
    """The verdict that was asked for, or `problems` for all but `ok`."""
    page: int = 1
    pages: int = 1
    chosen: Row | None = None
    """The row whose details were asked for."""
    gone: bool = False
    """The row that was asked for is no longer remembered."""
    nodes: tuple[str, ...] = ()
    """Nodes that can be asked for."""


class Asked(msgspec.Struct, frozen=True):
    """Which part of a timeline is asked for."""

    only: str = ""
    page: int = 1
    sync: str = ""
    """The `id` of a row; "" for none."""


def read_asked(query: Mapping[str, str]) -> Asked:
    """Return what a query string asks for.

    Raises:
        QuestionError: there is no such verdict.
    """
    only = query.get("only", "")
    if only not in ("", "problems", *VERDICTS):
        known = ", ".join(("problems", *VERDICTS))
        raise QuestionError(f"there are no syncs of kind {clipped(only, 40)}: {known}")
    return Asked(only, page_number(query), query.get("sync", ""))


def timeline(history: History, asked: Asked | None = None) -> Timeline:
    """Return what a node remembers of its syncs.

    Args:
        history: the answer of the node.
        asked: the part that is asked for; by default the newest rows.
    """
    asked = asked or Asked()
    records = [each for each in history.records if each.until > history.now - HOUR]
    since = max(history.since or history.started, history.now - HOUR)
    rows = [row_of(record) for record in reversed(records)]
    matching = [row for row in rows if fits(row.verdict, asked.only)]
    shown = rows_of_page(matching, asked.page, PER_PAGE)
    chosen = next((row for row in rows if row.id == asked.sync), None)
    span = max(history.now - since, 1.0)
    phases, lags = charts(records, since, history.now)
    return Timeline(
        source=f"node {history.node}",
        node=history.node,
        now=history.now,
        since=since,
        started=history.started,
        syncs=len(records),
        changes=sum(record.services for record in records),
        written=sum(record.added + record.changed + record.removed for record in records),
        busy=min(1.0, sum(record.seconds for record in records) / span),
        duration=_spread([record.seconds for record in records]),
        lag=_spread([record.lag for record in records if record.lag is not None]),
        verdicts={kind: sum(row.verdict == kind for row in rows) for kind in VERDICTS},
        phases=phases,
        lags=lags,
        rows=tuple(shown.rows),
        matching=len(matching),
        only=asked.only,
        page=shown.page,
        pages=shown.pages,
        chosen=chosen,
        gone=bool(asked.sync) and chosen is None,
    )


def fits(verdict: Verdict, only: str) -> bool:
    """Return whether a row is asked for."""
    return only in ("", verdict) or (only == "problems" and verdict != "ok")


def charts(records: Iterable[SyncRecord], since: float, now: float) -> tuple[Chart, Chart]:
    """Return the charts of the phases and of the lag, from `since` to `now`."""
    first, last = math.ceil(since / BIN), math.ceil(now / BIN)
    longest: dict[int, SyncRecord] = {}
    lags: dict[int, float] = {}
    for record in records:
        column = max(first, math.ceil(record.until / BIN))
        if (known := longest.get(column)) is None or known.seconds < record.seconds:
            longest[column] = record
        if record.lag is not None:
            lags[column] = max(lags.get(column, 0.0), record.lag)
    columns = range(first, last + 1)
    names = [name for name in PHASES if any(name in each.phases for each in longest.values())]
    names += sorted({name for each in longest.values() for name in each.phases}.difference(PHASES))

    def spent(column: int, name: str) -> float | None:
        record = longest.get(column)
        if record is None:
            return None
        return round(record.phases.get(name, 0.0), 6)

    times = tuple(column * BIN for column in columns)
    phases = [Series(name, tuple(spent(column, name) for column in columns)) for name in names]
    lag = Series("lag", tuple(round(lags[c], 6) if c in lags else None for c in columns))
    return Chart(times, phases, "s", "bars", stacked=True), Chart(times, (lag,), "s", "points")


def row_of(record: SyncRecord) -> Row:
    """Return the row of a sync."""
    verdict: Verdict = "ok"
    if record.failure:
        verdict = "failed"
    elif record.refused:
        verdict = "refused"
    elif record.drift:
        verdict = "drift"
    elif record.seconds >= _SLOW or (record.lag or 0.0) >= _LATE:
        verdict = "slow"
    notes = []
    if record.failure:
        notes.append(f"failed: {record.failure}")
    if record.refused:
        first = f", such as {record.refusals[0].owner}" if record.refusals else ""
        notes.append(f"{record.refused} refused by the kernel{first}")
    if record.drift:
        notes.append(f"repaired: {record.drift}")
    note = printable(clipped("; ".join(notes), _LONGEST))
    return Row(f"{record.at * 1e3:.0f}", verdict, words_of(record), note, record)


def words_of(record: SyncRecord) -> str:
    """Describe what a sync changed."""
    parts = []
    if record.services:
        names = ", ".join(map(printable, record.names[:2]))
        more = record.services - len(record.names[:2])
        count = f"{record.services} Service{'s' * (record.services != 1)}"
        rest = f" and {more} more" if more > 0 and names else ""
        parts.append(f"{count}: {names}{rest}" if names else count)
    if record.node:
        parts.append("the node")
    if not parts:
        parts.append("nothing" if record.reason == "changes" else record.reason)
    return ", ".join(parts)


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return Spread(ordered[last // 2], ordered[math.ceil(last * 0.99)], ordered[last])
