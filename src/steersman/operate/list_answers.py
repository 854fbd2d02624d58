"""Lists of Services, endpoints and node ports: the answers, and how they are shown. Pure.

`list_rows` makes them from a World.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from steersman.operate.answer import (
    Answer,
    Block,
    Cell,
    Line,
    Style,
    Table,
    age_of,
    age_text,
)
from steersman.operate.served import Counts, ServedPort

_MANY = 1000


class Unserved(msgspec.Struct, frozen=True, rename="camel"):
    """A Service that this node does not serve."""

    service: str
    type: str
    reason: str


class _Listing(Answer, frozen=True, kw_only=True, rename="camel"):
    """What the three lists share."""

    ports: tuple[ServedPort, ...]
    filtered: bool = False
    """Whether a filter was given."""
    note: str = ""
    """Why something that was asked for is not there."""

    @property
    def exit_code(self) -> int:
        """1 if a filter selected nothing."""
        return int(self.filtered and not self.ports)


class ServiceList(_Listing, frozen=True, kw_only=True, rename="camel"):
    """Services by port and family."""

    unserved: tuple[Unserved, ...] = ()
    now: float = 0.0
    """Seconds since 1970, for ages; not printed, so that --watch prints only changes."""

    @property
    def data(self) -> Any:
        """The answer without the time."""
        fields = msgspec.structs.fields(self)
        return {each.encode_name: getattr(self, each.name) for each in fields if each.name != "now"}

    @property
    def exit_code(self) -> int:
        """1 if a filter selected nothing."""
        return int(self.filtered and not (self.ports or self.unserved))

    def blocks(self, wide: bool) -> Iterator[Block]:
        """Yield a row for each ServicePort, and one for each Service that is not served."""
        # Columns that would have the same or no value in every row are left out.
        dual = len({port.family for port in self.ports}) > 1
        counted = _count_columns(port.counts for port in self.ports)
        columns = ["SERVICE", "PORT", "FRONTENDS", "ENDPOINTS", *["FAMILY"] * dual, *counted]
        if wide:
            columns += ["TYPE", "INTERNAL", "EXTERNAL", "AFFINITY", "HEALTH CHECK", "AGE", "KERNEL"]
        columns.append("STATUS")
        rows: list[list[Cell]] = []
        for port in self.ports:
            shown = _some([*map(str, port.frontends)], _MANY if wide else 3) or "none"
            out = len(port.endpoints) - port.used
            share = f"{port.used} in" + (f", {out} out" if out else "")
            row: list[Cell] = [port.service, port.port_text, shown]
            row.append((share, "good" if port.used else "bad"))
            row += [*[port.family] * dual, *_counts(port.counts, counted)]
            if wide:
                row += [port.type, port.internal_policy, port.external_policy]
                row.append(f"{port.affinity_seconds} s" if port.affinity_seconds else "-")
                row += [
                    str(port.health_check_node_port or "-"),
                    age_text(age_of(port.created, self.now)),
                ]
                row.append(_some([each.rpartition(" ")[2] for each in port.objects], 3) or "-")
            # Worst first: clients cannot use it, then Findings.
            if port.problem:
                row.append((port.problem, "bad"))
            elif port.findings:
                row.append((_some(port.findings, 1), "warn"))
            else:
                row.append(("ok", "good"))
            rows.append(row)
        empty = "" if self.unserved else _nothing(self.filtered, "Services")
        yield Table(columns, rows, empty=empty)
        if self.unserved:
            title = "Not served by this proxy:" if rows else ""
            others = [[each.service, each.type, each.reason] for each in self.unserved]
            yield Table(["SERVICE", "TYPE", "WHY"], others, title=title)
        if self.note:
            yield Line(self.note, "dim")


class EndpointList(_Listing, frozen=True, kw_only=True, rename="camel"):
    """Endpoints by ServicePort and family."""

    def blocks(self, wide: bool) -> Iterator[Block]:
        """Yield a row for each endpoint, and the notes of each ServicePort."""
        counted = _count_columns(port.counts for port in self.ports)
        pods = any(endpoint.pod for port in self.ports for endpoint in port.endpoints)
        columns = ["SERVICE", "PORT", "ENDPOINT", *["POD"] * pods, "NODE", "USED", *counted]
        columns += [*["FAMILY", "ZONE"] * wide, "WHY"]
        rows: list[list[Cell]] = []
        for port in self.ports:
            for each in port.endpoints:
                used: Cell = ("in", "good") if each.used else ("out", "warn")
                node = f"{each.node or '-'}{' (here)' if each.local else ''}"
                row: list[Cell] = [port.service, port.port_text, each.address]
                row += [*[each.pod or "-"] * pods, node, used]
                row += _counts(each.counts, counted)
                why = each.why.removeprefix("in: ").removeprefix("out: ")
                row += [*[port.family, each.zone or "-"] * wide, why]
                rows.append(row)
        yield Table(columns, rows, empty=_nothing(self.filtered, "endpoints"))
        for port in self.ports:
            for note in dict.fromkeys((*port.notes, *port.findings)):
                yield Line(f"{port.service} {port.port_text} ({port.family}): {note}", "warn")
        if self.note:
            yield Line(self.note, "dim")


class NodePort(msgspec.Struct, frozen=True, rename="camel"):
    """A port that this node answers on for a Service."""

    port: int
    protocol: str
    family: str
    kind: str
    """`node port` or `health check`."""
    service: str
    service_port: str
    addresses: tuple[str, ...] | None
    """Addresses of this node that serve it; None for all."""
    loopback: bool
    """Whether it answers on a loopback address, too."""
    external: str
    """What happens to clients outside the cluster."""
    endpoints: int
    """Number of endpoints that clients can be sent to."""
    counts: Counts = Counts()


class NodePortList(Answer, frozen=True, kw_only=True, rename="camel"):
    """Node ports, sorted by number."""

    node_ports: tuple[NodePort, ...]
    filtered: bool = False
    note: str = ""

    @property
    def exit_code(self) -> int:
        """1 if a filter selected nothing."""
        return int(self.filtered and not self.node_ports)

    def blocks(self, wide: bool) -> Iterator[Block]:
        """Yield a row for each node port."""
        counted = _count_columns(each.counts for each in self.node_ports)
        columns = ["PORT", "KIND", "SERVICE", "ADDRESSES", "OUTSIDE CLIENTS", "ENDPOINTS", *counted]
        dual = len({each.family for each in self.node_ports}) > 1
        columns += ["FAMILY"] * (wide or dual) + ["LOOPBACK"] * wide
        rows: list[list[Cell]] = []
        for each in self.node_ports:
            bad: Style = "" if each.external.startswith("to ") or each.endpoints else "bad"
            some = "all" if each.addresses is None else ", ".join(each.addresses) or "none"
            row: list[Cell] = [f"{each.port}/{each.protocol}", each.kind]
            row += [f"{each.service}:{each.service_port}".rstrip(":"), some]
            row += [(each.external, bad), str(each.endpoints)]
            row += _counts(each.counts, counted)
            row += [each.family] * (wide or dual) + ["yes" if each.loopback else "no"] * wide
            rows.append(row)
        yield Table(columns, rows, empty=_nothing(self.filtered, "node ports"))
        if self.note:
            yield Line(self.note, "dim")


def _some(texts: Sequence[str], most: int) -> str:
    """Return the first few texts on one line, and the number of the others."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def _count_columns(all_counts: Iterable[Counts]) -> list[str]:
    """Return the columns of counts that have a value in some row."""
    known = list(all_counts)
    columns = ["CONNECTIONS"] * any(each.connections is not None for each in known)
    return columns + ["PER SECOND"] * any(each.rate is not None for each in known)


def _counts(counts: Counts, columns: Sequence[str]) -> Sequence[str]:
    """Return the cells of these columns."""
    known = "-" if counts.connections is None else str(counts.connections)
    return (known, "-" if counts.rate is None else f"{counts.rate:.1f}")[: len(columns)]


def _nothing(filtered: bool, what: str) -> str:
    return f"no {what} match" if filtered else f"there are no {what}"
