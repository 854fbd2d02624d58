"""Stale entries told at once, for tests; the process does it a slice at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from steersman.compile.conntrack import destinations_at, served_ports, stale
from steersman.model.conntrack import Stale, pack_socket
from steersman.model.inputs import Snapshot
from steersman.model.names import Family, ObjectName
from steersman.model.plan import NodePlan


class Entry(NamedTuple):
    """The fields of a conntrack entry that decide whether it is stale."""

    protocol: int
    destination: str
    """The address that the client sent its packet to."""
    destination_port: int
    source: str
    """The address that answers come from: the endpoint, if the packet was translated."""
    source_port: int


def contains_entry(found: Stale, entry: Entry) -> bool:
    """Whether an entry is stale."""
    destination = pack_socket(entry.destination, entry.destination_port)
    source = pack_socket(entry.source, entry.source_port)
    return found.contains(bytes((entry.protocol,)) + destination, source)


def stale_entries(
    plan: NodePlan,
    snapshot: Snapshot,
    family: Family,
    names: Iterable[ObjectName] | None = None,
) -> Stale:
    """Return what tells the stale entries of some Services; `names` None is all."""
    chosen = snapshot.services if names is None else names
    ports = [port for name in chosen for port in served_ports(name, plan, snapshot, family)]
    own = destinations_at({port.node_port for port in ports}, plan.services.values(), family)
    return stale(family, ports, own)
