"""Who talks to a Service through this node now (`steersman connections`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import msgspec

from steersman.model.connections import ConnectionList, OpenConnection
from steersman.operate.answer import (
    Answer,
    Block,
    Cell,
    Line,
    QuestionError,
    Style,
    Table,
    age_text,
    table_of,
)
from steersman.operate.client import Client, understood
from steersman.operate.load import world_of_process
from steersman.operate.names import Names, Target

_STYLES: dict[str, Style] = {"opening": "warn", "closing": "dim", "ended": "dim"}
_NO_ENDPOINT = "none"


class ListedConnection(OpenConnection, frozen=True, rename="camel"):
    """A connection, with the names of its ends."""

    client_name: str = ""
    """The pod or node that the client is; "" if that is not known."""
    endpoint_name: str = ""
    """The pod of the endpoint."""


class EndpointCount(msgspec.Struct, frozen=True, rename="camel"):
    """The connections of one endpoint, without those that have ended."""

    endpoint: str
    """Address and port; "" for connections that were not sent to any."""
    pod: str
    connections: int
    planned: bool
    """Whether new connections may be sent to it."""


class Connections(Answer, frozen=True, kw_only=True, rename="camel"):
    """The connections of a Service through one node."""

    service: str
    node: str
    mode: str
    endpoints: tuple[EndpointCount, ...]
    connections: tuple[ListedConnection, ...]
    """The first ones by endpoint and client."""
    matching: int
    """The number of connections that the list has the first of."""
    ended: int
    """The number of those that have ended, listed or not."""

    @property
    def watched(self) -> Any:
        """The part of `data` of which a change is news: not the seconds that go by."""
        rows = [msgspec.structs.replace(each, age=None, idle=None) for each in self.connections]
        return msgspec.structs.replace(self, connections=tuple(rows)).data

    def blocks(self, wide: bool) -> Iterator[Block]:
        """Yield the endpoints with their counts, then the connections."""
        yield Line(f"Service {self.service}, through node {self.node}", "title")
        yield Table(
            ("ENDPOINT", "POD", "CONNECTIONS", ""),
            [
                (
                    each.endpoint or _NO_ENDPOINT,
                    each.pod or "-",
                    str(each.connections),
                    "" if each.planned or not each.endpoint else ("gets no new ones", "dim"),
                )
                for each in self.endpoints
            ],
            empty="no endpoint",
        )
        rows: list[dict[str, Cell]] = []
        for each in self.connections:
            row: dict[str, Cell] = {
                "CLIENT": each.client,
                "FROM": each.client_name or "-",
                "TO": f"{each.frontend}/{each.protocol}",
                "ENDPOINT": each.endpoint or _NO_ENDPOINT,
                "STATE": (each.state.value, _STYLES.get(each.state, "")),
                "AGE": age_text(each.age),
                "IDLE": age_text(each.idle),
            }
            if wide:
                row["SEEN AS"] = each.source or each.client
            rows.append(row)
        yield table_of(rows, "no connection to it goes through this node now")
        if (more := self.matching - len(rows)) > 0:
            yield Line(f"{more} more; --limit {self.matching} shows all", "dim")
        if self.ended and not any(each.state == "ended" for each in self.connections):
            yield Line(f"{self.ended} have ended; --all shows them", "dim")


async def list_connections(
    service: str, namespace: str = "", limit: int = 100, *, ended: bool = False
) -> Connections:
    """Ask the running process of this network namespace who talks to a Service.

    Args:
        service: any name of it, with a port if only that is meant.
        namespace: of a name without one.
        limit: number of connections to list.
        ended: whether to list those that have ended, too.

    Raises:
        NotRunningError: no steersman process runs here.
        QuestionError: the Service is not served, or the process does not answer.
    """
    world = await world_of_process()
    names = Names(world, namespace)
    target = names.resolve_service(service)
    known = world.service(target.name) if target.name else None
    if known and target.name not in {key.name.object_name for key in world.plan.services}:
        why = world.why_unserved(known)
        raise QuestionError(f"Service {target.label} is not served here: {why}")
    query = [("service", target.label), ("most", str(limit)), ("ended", str(int(ended)))]
    query += [("port", f"{each.name or ''}/{each.protocol or 'TCP'}") for each in target.ports]
    data = await asyncio.to_thread(Client().get, f"/connections?{urlencode(query)}")
    with understood():
        found = msgspec.msgpack.decode(data, type=ConnectionList)
    return named(found, target, names, world.origin.text)


def named(found: ConnectionList, target: Target, names: Names, source: str) -> Connections:
    """Return connections with the names of their ends, and the endpoints without any.

    Args:
        found: connections.
        target: the Service, with the ports that were asked for.
        names: of the World.
        source: where that is from, for people.
    """
    ports = {(each.name or "", each.protocol or "TCP") for each in target.ports}
    planned = {
        str(endpoint): 0
        for key, plan in names.world.plan.services.items()
        if key.name.object_name == target.name and (key.name.port, key.name.protocol) in ports
        for endpoint in plan.reachable
    }
    counts = {**planned, **found.by_endpoint}
    return Connections(
        source=source,
        service=target.label,
        node=names.here,
        mode=found.mode,
        endpoints=tuple(
            EndpointCount(end, name_of(end, names), counts[end], end in planned)
            for end in sorted(counts)
        ),
        connections=tuple(
            ListedConnection(
                **msgspec.structs.asdict(each),
                client_name=name_of(each.client, names),
                endpoint_name=name_of(each.endpoint, names),
            )
            for each in found.rows
        ),
        matching=found.matching,
        ended=found.ended,
    )


def name_of(end: str, names: Names) -> str:
    """Return the pod or the node of an address and port; "" if neither is known."""
    address = end.rpartition(":")[0].strip("[]")
    if node := names.node_at(address):
        return node
    pods = names.pods_at(address)
    return str(pods[0].name) if pods else ""
