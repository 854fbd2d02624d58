"""The list of Services that a node knows: one row each, as many as a page shows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from steersman.model.names import ObjectName
from steersman.model.world import World
from steersman.operate.answer import View
from steersman.operate.list_rows import Lists
from steersman.operate.served import ServedPort


class ServiceRow(msgspec.Struct, frozen=True, rename="camel"):
    """A Service with all of its ports and families."""

    service: str
    """As `shop/web`."""
    type: str = ""
    frontends: tuple[str, ...] = ()
    """Addresses and ports of clients, without duplicates."""
    ports: tuple[str, ...] = ()
    """As `http/TCP`."""
    used: int = 0
    """Endpoints that clients can be sent to, by address."""
    unused: int = 0
    """The other endpoints."""
    problem: str = ""
    """Why clients cannot use a part of it; "" if they can."""
    findings: tuple[str, ...] = ()
    unserved: str = ""
    """Why this proxy does not serve it; "" if it does."""


class ServicesView(View, frozen=True, kw_only=True, rename="camel"):
    """A page of the Services of a node."""

    node: str
    nodes: tuple[str, ...] = ()
    """Other nodes that can be asked, too."""
    text: str = ""
    """The part of a name that was searched for."""
    trouble: bool = False
    """Whether only Services in trouble are listed and counted."""
    total: int
    matching: int
    page: int = 1
    pages: int = 1
    rows: tuple[ServiceRow, ...] = ()


def matching_names(names: Sequence[str], text: str) -> Sequence[str]:
    """Return the names that have each word of a text as a part."""
    words = text.split()
    return [name for name in names if all(word in name for word in words)] if words else names


def rows_of(worlds: Sequence[World], names: Sequence[str], now: float) -> tuple[ServiceRow, ...]:
    """Return the rows of Services, in the order of the names.

    Args:
        worlds: parts of the World of one node, which have these Services.
        names: the Services.
        now: seconds since 1970.
    """
    found: dict[str, ServiceRow] = {}
    for world in worlds:
        listed = Lists(world, now).services()
        ports: dict[str, list[ServedPort]] = {}
        for port in listed.ports:
            ports.setdefault(port.service, []).append(port)
        found.update((name, row_of(name, group)) for name, group in ports.items())
        for each in listed.unserved:
            found[each.service] = ServiceRow(each.service, each.type, unserved=each.reason)
    # One that was removed meanwhile is in no World any more.
    return tuple(found[name] for name in names if name in found)


def row_of(name: str, ports: Sequence[ServedPort]) -> ServiceRow:
    """Return the row of a Service from its ports in all families."""
    usable: dict[str, bool] = {}
    for port in ports:
        for end in port.endpoints:
            host = end.address.rpartition(":")[0]
            usable[host] = usable.get(host, False) or end.used
    used = sum(usable.values())
    return ServiceRow(
        name,
        ports[0].type,
        tuple(dict.fromkeys(str(each) for port in ports for each in port.frontends)),
        tuple(dict.fromkeys(port.port_text for port in ports)),
        used,
        len(usable) - used,
        next((port.problem for port in ports if port.problem), ""),
        tuple(dict.fromkeys(text for port in ports for text in port.findings)),
    )


def names_of(listed: Sequence[str]) -> tuple[ObjectName, ...]:
    """Return the names of Services from their text."""
    return tuple(ObjectName(*name.partition("/")[::2]) for name in listed)
