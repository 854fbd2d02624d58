"""The map `marks`: addresses that may be of a flow or of a frontend (c/marks.h has the theory).

Programs mark the clients of the flows that they open, and let packets go that have no marked
address. A mark too many costs a look in vain, one too few would lose a connection; so programs
trust the marks only when every one of them writes them, and what there was before is marked.

Addresses share places, and clients come and go. When many places are marked, programs are made to
fill another generation; a while later everything that is there now is marked in it, too, and the
first one is emptied.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

from steersman.modes.ebpf.layout import BARE_PLACES, MARK_BITS, MARK_FACTOR, OFFSETS
from steersman.modes.ebpf.maps import ArrayMap

_WORDS = struct.Struct("=IIII")
_PLACES = 1 << MARK_BITS
_MARK = 4  # bytes
_CROWDED = _PLACES // 4
_AT = OFFSETS["marks"]
_SERVED_AT = OFFSETS["mark"]["served"]


def place_of(address: bytes) -> int:
    """The place of a packed address."""
    a, b, c, d = _WORDS.unpack(address)
    place: int = ((a ^ b ^ c ^ d) * MARK_FACTOR & 0xFFFFFFFF) >> (32 - MARK_BITS)
    return place


class Marks:
    """The map in memory; nothing here costs a system call."""

    def __init__(self, fd: int) -> None:
        """Take a descriptor that stays with its owner."""
        self._memory = ArrayMap(fd).whole()
        start, end = _AT["places"], _AT["places"] + _PLACES * _MARK
        self._clients = [self._memory[start + n : end : _MARK] for n in range(2)]
        self._served = self._memory[start + _SERVED_AT : end : _MARK]

    def distrust(self) -> None:
        """Have programs look at every packet: some may soon not mark what they open."""
        self._memory[_AT["trusted"]] = 0

    def open_flows(self, allowed: bool) -> None:
        """Say whether programs may open flows: only while every device has them.

        Else what opens a connection is passed on, to the mode before or after. A flow whose packets
        come back by a device without programs would be lost.
        """
        self._memory[_AT["attached"]] = allowed

    def trust(self, clients: Iterable[bytes], served: Iterable[bytes]) -> None:
        """Have programs rely on the marks from now on.

        Args:
            clients: packed addresses, of all flows that there are.
            served: those of all frontends and node addresses.
        """
        self._mark(clients)
        self.serve(served)
        self._memory[_AT["trusted"]] = 1

    def serve(self, addresses: Iterable[bytes]) -> None:
        """Mark destinations, before there is a frontend for them. They stay marked."""
        for place in set(map(place_of, addresses)):
            self._served[place] = 1

    def renew(self, clients: Callable[[], Iterable[bytes]]) -> None:
        """Do the next step of emptying, if one is due; no program may have run since the last.

        Args:
            clients: gives packed addresses, of all flows that there are.
        """
        filling = self._memory[_AT["filling"]] & 1
        other = self._clients[1 - filling]
        if any(other.tobytes()):
            self._mark(clients())
            other[:] = bytes(_PLACES)
        elif self._clients[filling].tobytes().count(1) > _CROWDED:
            self._memory[_AT["filling"]] = 1 - filling

    def _mark(self, clients: Iterable[bytes]) -> None:
        filled = self._clients[self._memory[_AT["filling"]] & 1]
        for place in set(map(place_of, clients)):
            filled[place] = 1

    def bare(self, devices: Iterable[int]) -> None:
        """Note which devices have no Ethernet, by index, before they have programs."""
        places = bytearray(BARE_PLACES)
        for index in devices:
            places[index % BARE_PLACES] = 1
        self._memory[_AT["bare"] : _AT["bare"] + BARE_PLACES] = places
