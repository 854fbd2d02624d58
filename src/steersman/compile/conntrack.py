"""Which conntrack entries are stale: those of clients that a Service would no longer send there.

Established flows of UDP keep their endpoint in conntrack for as long as packets come, also when
the endpoint is gone; somebody has to cut them (SPEC 12). Pure: host/conntrack.py lists and deletes.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from steersman.model.addresses import family_of
from steersman.model.names import Family, Protocol
from steersman.model.plan import Endpoint, Value

PROTOCOL_NUMBERS: dict[Protocol, int] = {Protocol.TCP: 6, Protocol.UDP: 17, Protocol.SCTP: 132}
"""IANA's numbers, as in conntrack entries."""


class ServedPort(Value, frozen=True):
    """What matters of one ServicePort in one family."""

    protocol: Protocol
    port: int
    addresses: tuple[str, ...]
    """clusterIP, external IPs and load balancer IPs, canonical."""
    node_port: int = 0
    endpoints: tuple[Endpoint, ...] = ()
    """For UDP: the serving ones, wherever they are. For a port that closes connections: all."""
    close_connections: bool = False
    """Entries of TCP or SCTP are cut as well when their endpoint is gone (beyond SPEC 12)."""


class Entry(NamedTuple):
    """A conntrack entry, as far as it decides anything."""

    protocol: int
    destination: str
    """Where the client sent its packet."""
    destination_port: int
    source: str
    """Where the answers come from: the endpoint, if the packet was translated."""
    source_port: int


class Stale(Value, frozen=True):
    """Tells stale entries, by packed keys: it is asked hundreds of thousands of times.

    A destination is a byte of protocol number, the packed address and the port in network order;
    a source is packed address and port.
    """

    family: Family
    by_address: Mapping[bytes, frozenset[bytes]]
    """Valid sources by destination."""
    by_node_port: Mapping[bytes, frozenset[bytes]]
    """Valid sources by protocol and port, for destinations that are no Service's address."""

    def __bool__(self) -> bool:
        return bool(self.by_address or self.by_node_port)

    @property
    def protocols(self) -> tuple[int, ...]:
        """The protocol numbers whose entries can be stale."""
        return tuple(sorted({key[0] for key in (*self.by_address, *self.by_node_port)}))

    def contains(self, destination: bytes, source: bytes) -> bool:
        """Whether an entry is stale. A Service's address decides before a node port does."""
        valid = self.by_address.get(destination)
        if valid is None:
            valid = self.by_node_port.get(destination[:1] + destination[-2:])
        return valid is not None and source not in valid

    def contains_entry(self, entry: Entry) -> bool:
        """Whether an entry is stale."""
        destination = _socket(entry.destination, entry.destination_port)
        source = _socket(entry.source, entry.source_port)
        return self.contains(bytes((entry.protocol,)) + destination, source)


def stale(family: Family, ports: Iterable[ServedPort]) -> Stale:
    """Return what tells the stale entries of a family, given all that is served in it.

    A UDP port without serving endpoints takes no part: its clients would have nowhere better to
    go. Where two ports claim one destination, the endpoints of both are valid.
    """
    by_address: dict[bytes, frozenset[bytes]] = {}
    by_node_port: dict[bytes, frozenset[bytes]] = {}
    for port in ports:
        if not _cleaned(port):
            continue
        protocol = bytes((PROTOCOL_NUMBERS[port.protocol],))
        sources = frozenset(_socket(e.ip, e.port) for e in port.endpoints)
        for address in port.addresses:
            if family_of(address) is family:
                _unite(by_address, protocol + _socket(address, port.port), sources)
        if port.node_port:
            _unite(by_node_port, protocol + port.node_port.to_bytes(2, "big"), sources)
    return Stale(family, by_address, by_node_port)


def _cleaned(port: ServedPort) -> bool:
    if port.protocol is Protocol.UDP:
        return bool(port.endpoints)
    return port.close_connections


def _unite(into: dict[bytes, frozenset[bytes]], key: bytes, sources: frozenset[bytes]) -> None:
    into[key] = into.get(key, frozenset()) | sources


def _socket(address: str, port: int) -> bytes:
    number = socket.AF_INET6 if family_of(address) is Family.IPV6 else socket.AF_INET
    return socket.inet_pton(number, address) + port.to_bytes(2, "big")
