"""Conntrack entries, and the description of stale ones: made by compile/, used by netfilter/."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, TypeAlias

from steersman.model.addresses import family_of
from steersman.model.names import Family, Protocol
from steersman.model.plan import Value

_UDP = Protocol.UDP.number


class Stale(Value, frozen=True):
    """The description of the stale entries of one family.

    Keys are packed, because a table has hundreds of thousands of entries: a destination is the
    protocol number in a byte, the address and the port in network order; a source is address and
    port.
    """

    family: Family
    by_address: Mapping[bytes, frozenset[bytes]]
    """Valid sources by destination."""
    by_node_port: Mapping[bytes, frozenset[bytes]]
    """Valid sources by protocol and node port, for destinations other than Service addresses."""
    own: frozenset[bytes] = frozenset()
    """Destinations of Services with the number of these node ports, which do not count there."""
    left: frozenset[bytes] = frozenset()
    """Keys of `by_node_port` that no Service has any more: only translated entries are stale."""

    def __bool__(self) -> bool:
        return bool(self.by_address or self.by_node_port)

    @property
    def protocols(self) -> tuple[int, ...]:
        """The protocol numbers whose entries can be stale."""
        return tuple(sorted({key[0] for key in (*self.by_address, *self.by_node_port)}))

    def contains(self, destination: bytes, source: bytes) -> bool:
        """Whether an entry is stale; the address of a Service takes precedence over a node port.

        An entry of the other family is never stale: tables of a mode may hold both families.
        """
        valid = self.by_address.get(destination)
        if valid is not None:
            return source not in valid
        valid = self.by_node_port.get(destination[:1] + destination[-2:])
        if valid is None or source in valid or destination in self.own:
            return False
        if len(destination) != 1 + self.family.bits // 8 + 2:  # a node port of the other family
            return False
        # An entry without translation belongs to another program. Its UDP entries are deleted
        # too, as upstream does (behaviour 12), if the Service still has the node port.
        if destination[1:] != source:
            return True
        return destination[0] == _UDP and destination[:1] + destination[-2:] not in self.left


class Cleanup(NamedTuple):
    """The result of one pass over a table."""

    deleted: int
    failed: int
    """Entries that the kernel did not delete."""
    complete: bool
    """False if the table changed so much during the pass that entries may have been missed."""
    seconds: float = 0.0
    """CPU time of the pass."""


Confirm: TypeAlias = Callable[[], Awaitable[Stale]]
"""Returns the present description of the same destinations.

Listing a table takes a while, and a new endpoint may get its first connections during that time.
So it is awaited after the listing, if anything was found, and an entry is deleted only if both
descriptions call it stale.
"""


def pack_socket(address: str, port: int) -> bytes:
    """Pack a canonical address and a port in network order."""
    number = socket.AF_INET6 if family_of(address) is Family.IPV6 else socket.AF_INET
    return socket.inet_pton(number, address) + port.to_bytes(2, "big")
