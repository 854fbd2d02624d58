"""ServicePorts in the maps: a record each in `services`, which points to runs in `slots`.

All that points to endpoints is one word and replaced by one store, after what it points to is
written. A pool that becomes empty is emptied last (`settle`), for until its frontends are written
their actions still send connections there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from steersman.model.names import Protocol
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.layout import ENDPOINT_SIZE, ServiceValue
from steersman.modes.ebpf.maps import ArrayMap, HashMap
from steersman.modes.ebpf.slots import FullError, Places

Run = tuple[int, int]
"""Base and count of endpoints in `slots`."""
_NONE: Run = (0, 0)
_EMPTY = (_NONE, _NONE)
_POOLS = (0, 8)
"""Where a record has its two pools, and behind them the seconds of affinity."""
_SECONDS = 16
_PADDING = bytes(layout.SLOT.size - ENDPOINT_SIZE)
_OF_UDP = f" {Protocol.UDP} ".encode()
_PLACED = {
    (cluster, local): (cluster | local << 1).to_bytes(4, layout.BYTE_ORDER)
    for cluster in (False, True)
    for local in (False, True)
}
"""Value of a member by which pools it is in."""


class Record(NamedTuple):
    """Where a ServicePort is in the arrays."""

    number: int
    runs: tuple[Run, Run]
    """Of Pool.CLUSTER and of Pool.LOCAL."""


class Pools:
    """Lists of endpoints: runs in `slots`."""

    def __init__(self, slots: int, clock: Callable[[], float]) -> None:
        self._slots = ArrayMap(slots)
        self._places = Places(self._slots.capacity, clock)

    def adopt(self, runs: Iterable[Run]) -> None:
        """Start with runs that are there."""
        self._places.adopt(run for run in runs if run[1])

    def put(self, endpoints: bytes) -> Run:
        """Write a list of packed endpoints to a new place; FullError where there is none."""
        if not endpoints:
            return _NONE
        parts = list(cut(endpoints))
        base = self._places.take(len(parts))
        self._slots.write(base, _PADDING.join(parts) + _PADDING)
        return base, len(parts)

    def give(self, run: Run) -> None:
        """Give a run back."""
        if run[1]:
            self._places.give(*run)

    def read(self, run: Run) -> bytes:
        """The packed endpoints of a run."""
        data, size = self._slots.read(*run), layout.SLOT.size
        return b"".join(data[n : n + ENDPOINT_SIZE] for n in range(0, len(data), size))


class ServiceTable:
    """The ServicePorts by name, and where each is."""

    def __init__(self, maps: Mapping[str, int], clock: Callable[[], float]) -> None:
        """Take over what the maps hold."""
        self.names = HashMap(maps["names"])
        self.members = HashMap(maps["members"])
        self._services = ArrayMap(maps["services"])
        self._pools = Pools(maps["slots"], clock)
        self._indices = Places(self._services.capacity, clock)
        self._emptied: dict[bytes, ServiceValue] = {}
        self._doomed: set[bytes] = set()
        """Members that are to go; those that could not be deleted go with the next write."""
        self.records = {n.rstrip(b"\0"): self._record(key) for key, n in self.names.items()}
        self._indices.adopt((record.number, 1) for record in self.records.values())
        self._pools.adopt(run for record in self.records.values() for run in record.runs)

    def _record(self, key: bytes) -> Record:
        index = int.from_bytes(key, layout.BYTE_ORDER)
        values = layout.SERVICE.unpack(self._services.read(index))
        return Record(index, (values[0:2], values[2:4]))

    def read(self, record: Record) -> ServiceValue:
        """What the maps hold of a ServicePort."""
        seconds = layout.SERVICE.unpack(self._services.read(record.number))[4]
        return ServiceValue(seconds, *map(self._pools.read, record.runs))

    def number_names(self) -> dict[int, bytes]:
        """Names by number."""
        return {record.number: name for name, record in self.records.items()}

    def put(self, name: bytes, wanted: ServiceValue) -> None:
        """Write a ServicePort, but for pools that become empty: `settle` is to follow."""
        number, before = old = self.records[name]
        if _binds(name, wanted):
            self._add_members(number, wanted)
        gone = self._gone(name, old, wanted) if before != _EMPTY else set()
        fresh = self._take_runs(wanted)
        self._services.store(number, _SECONDS, layout.POOL.pack(wanted.seconds, 0))
        runs = [
            self._switch(number, which, *both)
            for which, both in enumerate(zip(before, fresh, strict=True))
        ]
        self.records[name] = Record(number, (runs[0], runs[1]))
        if (runs[0][1] and not wanted.cluster) or (runs[1][1] and not wanted.local):
            self._emptied[name] = wanted
        self._doomed.update(layout.MEMBER_KEY.pack(number, end) for end in gone)
        self._drop_doomed()

    def _take_runs(self, wanted: ServiceValue) -> tuple[Run, Run]:
        """Write the lists of both pools to new places; both or none."""
        cluster = self._pools.put(wanted.cluster)
        try:
            return cluster, self._pools.put(wanted.local)
        except FullError:
            self._pools.give(cluster)
            raise

    def _switch(self, number: int, which: int, before: Run, fresh: Run) -> Run:
        """Have a record point to a new list, if there is one."""
        if not fresh[1]:
            return before
        self._services.store(number, _POOLS[which], layout.POOL.pack(*fresh))
        self._pools.give(before)
        return fresh

    def _drop_doomed(self) -> None:
        for key in tuple(self._doomed):
            self.members.delete(key)
            self._doomed.discard(key)

    def _gone(self, name: bytes, old: Record, wanted: ServiceValue) -> set[bytes]:
        """Members that are to go: endpoints that clients may no longer be bound to."""
        had = self.read(old)
        if not _binds(name, had):
            return set()
        kept = set(endpoints_of(wanted)) if _binds(name, wanted) else set()
        return set(endpoints_of(had)) - kept

    def _add_members(self, number: int, wanted: ServiceValue) -> None:
        pools = [set(cut(wanted.cluster)), set(cut(wanted.local))]
        members = {
            layout.MEMBER_KEY.pack(number, end): _PLACED[end in pools[0], end in pools[1]]
            for end in set.union(*pools)
        }
        self._doomed.difference_update(members)
        self.members.put_all(members.items())

    def name(self, names: Iterable[bytes]) -> None:
        """Give ServicePorts that are new a number, and a record without endpoints.

        A name comes before everything else of its ServicePort and goes after it: a number without
        one is free, whenever a process ends.
        """
        new = [(name, self._indices.take(1)) for name in names if name not in self.records]
        for _, number in new:
            self._clear(number)
        keys = [number_key(number) for _, number in new]
        try:
            self.names.put_all(zip(keys, [layout.NAME.pack(name) for name, _ in new], strict=True))
        except OSError:
            self.names.delete_all(keys)
            raise
        self.records.update((name, Record(number, _EMPTY)) for name, number in new)

    def _clear(self, number: int) -> None:
        for field in (*_POOLS, _SECONDS):
            self._services.store(number, field, bytes(8))

    def mend(self) -> None:
        """Remove members that a process which was killed has left without an endpoint."""
        names, kept = self.number_names(), dict[int, set[bytes]]()
        for key, _ in list(self.members.items()):
            number, end = layout.MEMBER_KEY.unpack(key)
            name = names.get(number, b"")
            if number not in kept:
                had = self.read(self.records[name]) if name else None
                kept[number] = set(endpoints_of(had)) if had and _binds(name, had) else set()
            if end not in kept[number]:
                self.members.delete(key)

    def begin(self) -> None:
        """Forget what a write that failed had still to empty, and delete what it had to."""
        self._emptied.clear()
        self._drop_doomed()

    def settle(self) -> None:
        """Empty the pools that are to be empty, now that no frontend leads to them."""
        for name, wanted in self._emptied.items():
            number, runs = self.records[name]
            kept = [
                run if endpoints else self._empty(number, which, run)
                for which, (run, endpoints) in enumerate(zip(runs, wanted[1:], strict=True))
            ]
            self.records[name] = Record(number, (kept[0], kept[1]))
        self._emptied.clear()

    def _empty(self, number: int, which: int, run: Run) -> Run:
        self._services.store(number, _POOLS[which], bytes(8))
        self._pools.give(run)
        return _NONE

    def remove(self, name: bytes) -> None:
        """Remove a ServicePort that no frontend leads to."""
        record = self.records[name]
        number = record.number
        had = self.read(record)
        if _binds(name, had):
            ends = set(endpoints_of(had))
            self.members.delete_all(layout.MEMBER_KEY.pack(number, end) for end in ends)
        for which, run in enumerate(record.runs):
            self._empty(number, which, run)
        self.records[name] = Record(number, _EMPTY)  # or a second attempt would give them back
        self._services.store(number, _SECONDS, bytes(8))
        self.names.delete(number_key(number))
        self._indices.give(number, 1)
        del self.records[name]


def _binds(name: bytes, value: ServiceValue) -> bool:
    """Whether clients, or sockets that are not connected, are bound to endpoints."""
    return value.seconds > 0 or _OF_UDP in name


def cut(endpoints: bytes) -> Iterator[bytes]:
    """Packed endpoints, one by one."""
    return (endpoints[n : n + ENDPOINT_SIZE] for n in range(0, len(endpoints), ENDPOINT_SIZE))


def endpoints_of(value: ServiceValue) -> Iterator[bytes]:
    """The packed endpoints of both pools."""
    return cut(value.cluster + value.local)


def number_key(index: int) -> bytes:
    """Number of a ServicePort as a key."""
    return index.to_bytes(4, layout.BYTE_ORDER)
