"""Series by ServicePort, frontend and endpoint, within a limit; all others are summed. Pure.

A cluster has more endpoints than a fleet of nodes can afford series for. So a page (a `View`) lists
the busiest ServicePorts as far as `MOST_SERIES` goes, and one more series for each metric counts
what happens to everybody else, under the Service name `REST`.

No series falls when a ServicePort enters or leaves the list. A listed row shows its whole count.
The rest is not the sum of whole counts (which would fall when a row enters the list): it grows by
what rows count while they are not listed. So the sum of the rates is the node's rate at any time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import NamedTuple, TypeAlias

from prometheus_client.metrics_core import Metric

from steersman.model.names import ServicePortName
from steersman.model.plan import ServicePlan
from steersman.model.stats import frontend_label
from steersman.run.metrics import Series

MOST_SERIES = 5_000
"""Series of a page, and one more for each metric."""
MOST_VIEWS = 32
"""Views whose rests are kept; the one that was not asked for the longest is forgotten."""
_MOST_GONE = 10_000
"""Rows that are gone and remembered, as endpoints come back with what they had counted."""
REST = "(rest)"
"""The name under which all other Services are summed; no Service can have it."""

Name: TypeAlias = tuple[ServicePortName, str]
"""A ServicePort, and one of its frontends or endpoints."""
Values: TypeAlias = tuple[float, ...]


class Column(NamedTuple):
    """What a place in the values of a row counts."""

    metric: str
    help: str
    direction: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """A kind of rows."""

    label: str
    """`endpoint` or `frontend`."""
    columns: tuple[Column, ...]
    """The first one counts connections; rows may have fewer values than there are columns."""


Counts: TypeAlias = Mapping[Table, Mapping[Name, Values]]
"""What has been counted so far; rows that have counted nothing may be left out."""


class Filter(NamedTuple):
    """Which ServicePorts a page is about."""

    namespace: str = ""
    service: str = ""
    top: int = MOST_SERIES
    """How many ServicePorts are listed at most, the busiest first."""

    def matches(self, name: ServicePortName) -> bool:
        """Return whether a ServicePort is in the namespace and of the Service; "" is any."""
        return self.namespace in ("", name.namespace) and self.service in ("", name.service)


class View:
    """What one page lists, and the sums of what it does not list."""

    def __init__(self, of: Filter) -> None:
        """Begin with nothing listed; the rest begins as the sum of what the first page leaves."""
        self.filter = of
        self._listed: dict[tuple[Table, Name], Values] = {}
        """The rows of the last page, with the values that it showed."""
        self._rest: dict[Table, Values] | None = None

    def note(self, table: Table, name: Name, more: Values) -> None:
        """Add what a row has counted since the last update, unless it is listed."""
        if self._rest is not None and (table, name) not in self._listed:
            self._add(self._rest, table, name, more)

    def _add(self, rest: dict[Table, Values], table: Table, name: Name, more: Values) -> None:
        if self.filter.matches(name[0]):
            rest[table] = _sum(rest.get(table, ()), more)

    def metrics(self, plans: Iterable[ServicePlan], counts: Counts) -> Iterator[Metric]:
        """Return the series of a page.

        Args:
            plans: the ServicePorts that may be listed.
            counts: as of the last update.
        """
        matching = (plan for plan in plans if self.filter.matches(plan.key.name))
        pages = _choose(matching, counts, self.filter.top)
        before, self._listed = (
            self._listed,
            {
                (table, name): values
                for table, rows in pages.items()
                for name, values in rows.items()
            },
        )
        if (rest := self._rest) is None:
            rest = self._rest = {}
            for table, rows in counts.items():
                for name, values in rows.items():
                    self.note(table, name, values)
        for (table, name), values in before.items():
            if (table, name) not in self._listed:  # the last page did not show all of it
                more = _more(values, counts[table].get(name, values))
                self._add(rest, table, name, more)
        for table, rows in pages.items():
            lines = [((*name, end), values) for (name, end), values in rows.items()]
            others = (self.filter.namespace, REST, "", "", "")
            yield from _series(table, [*lines, (others, rest.get(table, (0,)))])


class Ledger:
    """What was counted when, and the views of it."""

    def __init__(self, default: Filter | None = None) -> None:
        """Begin at zero, with the one view that is always kept."""
        self.default = View(default or Filter())
        self.counts: Counts = {}
        self._gone: OrderedDict[tuple[Table, Name], Values] = OrderedDict()
        self._views: OrderedDict[Filter, View] = OrderedDict()

    def update(self, counts: Counts) -> None:
        """Take what has been counted so far."""
        for table, rows in counts.items():
            last = self.counts.get(table, {})
            for name, values in rows.items():
                before = last.get(name)
                if before == values:
                    continue
                if before is None:
                    before = self._gone.pop((table, name), ())
                more = _more(before, values)
                if any(more):
                    for view in (self.default, *self._views.values()):
                        view.note(table, name, more)
            for name in last.keys() - rows.keys():
                self._gone[table, name] = last[name]
        while len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)
        self.counts = counts

    def view(self, of: Filter) -> View:
        """Return the view of a filter."""
        if (view := self._views.get(of)) is None:
            view = self._views[of] = View(of)
        self._views.move_to_end(of)
        if len(self._views) > MOST_VIEWS:
            self._views.popitem(last=False)
        return view


def _choose(
    plans: Iterable[ServicePlan], counts: Counts, top: int
) -> dict[Table, dict[Name, Values]]:
    """Choose rows of the busiest ServicePorts, and in each the busiest rows."""
    by_name: dict[ServicePortName, list[ServicePlan]] = {}
    for plan in plans:
        by_name.setdefault(plan.key.name, []).append(plan)
    busy: Counter[ServicePortName] = Counter()
    for rows in counts.values():
        for (name, _), values in rows.items():
            busy[name] += int(values[0])
    widths = {table: max(map(len, rows.values()), default=1) for table, rows in counts.items()}
    chosen: dict[Table, dict[Name, Values]] = {table: {} for table in counts}
    room = MOST_SERIES
    ranked = sorted(by_name, key=lambda name: (-busy[name], name)) if counts else ()
    for name in ranked[:top]:
        for table, rows in counts.items():
            width = widths[table]
            nothing = (0,) * width
            places = dict.fromkeys(_places(table.label, by_name[name]))
            found = [((name, place), rows.get((name, place), nothing)) for place in places]
            if room < len(found) * width:
                found.sort(key=lambda row: -row[1][0])
                del found[room // width :]
            chosen[table].update(found)
            room -= len(found) * width
        if room < min(widths.values(), default=1):
            break
    return chosen


def _places(label: str, plans: Iterable[ServicePlan]) -> Iterator[str]:
    for plan in plans:
        if label == "frontend":
            yield from map(frontend_label, plan.frontends)
        else:
            yield from map(str, plan.reachable)


def _series(table: Table, lines: Sequence[tuple[tuple[str, ...], Values]]) -> Iterator[Metric]:
    """Return a counter for each metric of a table, as far as some line has values for it."""
    width = max(len(values) for _, values in lines)
    places: dict[str, list[tuple[int, Column]]] = {}
    for place, column in enumerate(table.columns[:width]):
        places.setdefault(column.metric, []).append((place, column))
    labels = ("namespace", "service", "port", "protocol", table.label)
    for metric, columns in places.items():
        first = columns[0][1]
        directed = ("direction",) if first.direction else ()
        yield Series(metric, first.help, (*labels, *directed), _samples(lines, columns))


def _samples(
    lines: Iterable[tuple[tuple[str, ...], Values]], columns: Sequence[tuple[int, Column]]
) -> Iterator[tuple[tuple[str, ...], float]]:
    for labels, values in lines:
        for place, column in columns:
            if len(values) > place:
                directed = (column.direction,) if column.direction else ()
                yield (*labels, *directed), values[place]


def _more(before: Values, now: Values) -> Values:
    """Return what was counted in between; a row that has counted less began again at zero."""
    if len(before) != len(now) or any(new < old for old, new in zip(before, now, strict=True)):
        return now
    return tuple(map(sub, now, before))


def _sum(one: Values, other: Values) -> Values:
    width = max(len(one), len(other))
    padded = (values + (0,) * (width - len(values)) for values in (one, other))
    return tuple(map(add, *padded))
