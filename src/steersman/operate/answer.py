"""The form of every answer: typed data, an exit code, and what people see of it.

A library function returns a subclass of Answer. The command line prints its blocks as text or as
tables, or the struct as JSON or YAML; pages use the same struct. What only a page shows is a View.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from steersman.model.times import rfc3339

T = TypeVar("T")
_DAY, _HOUR, _MINUTE = 86400, 3600, 60

Style: TypeAlias = Literal["", "good", "warn", "bad", "dim", "title"]
Span: TypeAlias = tuple[str, Style]
"""A part of a line."""
Cell: TypeAlias = str | Span


class QuestionError(Exception):
    """A question could not be answered; the message says why and what to do."""


class Line(msgspec.Struct, frozen=True):
    """A line of text."""

    text: str
    style: Style = ""
    indent: int = 0
    """Columns."""
    hang: int = 0
    """Column at which the further lines of a sentence begin on a terminal; 0 if the text stays
    whole, as what is copied from there: rules, commands."""


class Table(msgspec.Struct, frozen=True):
    """Rows below the names of their columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    empty: str = ""
    """The line to print if there are no rows; "" for none."""


def table_of(
    rows: Sequence[Mapping[str, Cell]], empty: str = "", unless_empty: Collection[str] = ()
) -> Table:
    """Return a table of rows that have the same columns.

    Args:
        rows: the cells by the name of their column.
        empty: see Table.
        unless_empty: columns that are left out if they are "-" in every row.
    """
    columns = [
        name
        for name in (rows[0] if rows else ())
        if name not in unless_empty or any(row[name] != "-" for row in rows)
    ]
    return Table(columns, [[row[name] for name in columns] for row in rows], empty=empty)


Block: TypeAlias = Line | Table


class Series(msgspec.Struct, frozen=True, rename="camel"):
    """Values over time, one for each time of the Chart; None where there is none."""

    label: str
    values: Sequence[float | None]


class Chart(msgspec.Struct, frozen=True, rename="camel"):
    """Series over a common time, as pages draw them."""

    times: Sequence[float]
    """Seconds since 1970, ascending."""
    series: Sequence[Series]
    unit: str = ""
    """Behind each value: `/s`, or `s` for durations."""
    kind: Literal["lines", "points", "bars"] = "lines"
    stacked: bool = False
    """Whether values are drawn on top of each other."""


class View(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of what a page shows, by its template."""

    source: str = ""
    """The place that the World of this answer was read from, for people."""


class Answer(View, frozen=True, kw_only=True, rename="camel"):
    """Base of what a command answers."""

    @property
    def exit_code(self) -> int:
        """0 if all is well, 1 if something is wrong."""
        return 0

    def blocks(self, wide: bool) -> Iterator[Block]:
        """Yield the blocks for people, by default none; `wide` asks for every column."""
        del wide
        yield from ()

    @property
    def data(self) -> Any:
        """The answer as it is printed as JSON or YAML: anything that msgspec encodes."""
        return self

    @property
    def watched(self) -> Any:
        """The part of `data` of which a change is news, for --watch."""
        return self.data


class RowsOfPage(NamedTuple, Generic[T]):
    """The rows of one page of a long list."""

    rows: Sequence[T]
    page: int
    """Its number, from 1."""
    pages: int
    """The number of pages, at least 1."""


def rows_of_page(rows: Sequence[T], page: int, size: int) -> RowsOfPage[T]:
    """Return the rows of a page, those of the last one if it is beyond."""
    pages = max(1, -(-len(rows) // size))
    page = min(max(1, page), pages)
    return RowsOfPage(rows[(page - 1) * size : page * size], page, pages)


def page_number(query: Mapping[str, str]) -> int:
    """Return the page that an address asks for; 1 if it names none, or no number."""
    text = query.get("page", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 1


def age_of(created: str | None, now: float) -> float | None:
    """Return seconds since a timestamp of Kubernetes; None if it is none."""
    # The API server always writes it in UTC; a manifest may hold anything.
    try:
        at = datetime.fromisoformat(created or "")
    except ValueError:
        return None
    return now - (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def age_text(seconds: float | None) -> str:
    """Return an age as kubectl prints it: `3d`, `5h`, `12m`, `40s`; `-` if it is not known."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    for unit, size in (("d", _DAY), ("h", _HOUR), ("m", _MINUTE)):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def known_time(at: float) -> str | None:
    """Return a time in RFC 3339; None for 0, which is unknown."""
    return rfc3339(int(at) * 10**9) if at else None
