"""Series by ServicePort, frontend and endpoint, within a limit; all others are summed. Pure.

A cluster has more endpoints than a fleet of nodes can afford series for. So a page (a `View`) lists
the busiest ServicePorts up to `MOST_SERIES`, and one more series for each metric sums all others,
under the Service name `REST`.

No series falls when a ServicePort enters or leaves the list. A listed row shows its whole count.
The rest is not the sum of whole counts (which would fall when a row enters the list): it grows by
the counts of rows while they are not listed. So the sum of the rates is always the node's rate:

    scrape      1      2      3
    row a      10     12     15     listed all the time: 10, 12, 15
    row b       7      9      9     listed from scrape 2: 9, 9
    rest        7      9      9     b's 7 of before, and 2 until it was listed; never falls
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple, TypeAlias

import msgspec

from steersman.model.names import ServicePortName
from steersman.model.plan import ServicePlan
from steersman.model.stats import frontend_label, increase
from steersman.run.observe import prometheus
from steersman.run.observe.prometheus import Declared, Metric

MOST_SERIES = 5_000
"""Series of a page, apart from one more for each metric."""
MOST_VIEWS = 32
"""Views that are kept; beyond that, the least recently used one is dropped."""
_MOST_GONE = 10_000
"""Removed rows that are remembered: endpoints come back with their previous counts."""
REST = "(rest)"
"""The name for the sum of all other Services; no Service can have it."""

Name: TypeAlias = tuple[ServicePortName, str]
"""A ServicePort, and one of its frontends or endpoints."""
Values: TypeAlias = tuple[float, ...]


class Column(NamedTuple):
    """The meaning of one position in the values of a row."""

    metric: Declared[prometheus.Counter]
    """Its labels are those of a ServicePort, `endpoint` or `frontend`, and perhaps `direction`."""
    direction: str = ""


class Table(msgspec.Struct, frozen=True, eq=False):
    """A kind of rows."""

    label: str
    """`endpoint` or `frontend`."""
    columns: tuple[Column, ...]
    """The first one counts connections; rows may have fewer values than columns."""


Counts: TypeAlias = Mapping[Table, Mapping[Name, Values]]
"""Counts so far; rows at zero may be missing."""


class ServiceFilter(NamedTuple):
    """The ServicePorts of a page."""

    namespace: str = ""
    service: str = ""
    top: int = MOST_SERIES
    """Maximum number of ServicePorts listed, the busiest first."""

    def matches(self, name: ServicePortName) -> bool:
        """Return whether a ServicePort matches; "" matches any namespace or Service."""
        return self.namespace in ("", name.namespace) and self.service in ("", name.service)


class View:
    """The rows that one page lists, and the sums of all others."""

    def __init__(self, of: ServiceFilter) -> None:
        """Start with nothing listed; the rest starts as the sum of rows the first page omits."""
        self.filter = of
        self._listed: dict[tuple[Table, Name], Values] = {}
        """The rows of the last page, with the values shown."""
        self._rest: dict[Table, Values] | None = None

    def note(self, table: Table, name: Name, more: Values) -> None:
        """Add the increase of a row since the last update, unless it is listed."""
        if self._rest is not None and (table, name) not in self._listed:
            self._add(self._rest, table, name, more)

    def _add(self, rest: dict[Table, Values], table: Table, name: Name, more: Values) -> None:
        if self.filter.matches(name[0]):
            sums = zip_longest(rest.get(table, ()), more, fillvalue=0)
            rest[table] = tuple(map(sum, sums))

    def metrics(self, plans: Iterable[ServicePlan], counts: Counts) -> Iterator[Metric]:
        """Return the series of a page."""
        # Choose the rows of this page; remember their values for the next one.
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
        # The first page: everything that it omits has been counted before.
        if (rest := self._rest) is None:
            rest = self._rest = {}
            for table, rows in counts.items():
                for name, values in rows.items():
                    self.note(table, name, values)
        for (table, name), values in before.items():
            if (table, name) not in self._listed:  # it has counted more since the last page
                more = increase(values, counts[table].get(name, values))
                self._add(rest, table, name, more)
        for table, rows in pages.items():
            lines = [((*name, end), values) for (name, end), values in rows.items()]
            others = (self.filter.namespace, REST, "", "", "")
            yield from _series(table, [*lines, (others, rest.get(table, (0,)))])


class Ledger:
    """The counts of the last update, and the views of them."""

    def __init__(self, default: ServiceFilter | None = None) -> None:
        """Start at zero, with the one view that is always kept."""
        self.default = View(default or ServiceFilter())
        self.counts: Counts = {}
        self._gone: OrderedDict[tuple[Table, Name], Values] = OrderedDict()
        self._views: OrderedDict[ServiceFilter, View] = OrderedDict()

    def update(self, counts: Counts) -> None:
        """Replace the counts; give each view the increases."""
        for table, rows in counts.items():
            last = self.counts.get(table, {})
            for name, values in rows.items():
                before = last.get(name)
                if before == values:
                    continue
                if before is None:
                    before = self._gone.pop((table, name), ())
                more = increase(before, values)
                if any(more):
                    for view in (self.default, *self._views.values()):
                        view.note(table, name, more)
            for name in last.keys() - rows.keys():
                self._gone[table, name] = last[name]
        while len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)
        self.counts = counts

    def view(self, of: ServiceFilter) -> View:
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
    """Return rows of the busiest ServicePorts, and in each the busiest rows."""
    # Rank the ServicePorts by their connections, over both families.
    by_name: dict[ServicePortName, list[ServicePlan]] = {}
    for plan in plans:
        by_name.setdefault(plan.key.name, []).append(plan)
    busy: Counter[ServicePortName] = Counter()
    for rows in counts.values():
        for (name, _), values in rows.items():
            busy[name] += int(values[0])
    widths = {table: max(map(len, rows.values()), default=1) for table, rows in counts.items()}
    chosen: dict[Table, dict[Name, Values]] = {table: {} for table in counts}
    # List them until the series are used up; of the last one only its busiest rows.
    room = MOST_SERIES
    ranked = sorted(by_name, key=lambda name: (-busy[name], name)) if counts else ()
    for name in ranked[:top]:
        for table, rows in counts.items():
            width = widths[table]
            nothing = (0,) * width
            ends = [
                map(frontend_label, plan.frontends)
                if table.label == "frontend"
                else map(str, plan.reachable)
                for plan in by_name[name]
            ]
            places = dict.fromkeys(chain.from_iterable(ends))
            found = [((name, place), rows.get((name, place), nothing)) for place in places]
            if room < len(found) * width:
                found.sort(key=lambda row: -row[1][0])
                del found[room // width :]
            chosen[table].update(found)
            room -= len(found) * width
        if room < min(widths.values(), default=1):
            break
    return chosen


def _series(table: Table, lines: Sequence[tuple[tuple[str, ...], Values]]) -> Iterator[Metric]:
    """Yield a counter for each metric of a table that some line has values for."""
    width = max(len(values) for _, values in lines)
    places: dict[Declared[prometheus.Counter], list[tuple[int, Column]]] = {}
    for place, column in enumerate(table.columns[:width]):
        places.setdefault(column.metric, []).append((place, column))
    for metric, columns in places.items():
        yield metric.streamed(_samples(lines, columns))


def _samples(
    lines: Iterable[tuple[tuple[str, ...], Values]], columns: Sequence[tuple[int, Column]]
) -> Iterator[tuple[tuple[str, ...], float]]:
    for labels, values in lines:
        for place, column in columns:
            if len(values) > place:
                directed = (column.direction,) if column.direction else ()
                yield (*labels, *directed), values[place]
