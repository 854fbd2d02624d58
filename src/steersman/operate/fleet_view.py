"""All nodes of a cluster in one answer: worst first, with the problems of each. Pure.

The page of the cluster and `steersman nodes` show it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias

import msgspec

from steersman.model.findings import Severity, clipped, printable
from steersman.operate.answer import (
    Answer,
    Block,
    Cell,
    Line,
    Style,
    known_time,
    page_number,
    rows_of_page,
    table_of,
)
from steersman.operate.node_trouble import (
    HEALTHS,
    Disagreement,
    Health,
    NodeTrouble,
    SeenNode,
    troubles_of,
)
from steersman.run.pages.conditions import count_words

PAGE_SIZE: Final = 100
_SKEW = 5.0
"""Seconds from which a node's clock counts as wrong."""
_LONGEST = 300
"""Characters of a sentence about a node."""

_ORDER: Final = {health: number for number, health in enumerate(HEALTHS)}
_STYLES: Final[Mapping[str, Style]] = {"unreachable": "bad", "failing": "bad", "ok": "good"}

Sort: TypeAlias = Literal["health", "name", "sync", "lag", "findings", "cpu", "memory"]
SORTS: Final[tuple[Sort, ...]] = ("health", "name", "sync", "lag", "findings", "cpu", "memory")


class FleetQuery(msgspec.Struct, frozen=True, rename="camel"):
    """Which nodes to list, as in the address of the page; empty fields select everything."""

    text: str = ""
    """Part of a name, or of a sentence about the node."""
    mode: str = ""
    version: str = ""
    health: str = ""
    sort: Sort = "health"
    page: int = 1

    def selects(self, row: NodeRow) -> bool:
        """Whether a node is as the query asks."""
        text = self.text.casefold()
        return (
            self.mode in ("", row.mode)
            and self.version in ("", row.version)
            and self.health in ("", row.health)
            and (not text or any(text in each.casefold() for each in (row.name, *row.problems)))
        )


_EVERYTHING: Final = FleetQuery()


class NodeRow(msgspec.Struct, frozen=True, rename="camel"):
    """A node as a row. Times are seconds since 1970 by our own clock, 0 for never."""

    name: str
    health: Health
    problems: tuple[str, ...] = ()
    """Worst first, a sentence each."""
    address: str = ""
    mode: str = ""
    variant: str = ""
    version: str = ""
    started: float = 0.0
    heard: float = 0.0
    synced: float = 0.0
    """When the last sync reached the kernel."""
    sync_seconds: float | None = None
    """Duration of that sync."""
    lag: float | None = None
    """Seconds between the last change and its rules in force."""
    lag_p99: float | None = None
    revision: int = 0
    services: int = 0
    objects: int = 0
    errors: int = 0
    """Findings of severity error."""
    warnings: int = 0
    drift: str = ""
    """The last drift, in words; "" if there was none."""
    drift_at: float = 0.0
    cpu: float | None = None
    """Share of a core."""
    memory: int | None = None
    """Bytes."""


class Group(msgspec.Struct, frozen=True):
    """Nodes that have something in common."""

    name: str
    nodes: int


class FleetView(Answer, frozen=True, kw_only=True, rename="camel"):
    """All nodes in numbers, those of one page as rows, and which of them disagree."""

    total: int
    problem: str = ""
    """Why the nodes cannot be found."""
    query: FleetQuery = FleetQuery()
    healths: tuple[Group, ...] = ()
    """Number of nodes by their health, worst first; 0 is listed, too."""
    modes: tuple[Group, ...] = ()
    versions: tuple[Group, ...] = ()
    """Newest last; more than one during a rollout."""
    unreachable: int = 0
    not_healthy: int = 0
    """Unreachable ones, those that fail, and those that wait for the first sync."""
    drifted: int = 0
    errors: int = 0
    """Findings of severity error on all nodes."""
    warnings: int = 0
    slowest: float | None = None
    """The longest lag of all nodes, 99th percentile, in seconds."""
    disagreements: tuple[Disagreement, ...] = ()
    matching: int = 0
    """Nodes that the query selects."""
    pages: int = 1
    rows: tuple[NodeRow, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 if a node is not as it should be, or there is none."""
        well = sum(group.nodes for group in self.healths if group.name == "ok")
        return int(bool(self.problem) or not self.total or well < self.total)

    def blocks(self, wide: bool) -> Iterator[Block]:
        """Yield the counts, a row for each node, and the disagreements."""
        counts = ", ".join(f"{g.nodes} {g.name}" for g in self.healths if g.nodes)
        yield Line(f"{self.total} node{'s' * (self.total != 1)}: {counts or 'none'}", "title")
        if self.problem:
            yield Line(self.problem, "bad")
        if len(self.versions) > 1:
            yield Line("versions  " + ", ".join(f"{g.name}: {g.nodes}" for g in self.versions))
        rows: list[dict[str, Cell]] = []
        for row in self.rows:
            bad = {Severity.ERROR: row.errors, Severity.WARNING: row.warnings}
            cells: dict[str, Cell] = {
                "NODE": row.name,
                "HEALTH": (row.health, _STYLES.get(row.health, "warn")),
                "MODE": row.mode or "-",
                "VERSION": row.version or "-",
                "SYNCED": known_time(row.synced) or "never",
                "LAG": "-" if row.lag is None else f"{row.lag:.2f} s",
                "FINDINGS": count_words(bad) if any(bad.values()) else "none",
                "CPU": "-" if row.cpu is None else f"{row.cpu:.1%}",
                "MEMORY": "-" if row.memory is None else f"{row.memory / (1 << 20):.0f} MiB",
            }
            if wide:
                cells["WHERE"] = row.address
            rows.append(cells | {"PROBLEM": "; ".join(row.problems)})
        yield table_of(rows)
        if (more := self.matching - len(self.rows)) > 0:
            yield Line(f"and {more} more", "dim")
        for each in self.disagreements:
            yield Line(disagreement_text(each), "bad")


def disagreement_text(found: Disagreement) -> str:
    """Say in a sentence which nodes disagree with the others, and about what."""
    first, more = ", ".join(found.nodes[:3]), len(found.nodes) - 3
    who = f"{first} and {more} more" if more > 0 else first
    verb = "serve" if len(found.nodes) > 1 else "serves"
    if found.problem:
        return f"{who} {verb} something else than {found.reference}: {found.problem}"
    names, others = ", ".join(found.services[:5]), found.number - len(found.services[:5])
    what = f"{names} and {others} more Services" if others > 0 else names
    return f"{who} {verb} something else than {found.reference}: {what}"


def fleet_view(
    nodes: Sequence[SeenNode],
    now: float,
    query: FleetQuery = _EVERYTHING,
    *,
    disagreements: Sequence[Disagreement] = (),
    problem: str = "",
    page_size: int = PAGE_SIZE,
) -> FleetView:
    """Return the answer about all nodes.

    Args:
        nodes: as last seen.
        now: seconds since 1970.
        query: which of them to list.
        disagreements: which of them serve something else.
        problem: why there may be others.
        page_size: rows of one page.
    """
    against = {name: each for each in disagreements for name in each.nodes}
    troubles = [list(troubles_of(node, now)) for node in nodes]
    rows = [
        row_of(node, wrong, against.get(node.name))
        for node, wrong in zip(nodes, troubles, strict=True)
    ]
    healths = Counter(row.health for row in rows)
    chosen = sorted((row for row in rows if query.selects(row)), key=sort_key(query.sort))
    shown = rows_of_page(chosen, query.page, page_size)
    lags = [row.lag_p99 for row in rows if row.lag_p99 is not None]
    return FleetView(
        total=len(rows),
        problem=problem,
        query=msgspec.structs.replace(query, page=shown.page),
        healths=tuple(Group(health, healths[health]) for health in HEALTHS),
        modes=_groups(row.mode for row in rows),
        versions=_groups(row.version for row in rows),
        unreachable=healths["unreachable"],
        not_healthy=sum(healths[each] for each in ("unreachable", "failing", "waiting")),
        drifted=sum(any(each.health == "drifted" for each in wrong) for wrong in troubles),
        errors=sum(row.errors for row in rows),
        warnings=sum(row.warnings for row in rows),
        slowest=max(lags, default=None),
        disagreements=tuple(disagreements),
        matching=len(chosen),
        pages=shown.pages,
        rows=tuple(shown.rows),
    )


def query_of(values: Mapping[str, str]) -> FleetQuery:
    """Return the query of an address; values that mean nothing are left out."""
    sort: Sort = next((each for each in SORTS if each == values.get("sort")), "health")
    return FleetQuery(
        values.get("q", "").strip(),
        values.get("mode", ""),
        values.get("version", ""),
        values.get("health", ""),
        sort,
        page_number(values),
    )


def _groups(names: Iterator[str]) -> tuple[Group, ...]:
    counts = Counter(name for name in names if name)
    return tuple(Group(name, counts[name]) for name in sorted(counts, key=natural))


@lru_cache(4096)
def natural(text: str) -> tuple[str | int, ...]:
    """Return a key by which 0.10.0 comes after 0.9.1, and node-10 after node-9."""
    # Every other part is a number, so parts of the same place have the same type.
    parts = re.split("([0-9]+)", text)
    return tuple(int(part) if place % 2 else part for place, part in enumerate(parts))


def row_of(
    node: SeenNode, troubles: Iterable[NodeTrouble], disagreement: Disagreement | None
) -> NodeRow:
    """Return the row of a node with these troubles."""
    found: list[tuple[Health, str]] = [(each.health, each.sentence) for each in troubles]
    if disagreement is not None:
        number = disagreement.number
        what = f"about {number} Service{'s' * (number != 1)}" if number else "with the others"
        found.append(("disagrees", f"disagrees with {disagreement.reference} {what}"))
    found.sort(key=lambda each: _ORDER[each[0]])
    health = found[0][0] if found else "ok"
    problems = tuple(clipped(printable(text), _LONGEST) for _, text in found)
    state = node.state
    if state is None:
        return NodeRow(node.name, health, problems, node.address, heard=node.heard)
    # The node's clock may be wrong. Small differences are the way of the state to us.
    ahead = state.now - node.received
    ahead = ahead if abs(ahead) > _SKEW else 0.0
    drift = state.drift
    return NodeRow(
        node.name,
        health,
        problems,
        node.address,
        state.mode,
        state.variant,
        state.version,
        state.started - ahead,
        node.heard,
        state.synced_at and state.synced_at - ahead,
        state.sync_seconds if state.synced_at else None,
        state.lag,
        state.lag_p99,
        state.revision,
        state.services,
        state.objects,
        state.finding_counts.get(Severity.ERROR, 0),
        state.finding_counts.get(Severity.WARNING, 0),
        f"{drift.what}, by {drift.who}" if drift else "",
        drift.at - ahead if drift else 0.0,
        state.cpu,
        state.memory,
    )


def sort_key(sort: Sort) -> Callable[[NodeRow], tuple[Any, ...]]:
    """Return the key of an order; nodes that are equal by it come by name."""
    first: Mapping[Sort, Callable[[NodeRow], Any]] = {
        "health": lambda row: _ORDER[row.health],
        "name": lambda _: 0,
        "sync": lambda row: row.synced,  # the one that has waited longest comes first
        "lag": lambda row: -(row.lag_p99 or row.lag or 0.0),
        "findings": lambda row: (-row.errors, -row.warnings),
        "cpu": lambda row: -(row.cpu or 0.0),
        "memory": lambda row: -(row.memory or 0),
    }
    return lambda row: (first[sort](row), natural(row.name))
