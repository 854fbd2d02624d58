"""ServicePorts in the maps, and the allocator of their places.

    services[number]   cluster pool (base, count) | local pool (base, count) | affinity
                             |                            |
    slots              [endpoint, endpoint, ...]    [endpoint, ...]       runs, a power of two long
    names[number]      name of the ServicePort
    members            (number, endpoint) that clients may be bound to, by affinity or UDP
    used               (number, endpoint) with connections; programs count there

Numbers and runs are the only ids of the mode, and they stay in it: a new process reads them from
the maps. A pool is one word. It is replaced by one store, after the new run is written; the old run
rests for a second before it is used again, because a program may be reading it. A pool that becomes
empty is emptied last (`empty_pools`), because until its frontends are written their actions still
send connections there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from steersman.model.names import Protocol
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.bpf import ArrayMap, FullError, HashMap
from steersman.modes.ebpf.layout import ENDPOINT_SIZE, ServiceValue, cut

QUARANTINE = 1.0
"""Seconds before a run is used again; a program runs for microseconds."""
Run: TypeAlias = tuple[int, int]
"""First slot and number of endpoints."""
_NO_RUN: Run = (0, 0)
# Offsets of the two pools in a record.
_POOLS_AT = (0, 8)
_SECONDS_AT = layout.OFFSETS["service"]["affinity_seconds"]
_NO_SERVICE = bytes(layout.SERVICE.size)
_PADDING = bytes(layout.SLOT.size - ENDPOINT_SIZE)
_UDP_IN_NAME = f" {Protocol.UDP} ".encode()
# Flags of a member: its pools.
_IN_CLUSTER, _IN_LOCAL = 1, 2


class SlotAllocator:
    """Allocates runs of places in an array; their lengths are powers of two."""

    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self._capacity = capacity
        self._clock = clock
        self.top = 0
        """The end of all runs so far."""
        # Free runs below `top`, by length.
        self._free: dict[int, list[int]] = {}
        # Runs given back: when they become free, place, length.
        self._resting: deque[tuple[float, int, int]] = deque()

    def take(self, count: int) -> int:
        """Return the place of a run for `count` records; FullError if there is none."""
        size = run_length(count)
        now = self._clock()
        while self._resting and self._resting[0][0] <= now:
            _, place, length = self._resting.popleft()
            self._free.setdefault(length, []).append(place)
        if free := self._free.get(size):
            return free.pop()
        if self.top + size <= self._capacity:
            place, self.top = self.top, self.top + size
            return place
        # Split the smallest free run that is longer; the rest of it stays free.
        longer = [length for length, runs in self._free.items() if runs and length > size]
        if not longer:
            raise FullError(f"{self._capacity} places are not enough")
        place = self._free[min(longer)].pop()
        self._add_free(place + size, place + min(longer))
        return place

    def give(self, place: int, count: int) -> None:
        """Give a run back."""
        self._resting.append((self._clock() + QUARANTINE, place, run_length(count)))

    def adopt(self, runs: Iterable[Run]) -> None:
        """Mark runs (place and count) as taken, at the start; the space between them is free."""
        for place, count in sorted(runs):
            self._add_free(self.top, place)
            self.top = max(self.top, place + run_length(count))

    def _add_free(self, start: int, end: int) -> None:
        while start < end:
            size = 1 << ((end - start).bit_length() - 1)
            self._free.setdefault(size, []).append(start)
            start += size


def run_length(count: int) -> int:
    """Return the length of a run for `count` records."""
    return 1 << max(count - 1, 0).bit_length()


class Pools:
    """Lists of endpoints: runs in `slots`."""

    def __init__(self, slots: int, clock: Callable[[], float]) -> None:
        self._slots = ArrayMap(slots)
        self._allocator = SlotAllocator(self._slots.capacity, clock)

    def adopt(self, runs: Iterable[Run]) -> None:
        """Start with runs that are in the map."""
        self._allocator.adopt(run for run in runs if run[1])

    def put(self, endpoints: bytes) -> Run:
        """Write packed endpoints to a new run; FullError if there is no room."""
        if not endpoints:
            return _NO_RUN
        parts = list(cut(endpoints))
        base = self._allocator.take(len(parts))
        self._slots.write(base, _PADDING.join(parts) + _PADDING)
        return base, len(parts)

    def give(self, run: Run) -> None:
        """Give a run back."""
        if run[1]:
            self._allocator.give(*run)

    def read(self, run: Run) -> bytes:
        """Return the packed endpoints of a run."""
        return b"".join(end for (end,) in layout.SLOT.iter_unpack(self._slots.read(*run)))


class ServiceTable:
    """The ServicePorts by name, and their places."""

    def __init__(self, maps: Mapping[str, int], clock: Callable[[], float]) -> None:
        """Read what the maps hold."""
        self.names = HashMap(maps["names"])
        self.members = HashMap(maps["members"])
        self._used = HashMap(maps["used"])
        self._services = ArrayMap(maps["services"])
        self._pools = Pools(maps["slots"], clock)
        self._numbers = SlotAllocator(self._services.capacity, clock)
        # ServicePorts with a pool to empty, and their new values.
        self._emptied: dict[bytes, ServiceValue] = {}
        # ServicePorts that `add` has given a number since `begin`: no frontend leads to them yet.
        self._fresh: set[bytes] = set()
        # Those of them whose number belonged to another one before, and may have its counts.
        self._reused: set[bytes] = set()
        # Members to delete; those that could not be deleted go with the next write.
        self._doomed: set[bytes] = set()
        # The runs of a ServicePort are read from its record when needed: kept here, they would be a
        # third of what the process holds for the mode.
        self.numbers = {
            layout.unpack_name(name): layout.read_number(key) for key, name in self.names.items()
        }
        self._numbers.adopt((number, 1) for number in self.numbers.values())
        self._pools.adopt(run for number in self.numbers.values() for run in self._runs(number))

    def _runs(self, number: int) -> tuple[Run, Run]:
        """Return the runs of Pool.CLUSTER and of Pool.LOCAL in a record."""
        values = layout.SERVICE.unpack(self._services.read(number))
        return values[0:2], values[2:4]

    def read(self, number: int) -> ServiceValue:
        """Return what the maps hold of a ServicePort."""
        seconds = layout.SERVICE.unpack(self._services.read(number))[4]
        return ServiceValue(seconds, *map(self._pools.read, self._runs(number)))

    def names_by_number(self) -> dict[int, bytes]:
        """Return names by number."""
        return {number: name for name, number in self.numbers.items()}

    def begin(self) -> None:
        """Begin a write: forget pools that a failed one has not emptied, delete its members."""
        self._emptied.clear()
        self._fresh.clear()
        self._delete_doomed()

    def add(self, names: Iterable[bytes]) -> None:
        """Give new ServicePorts a number, and a record without endpoints.

        A name is written before everything else of its ServicePort, and deleted after it: whenever
        a process ends, a number without a name is free.
        """
        # The record is cleared before the name makes it valid; until then no program reads it.
        top = self._numbers.top
        new = {name: self._numbers.take(1) for name in names if name not in self.numbers}
        self._reused = {name for name, number in new.items() if number < top}
        for number in new.values():
            self._services.write(number, _NO_SERVICE)
        try:
            self.names.put_all(
                (layout.number_key(number), layout.NAME.pack(name)) for name, number in new.items()
            )
        except OSError:
            self.names.delete_all(map(layout.number_key, new.values()))
            raise
        self.numbers.update(new)
        self._fresh.update(new)

    def put(self, name: bytes, wanted: ServiceValue) -> None:
        """Write a ServicePort, except pools that become empty: `empty_pools` must follow."""
        number, is_fresh = self.numbers[name], name in self._fresh
        if name in self._reused:
            self._used.delete_all(
                layout.MEMBER_KEY.pack(number, end) for end in set(wanted.endpoints())
            )
        before = (_NO_RUN, _NO_RUN) if is_fresh else self._runs(number)

        # Members: new ones first, so that no client loses its endpoint; old ones go at the end.
        pools = wanted.cluster, wanted.local
        wanted_ends = set(wanted.endpoints()) if _binds(name, wanted) else set()
        if wanted_ends:
            cluster, local = map(set, map(cut, pools))
            members = {
                layout.MEMBER_KEY.pack(number, end): layout.number_key(
                    (end in cluster) * _IN_CLUSTER | (end in local) * _IN_LOCAL
                )
                for end in wanted_ends
            }
            self._doomed.difference_update(members)
            self.members.put_all(members.items())
        gone: set[bytes] = set()
        if before[0][1] or before[1][1]:
            gone = self._bound_endpoints(name, number) - wanted_ends

        # Write both lists or none, then let the record point to them.
        runs = [self._pools.put(pools[0])]
        try:
            runs.append(self._pools.put(pools[1]))
        except FullError:
            self._pools.give(runs[0])
            raise
        if is_fresh:  # at a start all are: a record at once takes half the time
            self._fresh.discard(name)
            record = layout.SERVICE.pack(*runs[0], *runs[1], wanted.seconds, 0)
            self._services.write(number, record)
            return
        self._services.store(number, _SECONDS_AT, layout.POOL.pack(wanted.seconds, 0))
        for which, (old_run, run) in enumerate(zip(before, runs, strict=True)):
            if run[1]:
                self._services.store(number, _POOLS_AT[which], layout.POOL.pack(*run))
                self._pools.give(old_run)
            elif old_run[1]:
                self._emptied[name] = wanted
        self._doomed.update(layout.MEMBER_KEY.pack(number, end) for end in gone)
        self._delete_doomed()

    def _bound_endpoints(self, name: bytes, number: int) -> set[bytes]:
        """Return the endpoints in the maps that clients of a ServicePort may be bound to."""
        value = self.read(number)
        return set(value.endpoints()) if _binds(name, value) else set()

    def _delete_doomed(self) -> None:
        for key in tuple(self._doomed):
            self.members.delete(key)
            self._doomed.discard(key)

    def empty_pools(self) -> None:
        """Empty the pools that should be empty, now that no frontend leads to them."""
        for name, wanted in self._emptied.items():
            for which, endpoints in enumerate((wanted.cluster, wanted.local)):
                if not endpoints:
                    self._empty(self.numbers[name], which)
        self._emptied.clear()

    def _empty(self, number: int, which: int) -> None:
        run = self._runs(number)[which]
        self._services.store(number, _POOLS_AT[which], bytes(8))
        self._pools.give(run)

    def remove(self, name: bytes) -> None:
        """Remove a ServicePort that no frontend leads to."""
        # Free the number last: a second attempt after a failure must find the name.
        number = self.numbers[name]
        ends = self._bound_endpoints(name, number)
        self.members.delete_all(layout.MEMBER_KEY.pack(number, end) for end in ends)
        for which in range(len(_POOLS_AT)):
            self._empty(number, which)
        self._services.store(number, _SECONDS_AT, bytes(8))
        self.names.delete(layout.number_key(number))
        self._numbers.give(number, 1)
        del self.numbers[name]

    def repair(self) -> None:
        """Remove members without an endpoint, which a killed process has left, and their counts."""
        names, kept = self.names_by_number(), dict[int, set[bytes]]()
        for key, _ in list(self.members.items()):
            number, end = layout.MEMBER_KEY.unpack(key)
            if number not in kept:
                name = names.get(number)
                kept[number] = self._bound_endpoints(name, number) if name else set()
            if end not in kept[number]:
                self.members.delete(key)
        self._used.delete_all(
            key
            for key in [key for key, _ in self._used.items()]
            if layout.MEMBER_KEY.unpack(key)[0] not in names
        )


def _binds(name: bytes, value: ServiceValue) -> bool:
    """Whether clients are bound to endpoints: by affinity, or as UDP sockets without connect()."""
    return value.seconds > 0 or _UDP_IN_NAME in name
