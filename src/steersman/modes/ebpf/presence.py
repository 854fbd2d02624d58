"""The presence filter: what may belong to a flow or to a frontend (c/presence.h).

It is the map `marks`: an array of bits by a hash of the address. Programs set the bit of the client
of every flow they open, and let a packet pass without a lookup if neither of its addresses has its
bit set. Bits are shared: a bit too many costs a lookup, a bit too few would lose a connection. So
programs trust the filter only after every one of them writes it, and the clients of the flows that
existed before are in it.

Flows come and go, but a bit cannot be cleared for one of them. When a quarter of the bits is set,
programs look at every packet for a moment, in which all bits are cleared, and those of the present
flows set again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from itertools import islice

from steersman.modes.ebpf.bpf import ArrayMap, wait_for_programs
from steersman.modes.ebpf.layout import (
    L3_DEVICE_PLACES,
    OFFSETS,
    PRESENCE_BITS,
    PRESENCE_FACTOR,
    SIZES,
)

_WORDS = struct.Struct("=IIII")
_PLACES = 1 << PRESENCE_BITS
_PLACE_SIZE = SIZES["mark"]
_CROWDED = _PLACES // 4
# Clients that are added in a step: about 1 ms.
_AT_ONCE = 1024
_AT = OFFSETS["marks"]
_CLIENT_AT, _SERVED_AT = OFFSETS["mark"]["client"], OFFSETS["mark"]["served"]


def places_of(addresses: Iterable[bytes]) -> set[int]:
    """Return the places of packed addresses, as `presence_place` does in C."""
    return {
        ((a ^ b ^ c ^ d) * PRESENCE_FACTOR & 0xFFFFFFFF) >> (32 - PRESENCE_BITS)
        for a, b, c, d in _WORDS.iter_unpack(b"".join(addresses))
    }


class PresenceFilter:
    """The map `marks` in memory: no method needs a system call."""

    def __init__(self, fd: int) -> None:
        """Map a descriptor into memory; it stays with its owner."""
        self._memory = ArrayMap(fd).whole()
        start, end = _AT["places"], _AT["places"] + _PLACES * _PLACE_SIZE
        self._clients = self._memory[start + _CLIENT_AT : end : _PLACE_SIZE]
        self._served = self._memory[start + _SERVED_AT : end : _PLACE_SIZE]
        self._renews = False

    def distrust(self) -> None:
        """Make programs look at every packet: some may soon open flows without a bit."""
        self._memory[_AT["trusted"]] = 0
        self._renews = False

    def allow_new_flows(self, allowed: bool) -> None:
        """Say whether programs may open flows: only while every device has them.

        Otherwise packets that open a connection are passed on, to the mode before or after this
        one. A flow whose answers come in by a device without programs would be lost.
        """
        self._memory[_AT["attached"]] = allowed

    def trust(self, clients: Iterable[bytes]) -> None:
        """Make programs rely on the filter, which has all served addresses.

        Args:
            clients: packed addresses of the clients of all present flows.
        """
        for _ in self._note(clients):
            pass
        self._memory[_AT["trusted"]] = 1

    def serve(self, addresses: Iterable[bytes]) -> None:
        """Add destinations, before they get a frontend. They are never removed."""
        for place in places_of(addresses):
            self._served[place] = 1

    def renew(self, clients: Callable[[], Iterable[bytes]]) -> Generator[None, None, None]:
        """Clear the bits of clients if too many are set, and set the present ones again, in steps.

        Args:
            clients: returns the packed addresses of the clients of all present flows.
        """
        crowded = self._clients.tobytes().count(1) > _CROWDED
        if crowded and self._memory[_AT["trusted"]]:
            self.distrust()
            self._renews = True
        if not self._renews:
            return
        # A program may still rely on a bit when it is cleared, or have set one for a flow that it
        # is about to write.
        wait_for_programs()
        self._clients[:] = bytes(_PLACES)
        wait_for_programs()
        yield from self._note(clients())
        if self._renews:  # nobody distrusts it for another reason
            self._memory[_AT["trusted"]] = 1
            self._renews = False

    def note(self, clients: Collection[bytes]) -> None:
        """Add the clients of a few flows, before these are written."""
        for place in places_of(clients):
            self._clients[place] = 1

    def _note(self, clients: Iterable[bytes]) -> Iterator[None]:
        """Add clients in steps, as many together take memory and time."""
        rest = iter(clients)
        while some := list(islice(rest, _AT_ONCE)):
            self.note(some)
            yield

    def set_l3_devices(self, devices: Iterable[int]) -> None:
        """Note the indices of devices without Ethernet, before they get programs."""
        places = bytearray(L3_DEVICE_PLACES)
        for index in devices:
            places[index % L3_DEVICE_PLACES] = 1
        self._memory[_AT["bare"] : _AT["bare"] + L3_DEVICE_PLACES] = places
