"""The answer of `steersman connectivity`: what was tried, from which node, and what failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

import msgspec

from steersman.operate.answer import Answer, Block, Cell, Line, Style, Table

NAMESPACE = "steersman-connectivity"
"""Of our Services."""
Result: TypeAlias = Literal["ok", "failed", "not tried"]
_STYLES: Mapping[Result, Style] = {"ok": "good", "failed": "bad", "not tried": "dim"}


class Tried(msgspec.Struct, frozen=True, rename="camel"):
    """One kind of connection that was tried."""

    what: str
    """Such as `pod to cluster IP, TCP`."""
    family: str
    """IPv4 or IPv6."""
    result: Result
    reason: str = ""
    """Why it failed or was not tried."""
    node: str = ""
    """In a cluster, the node that the connection came from."""


class Connectivity(Answer, frozen=True, kw_only=True, rename="camel"):
    """What became of connections to Services of our own."""

    node: str = ""
    """The node that was tried; empty for a cluster."""
    mode: str = ""
    """Its mode; empty for a cluster."""
    tried: tuple[Tried, ...]
    left: str = ""
    """What could not be removed, and why."""

    @property
    def exit_code(self) -> int:
        """1 if one failed, or something is left."""
        return int(bool(self.left) or any(each.result == "failed" for each in self.tried))

    def blocks(self, wide: bool) -> Iterator[Block]:  # noqa: ARG002 - every column fits
        """Yield the table and a verdict."""
        nodes = dict.fromkeys(each.node for each in self.tried)
        if self.node:
            where = f"Node {self.node} ({self.mode} mode)"
        else:
            where = f"Node {' '.join(nodes)}" if len(nodes) == 1 else f"{len(nodes)} nodes"
        yield Line(where, "title")
        # Nodes with the same result share a row.
        alike: defaultdict[Tried, list[str]] = defaultdict(list)
        for each in self.tried:
            alike[msgspec.structs.replace(each, node="")].append(each.node)
        rows: list[tuple[Cell, ...]] = []
        for each, of in alike.items():
            from_nodes = "all" if len(of) == len(nodes) > 1 else " ".join(of)
            row = (each.what, each.family, (each.result, _STYLES[each.result]), each.reason)
            rows.append(row if self.node else (*row[:2], from_nodes, *row[2:]))
        head = ("CONNECTION", "FAMILY", *(() if self.node else ("FROM",)), "RESULT", "")
        yield Table(head, rows, empty="nothing could be tried")
        failed = sum(each.result == "failed" for each in self.tried)
        fine = sum(each.result == "ok" for each in self.tried)
        not_tried = len(self.tried) - fine - failed
        style: Style = "bad" if failed else "good"
        yield Line(f"{fine} ok, {failed} failed, {not_tried} not tried", style)
        if self.left:
            yield Line(self.left, "bad")
