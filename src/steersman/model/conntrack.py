"""Conntrack entries, and what tells the stale ones: compile/ makes it, host/ uses it."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, TypeAlias

from steersman.model.addresses import family_of
from steersman.model.names import Family, Protocol
from steersman.model.plan import Value

_UDP = Protocol.UDP.number


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
    own: frozenset[bytes] = frozenset()
    """Destinations of other Services that have the port of one of these node ports."""

    def __bool__(self) -> bool:
        return bool(self.by_address or self.by_node_port)

    @property
    def protocols(self) -> tuple[int, ...]:
        """The protocol numbers whose entries can be stale."""
        return tuple(sorted({key[0] for key in (*self.by_address, *self.by_node_port)}))

    def contains(self, destination: bytes, source: bytes) -> bool:
        """Whether an entry is stale. A Service's address decides before a node port does.

        Entries of the other family never are: tables of a mode may hold both.
        """
        valid = self.by_address.get(destination)
        if valid is not None:
            return source not in valid
        valid = self.by_node_port.get(destination[:1] + destination[-2:])
        if valid is None or source in valid or destination in self.own:
            return False
        if len(destination) != 1 + self.family.bits // 8 + 2:  # a node port of the other family
            return False
        # What was not translated is another program's. Its UDP entries are cut, too (behaviour 12).
        return destination[0] == _UDP or destination[1:] != source

    def contains_entry(self, entry: Entry) -> bool:
        """Whether an entry is stale."""
        destination = pack_socket(entry.destination, entry.destination_port)
        source = pack_socket(entry.source, entry.source_port)
        return self.contains(bytes((entry.protocol,)) + destination, source)


class Cleanup(NamedTuple):
    """What one pass did."""

    deleted: int
    failed: int
    """Entries that the kernel would not delete."""
    complete: bool
    """False where the table changed so much that entries may have been missed."""


Confirm: TypeAlias = Callable[[], Awaitable[Stale]]
"""Returns what is stale by now, of the same destinations.

Listing takes a while, and meanwhile a new endpoint may get its first connections: only what is
stale by both is deleted. It is awaited after the listing and only if something was found.
"""


def pack_socket(address: str, port: int) -> bytes:
    """Pack a canonical address and a port in network order."""
    number = socket.AF_INET6 if family_of(address) is Family.IPV6 else socket.AF_INET
    return socket.inet_pton(number, address) + port.to_bytes(2, "big")
