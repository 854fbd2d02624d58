"""Lists of Services, endpoints and node ports: the answers, and how they are shown. Pure.

`list_rows` makes them from a World.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    table_of,
)
from steersman.operate.served import Counts, ServedPort

_MANY = 1000
_COUNTS = ("CONNECTIONS", "PER SECOND")


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
        dual = len({port.family for port in self.ports}) > 1
        rows: list[dict[str, Cell]] = []
        for port in self.ports:
            out = len(port.endpoints) - port.used
            share = f"{port.used} in" + (f", {out} out" if out else "")
            row: dict[str, Cell] = {
                "SERVICE": port.service,
                "PORT": port.port_text,
                "FRONTENDS": _some([*map(str, port.frontends)], _MANY if wide else 3) or "none",
                "ENDPOINTS": (share, "good" if port.used else "bad"),
            }
            if dual:
                row["FAMILY"] = port.family
            row |= _counts(port.counts)
            if wide:
                row |= {
                    "TYPE": port.type,
                    "INTERNAL": port.internal_policy,
                    "EXTERNAL": port.external_policy,
                    "AFFINITY": f"{port.affinity_seconds} s" if port.affinity_seconds else "-",
                    "HEALTH CHECK": str(port.health_check_node_port or "-"),
                    "AGE": age_text(age_of(port.created, self.now)),
                    "KERNEL": _some([each.rpartition(" ")[2] for each in port.objects], 3) or "-",
                }
            # Worst first: clients cannot use it, then Findings.
            if port.problem:
                row["STATUS"] = port.problem, "bad"
            elif port.findings:
                row["STATUS"] = _some(port.findings, 1), "warn"
            else:
                row["STATUS"] = "ok", "good"
            rows.append(row)
        empty = "" if self.unserved else _nothing(self.filtered, "Services")
        yield table_of(rows, empty, unless_empty=_COUNTS)
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
        rows: list[dict[str, Cell]] = []
        for port in self.ports:
            for each in port.endpoints:
                row: dict[str, Cell] = {
                    "SERVICE": port.service,
                    "PORT": port.port_text,
                    "ENDPOINT": each.address,
                    "POD": each.pod or "-",
                    "NODE": f"{each.node or '-'}{' (here)' if each.local else ''}",
                    "USED": ("in", "good") if each.used else ("out", "warn"),
                    **_counts(each.counts),
                }
                if wide:
                    row |= {"FAMILY": port.family, "ZONE": each.zone or "-"}
                row["WHY"] = each.why.removeprefix("in: ").removeprefix("out: ")
                rows.append(row)
        empty = _nothing(self.filtered, "endpoints")
        yield table_of(rows, empty, unless_empty=("POD", *_COUNTS))
        for port in self.ports:
            for note in dict.fromkeys((*port.notes, *port.findings)):
                yield Line(
                    f"{port.service} {port.port_text} ({port.family}): {note}", "warn", hang=2
                )
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
        dual = len({each.family for each in self.node_ports}) > 1
        rows: list[dict[str, Cell]] = []
        for each in self.node_ports:
            bad: Style = "" if each.external.startswith("to ") or each.endpoints else "bad"
            some = "all" if each.addresses is None else ", ".join(each.addresses) or "none"
            row: dict[str, Cell] = {
                "PORT": f"{each.port}/{each.protocol}",
                "KIND": each.kind,
                "SERVICE": f"{each.service}:{each.service_port}".rstrip(":"),
                "ADDRESSES": some,
                "OUTSIDE CLIENTS": (each.external, bad),
                "ENDPOINTS": str(each.endpoints),
                **_counts(each.counts),
            }
            if wide or dual:
                row["FAMILY"] = each.family
            if wide:
                row["LOOPBACK"] = "yes" if each.loopback else "no"
            rows.append(row)
        yield table_of(rows, _nothing(self.filtered, "node ports"), unless_empty=_COUNTS)
        if self.note:
            yield Line(self.note, "dim")


def _some(texts: Sequence[str], most: int) -> str:
    """Return the first few texts on one line, and the number of the others."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def _counts(counts: Counts) -> dict[str, Cell]:
    """Return the cells of counts, by the names of their columns."""
    known = "-" if counts.connections is None else str(counts.connections)
    rate = "-" if counts.rate is None else f"{counts.rate:.1f}"
    return dict(zip(_COUNTS, (known, rate), strict=True))


def _nothing(filtered: bool, what: str) -> str:
    return f"no {what} match" if filtered else f"there are no {what}"
