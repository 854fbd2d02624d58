"""What the maps hold, as a Ruleset; and Diffs written into them, in the order that is safe.

Endpoints come before the word that points to them, ServicePorts before their frontends; what goes,
goes the other way round. A packet or socket at any moment sees the old or the new, both whole.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from steersman.modes.diff import Diff
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.layout import ENDPOINT_SIZE, Kind, ServiceValue
from steersman.modes.ebpf.maps import ArrayMap, HashMap
from steersman.modes.ebpf.slots import Places

_MARKER = layout.FRONTEND.pack(0, 0, layout.FRONTEND_MARKER)
_SLOT_PADDING = bytes(layout.SLOT.size - ENDPOINT_SIZE)
_ONE = (1).to_bytes(4, layout.BYTE_ORDER)
_HEAD = layout.FRONTEND_VALUE.size


class Record(NamedTuple):
    """Where a ServicePort is in the arrays."""

    number: int
    cluster: tuple[int, int]
    """Base and count of Pool.CLUSTER in `slots`."""
    local: tuple[int, int]


class Tables:
    """The maps that steersman writes."""

    def __init__(
        self, maps: Mapping[str, int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take over what the maps hold.

        Args:
            maps: descriptors by name; they stay with their owner.
            clock: seconds, for the reuse of places.
        """
        self.frontends = HashMap(maps["frontends"])
        self.names = HashMap(maps["names"])
        self.members = HashMap(maps["members"])
        self.prefixes = HashMap(maps["prefixes"])
        self.node_ips = HashMap(maps["node_ips"])
        self.services = ArrayMap(maps["services"])
        self.slots = ArrayMap(maps["slots"])
        self.config = ArrayMap(maps["config"])
        self.records: dict[bytes, Record] = {}
        self._indices = Places(self.services.capacity, clock)
        self._runs = Places(self.slots.capacity, clock)
        self._cluster_ips: Counter[bytes] = Counter()
        self._marked: set[bytes] = set()
        self._adopt()

    # -- taking over ------------------------------------------------------------------------

    def _adopt(self) -> None:
        for key, value in self.names.items():
            index = int.from_bytes(key, layout.BYTE_ORDER)
            values = layout.SERVICE.unpack(self.services.read(index))
            self.records[value.rstrip(b"\0")] = Record(index, values[0:2], values[2:4])
        self._indices.adopt((record.number, 1) for record in self.records.values())
        runs = (run for record in self.records.values() for run in (record.cluster, record.local))
        self._runs.adopt(run for run in runs if run[1])
        for key, value in self.frontends.items():
            flags = layout.FRONTEND.unpack(value)[2]
            if flags & layout.FRONTEND_MARKER:
                self._marked.add(key[:16])
            elif flags & layout.FRONTEND_CLUSTER_IP:
                self._cluster_ips[key[:16]] += 1
        self._mark(self._marked | self._cluster_ips.keys())

    # -- reading ----------------------------------------------------------------------------

    def read(self) -> dict[bytes, bytes]:
        """Everything of the Ruleset that the maps hold, but for the programs."""
        names = {record.number: name for name, record in self.records.items()}
        out = {Kind.SERVICE + name: self.read_service(r) for name, r in self.records.items()}
        for key, value in self.frontends.items():
            index, actions, flags = layout.FRONTEND.unpack(value)
            if not flags & layout.FRONTEND_MARKER:
                head = layout.FRONTEND_VALUE.pack(actions, flags)
                out[Kind.FRONTEND + key] = head + names.get(index, b"")
        for address, _ in self.node_ips.items():
            out[Kind.NODE_IP + address] = b""
        out.update((self._prefix(key, names), b"") for key, _ in self.prefixes.items())
        if config := self.read_config():
            out[Kind.CONFIG.value] = config
        return out

    def read_config(self) -> bytes:
        """The configuration; b"" while there is none."""
        _, *own, _ = layout.CONFIG.unpack(self.config.read(0))
        value: bytes = layout.NODE_VALUE.pack(*own)
        return value if any(value) else b""

    def read_service(self, record: Record) -> bytes:
        """Value of a ServicePort in the Ruleset."""
        seconds = layout.SERVICE.unpack(self.services.read(record.number))[4]
        pools = (self._endpoints(*record.cluster), self._endpoints(*record.local))
        return layout.join_service(ServiceValue(seconds, *pools))

    def _endpoints(self, base: int, count: int) -> bytes:
        data = self.slots.read(base, count)
        size = layout.SLOT.size
        return b"".join(data[n : n + ENDPOINT_SIZE] for n in range(0, len(data), size))

    def _prefix(self, key: bytes, names: Mapping[int, bytes]) -> bytes:
        length, number, address = layout.PREFIX.unpack(key)
        cidr: bytes = bytes((length - 32,)) + address
        if number >= layout.PREFIXES_PODS:
            return Kind.PREFIX + int(number).to_bytes(4, "big") + cidr
        return Kind.RANGE + cidr + names.get(number, b"")

    # -- writing ----------------------------------------------------------------------------

    def write(self, change: Diff) -> None:
        """Write a Diff.

        Raises:
            FullError: a map is full; what is written already does no harm.
            OSError: the kernel refused.
        """
        new = dict(change.added)
        new.update((key, pair[1]) for key, pair in change.changed.items())
        for key, value in _of(Kind.SERVICE, new):
            self._put_service(key, value, change.changed.get(Kind.SERVICE + key))
        self._name_services(key for key, _ in _of(Kind.SERVICE, change.added))
        self._put_prefixes(new)
        self.node_ips.put_all((key, _ONE) for key, _ in _of(Kind.NODE_IP, new))
        for _, value in _of(Kind.CONFIG, new):
            self._put_config(value)
        self._put_frontends(change, new)
        self._remove(change.removed)

    def _name_services(self, names: Iterable[bytes]) -> None:
        self.names.put_all(
            (_pack(self.records[name].number), layout.NAME.pack(name)) for name in names
        )

    def _put_service(self, name: bytes, value: bytes, changed: tuple[bytes, bytes] | None) -> None:
        wanted = layout.split_service(value)
        old = self.records.get(name)
        index = old.number if old else self._indices.take(1)
        cluster, local = self._put_pool(wanted.cluster), self._put_pool(wanted.local)
        if wanted.seconds:
            self._put_members(index, wanted.cluster + wanted.local)
        self.services.store(index, 16, layout.POOL.pack(wanted.seconds, 0))
        self.services.store(index, 0, layout.POOL.pack(*cluster))
        self.services.store(index, 8, layout.POOL.pack(*local))
        self.records[name] = Record(index, cluster, local)
        if old:
            self._give_runs(old)
        if changed:
            had = layout.split_service(changed[0])
            kept = set(_endpoints_of(wanted)) if wanted.seconds else set()
            if had.seconds:
                self._drop_members(index, set(_endpoints_of(had)) - kept)

    def _put_pool(self, endpoints: bytes) -> tuple[int, int]:
        if not endpoints:
            return 0, 0
        parts = list(_cut(endpoints))
        base = self._runs.take(len(parts))
        self.slots.write(base, _SLOT_PADDING.join(parts) + _SLOT_PADDING)
        return base, len(parts)

    def _give_runs(self, record: Record) -> None:
        for base, count in (record.cluster, record.local):
            if count:
                self._runs.give(base, count)

    def _put_members(self, index: int, endpoints: bytes) -> None:
        keys = set(_cut(endpoints))
        self.members.put_all((layout.MEMBER_KEY.pack(index, end), _ONE) for end in keys)

    def _drop_members(self, index: int, endpoints: Iterable[bytes]) -> None:
        self.members.delete_all(layout.MEMBER_KEY.pack(index, end) for end in endpoints)

    def _put_prefixes(self, new: Mapping[bytes, bytes]) -> None:
        keys = [self._prefix_key(key) for key in new if key[:1] in _PREFIX_KINDS]
        for key in keys:  # tries take no batches before Linux 5.16
            self.prefixes.put(key, _ONE)

    def _prefix_key(self, key: bytes) -> bytes:
        if key[:1] == Kind.PREFIX:
            number, cidr = int.from_bytes(key[1:5], "big"), key[5:]
        else:
            number, cidr = self.records[key[18:]].number, key[1:18]
        return layout.PREFIX.pack(32 + cidr[0], number, cidr[1:])

    def _put_config(self, value: bytes) -> None:
        cookie, *_, programs = layout.CONFIG.unpack(self.config.read(0))
        own = layout.NODE_VALUE.unpack(value)
        self.config.write(0, layout.CONFIG.pack(cookie, *own, programs))

    def identify(self, cookie: int, programs: bytes) -> None:
        """Note the network namespace of the node, and which object is attached."""
        _, *own, _ = layout.CONFIG.unpack(self.config.read(0))
        self.config.write(0, layout.CONFIG.pack(cookie, *own, programs))

    @property
    def programs(self) -> bytes:
        """Digest of the object that is attached; zeros where none is."""
        value: bytes = layout.CONFIG.unpack(self.config.read(0))[-1]
        return value

    def _put_frontends(self, change: Diff, new: Mapping[bytes, bytes]) -> None:
        values = {key: self._frontend(value) for key, value in _of(Kind.FRONTEND, new)}
        self._count_cluster_ips(_of(Kind.FRONTEND, change.added), 1)
        for key, (had, wanted) in change.changed.items():
            if key[:1] == Kind.FRONTEND:
                self._count_cluster_ips([(key[1:], had)], -1)
                self._count_cluster_ips([(key[1:], wanted)], 1)
        self.frontends.put_all(values.items())
        self._mark({key[:16] for key in values})

    def _mark(self, addresses: set[bytes]) -> None:
        """Bring the markers of addresses up to date: a clusterIP refuses what it does not serve."""
        wanted = {address for address in addresses if self._cluster_ips[address] > 0}
        gone = (addresses & self._marked) - wanted
        self.frontends.put_all((_marker(address), _MARKER) for address in wanted - self._marked)
        self.frontends.delete_all(map(_marker, gone))
        self._marked |= wanted
        self._marked -= gone
        for address in addresses - wanted:
            del self._cluster_ips[address]

    def _frontend(self, value: bytes) -> bytes:
        actions, flags = layout.FRONTEND_VALUE.unpack_from(value)
        return layout.FRONTEND.pack(self.records[value[_HEAD:]].number, actions, flags)

    def _count_cluster_ips(self, frontends: Iterable[tuple[bytes, bytes]], step: int) -> None:
        for key, value in frontends:
            if layout.FRONTEND_VALUE.unpack_from(value)[1] & layout.FRONTEND_CLUSTER_IP:
                self._cluster_ips[key[:16]] += step

    def _remove(self, removed: Mapping[bytes, bytes]) -> None:
        frontends = list(_of(Kind.FRONTEND, removed))
        self._count_cluster_ips(frontends, -1)
        self.frontends.delete_all(key for key, _ in frontends)
        self._mark({key[:16] for key, _ in frontends})
        self.node_ips.delete_all(key for key, _ in _of(Kind.NODE_IP, removed))
        keys = [key for key in removed if key[:1] in _PREFIX_KINDS]
        self.prefixes.delete_all([self._prefix_key(key) for key in keys])
        for name, value in _of(Kind.SERVICE, removed):
            self._remove_service(name, value)

    def _remove_service(self, name: bytes, value: bytes) -> None:
        record = self.records.pop(name)
        self.names.delete(_pack(record.number))
        had = layout.split_service(value)
        if had.seconds:
            self._drop_members(record.number, set(_endpoints_of(had)))
        for field in (0, 8, 16):
            self.services.store(record.number, field, bytes(8))
        self._give_runs(record)
        self._indices.give(record.number, 1)


_PREFIX_KINDS = (Kind.PREFIX.value, Kind.RANGE.value)


def _of(kind: Kind, objects: Mapping[bytes, bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Keys (without their kind) and values of one kind."""
    first = kind.value
    return ((key[1:], value) for key, value in objects.items() if key[:1] == first)


def _cut(endpoints: bytes) -> Iterator[bytes]:
    return (endpoints[n : n + ENDPOINT_SIZE] for n in range(0, len(endpoints), ENDPOINT_SIZE))


def _endpoints_of(value: ServiceValue) -> Iterator[bytes]:
    return _cut(value.cluster + value.local)


def _marker(address: bytes) -> bytes:
    return layout.FRONTEND_KEY.pack(address, 0, 0)


def _pack(index: int) -> bytes:
    return index.to_bytes(4, layout.BYTE_ORDER)
