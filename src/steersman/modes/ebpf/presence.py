"""The presence filter: what may belong to a flow or to a frontend (c/presence.h).

It is the map `marks`: an array of bits by a hash of the address, and one by a hash of a flow's
key. Programs set the bits of every flow they open, its client's and its own, and let a packet
pass without a lookup if neither of its addresses has its bit set, or if its key has not. Bits are
shared: a bit too many costs a lookup, a bit too few would lose a connection. So programs trust
the filter only after every one of them writes it, and the flows that existed before are in it.

Flows come and go, but a bit cannot be cleared for one of them. There are two generations of their
bits, and programs look at both:

    1. one generation fills; when a quarter of the clients' bits or an eighth of the keys' is set,
       programs are switched to the other one; for keys only if more than half of them have ended
    2. a while later all present flows are added to the other generation, and the first is emptied
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable
from typing import TypeAlias

from steersman.modes.ebpf.bpf import ArrayMap
from steersman.modes.ebpf.layout import (
    FLOW_PRESENCE_BITS,
    L3_DEVICE_PLACES,
    OFFSETS,
    PRESENCE_BITS,
    PRESENCE_FACTOR,
)

_WORDS = struct.Struct("=IIII")
_KEY_WORDS = struct.Struct("=8IHH4x")
_PLACES = 1 << PRESENCE_BITS
_PLACE_SIZE = 4  # bytes
_CROWDED = _PLACES // 4
_FLOW_PLACES = 1 << FLOW_PRESENCE_BITS
_FLOWS_CROWDED = _FLOW_PLACES // 8
_AT = OFFSETS["marks"]
_SERVED_AT = OFFSETS["mark"]["served"]
Noted: TypeAlias = Iterable[tuple[bytes, bytes]]
"""What programs note of flows: the packed address of the client, and the key in `flows`."""


def _spread(word: int, bits: int) -> int:
    return (word * PRESENCE_FACTOR & 0xFFFFFFFF) >> (32 - bits)


def places_of(addresses: Iterable[bytes]) -> set[int]:
    """Return the places of packed addresses, as `presence_place` does in C."""
    return {
        _spread(a ^ b ^ c ^ d, PRESENCE_BITS)
        for a, b, c, d in _WORDS.iter_unpack(b"".join(addresses))
    }


def places_of_flows(keys: Iterable[bytes]) -> set[int]:
    """Return the places of keys of flows, as `flow_place` does in C."""
    return {
        (_spread(a ^ b ^ c ^ d ^ e ^ f ^ g ^ h, FLOW_PRESENCE_BITS) + socket.ntohs(i ^ j))
        % _FLOW_PLACES
        for a, b, c, d, e, f, g, h, i, j in _KEY_WORDS.iter_unpack(b"".join(keys))
    }


class PresenceFilter:
    """The map `marks` in memory: no method needs a system call."""

    def __init__(self, fd: int) -> None:
        """Map a descriptor into memory; it stays with its owner."""
        self._memory = ArrayMap(fd).whole()
        start, end = _AT["places"], _AT["places"] + _PLACES * _PLACE_SIZE
        # Clients and keys, by generation.
        self._clients = [self._memory[start + n : end : _PLACE_SIZE] for n in range(2)]
        self._served = self._memory[start + _SERVED_AT : end : _PLACE_SIZE]
        self._flow_marks = self._memory[_AT["flows"] : _AT["flows"] + _FLOW_PLACES * 2]
        self._keys = [self._flow_marks[n::2] for n in range(2)]

    def distrust(self) -> None:
        """Make programs look at every packet: some may soon open flows without a bit."""
        self._memory[_AT["trusted"]] = 0

    def allow_new_flows(self, allowed: bool) -> None:
        """Say whether programs may open flows: only while every device has them.

        Otherwise packets that open a connection are passed on, to the mode before or after this
        one. A flow whose answers come in by a device without programs would be lost.
        """
        self._memory[_AT["attached"]] = allowed

    def trust(self, flows: Noted) -> None:
        """Make programs rely on the filter, which has all served addresses.

        Args:
            flows: all present ones.
        """
        self.note(flows)
        self._memory[_AT["trusted"]] = 1

    def serve(self, addresses: Iterable[bytes]) -> None:
        """Add destinations, before they get a frontend. They are never removed."""
        for place in places_of(addresses):
            self._served[place] = 1

    def renew(self, flows: Callable[[], Noted], present: int) -> None:
        """Do the next step of emptying, if one is due.

        Between two calls every running program must have ended.

        Args:
            flows: returns all present ones.
            present: how many these are, about.
        """
        # Step 2 comes first: it needs a pause after step 1, as programs may still fill the old one.
        filling = self._memory[_AT["filling"]] & 1
        other = self._clients[1 - filling]
        if any(other.tobytes()):
            self.note(flows())
            other[:] = bytes(_PLACES)
            for start in range(0, _FLOW_PLACES, _PLACES):  # 2 ms each
                self._keys[1 - filling][start : start + _PLACES] = bytes(_PLACES)
            return
        clients = self._clients[filling].tobytes().count(1)
        keys = self._flow_marks.tobytes()[filling::2].count(1)
        if clients > _CROWDED or keys > _FLOWS_CROWDED > 2 * present:
            self._memory[_AT["filling"]] = 1 - filling

    def note(self, flows: Noted) -> None:
        """Add flows, before they are written."""
        filling = self._memory[_AT["filling"]] & 1
        clients, keys, pairs = self._clients[filling], self._keys[filling], list(flows)
        for place in places_of(client for client, _ in pairs):
            clients[place] = 1
        for place in places_of_flows(key for _, key in pairs):
            keys[place] = 1

    def set_l3_devices(self, devices: Iterable[int]) -> None:
        """Note the indices of devices without Ethernet, before they get programs."""
        places = bytearray(L3_DEVICE_PLACES)
        for index in devices:
            places[index % L3_DEVICE_PLACES] = 1
        self._memory[_AT["bare"] : _AT["bare"] + L3_DEVICE_PLACES] = places
