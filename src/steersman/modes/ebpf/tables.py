"""What the maps hold, as a Ruleset; and Diffs written into them, in the order that is safe.

Endpoints come before the word that points to them, ServicePorts before their frontends; what goes,
goes the other way round. A packet or socket at any moment sees the old or the new, both whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from steersman.model.ruleset import Diff
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.frontends import FrontendTable, of_kind
from steersman.modes.ebpf.layout import Kind
from steersman.modes.ebpf.maps import ArrayMap, HashMap
from steersman.modes.ebpf.marks import Marks
from steersman.modes.ebpf.services import ServiceTable, number_key

_ONE = (1).to_bytes(4, layout.BYTE_ORDER)
_PREFIX_KINDS = (Kind.PREFIX.value, Kind.RANGE.value)
_SERVED_KINDS = (Kind.FRONTEND.value, Kind.NODE_IP.value)


class Config(NamedTuple):
    """The record in `config`, in the order of its fields."""

    cookie: int
    node_ip4: bytes
    node_ip6: bytes
    flags: int
    first_port: int
    last_port: int
    pod_interface: bytes
    pod_prefix: bytes
    programs: bytes


class NodeTable:
    """The map `config`: what the programs know of this node."""

    def __init__(self, fd: int) -> None:
        self._config = ArrayMap(fd)

    def _now(self) -> Config:
        return Config(*layout.CONFIG.unpack(self._config.read(0)))

    def _set(self, config: Config) -> None:
        self._config.write(0, layout.CONFIG.pack(*config))

    def read(self) -> bytes:
        """The configuration; b"" while there is none."""
        now = self._now()
        own = (now.node_ip4, now.node_ip6, now.flags, now.pod_interface, now.pod_prefix)
        value: bytes = layout.NODE_VALUE.pack(*own)
        return value if any(value) else b""

    def put(self, value: bytes) -> None:
        """Write the configuration."""
        names = ("node_ip4", "node_ip6", "flags", "pod_interface", "pod_prefix")
        own = dict(zip(names, layout.NODE_VALUE.unpack(value), strict=True))
        self._set(self._now()._replace(**own))

    def identify(self, cookie: int, ports: tuple[int, int]) -> None:
        """Note the network namespace of the node, and the ports that its sockets get."""
        self._set(self._now()._replace(cookie=cookie, first_port=ports[0], last_port=ports[1]))

    @property
    def programs(self) -> bytes:
        """Digest of the object that is attached; zeros where none is."""
        return self._now().programs

    @programs.setter
    def programs(self, digest: bytes) -> None:
        self._set(self._now()._replace(programs=digest))


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
        self.services = ServiceTable(maps, clock)
        self.frontends = FrontendTable(maps["frontends"])
        self.node = NodeTable(maps["config"])
        self.prefixes = HashMap(maps["prefixes"])
        self.node_ips = HashMap(maps["node_ips"])
        self.maglevs = HashMap(maps["maglevs"])
        self.marks = Marks(maps["marks"])

    def read(self) -> dict[bytes, bytes]:
        """Everything of the Ruleset that the maps hold, but for the programs."""
        names = self.services.number_names()
        out = {
            Kind.SERVICE + name: layout.join_service(self.services.read(record))
            for name, record in self.services.records.items()
        }
        out.update(self.frontends.read(names))
        for address, _ in self.node_ips.items():
            out[Kind.NODE_IP + address] = b""
        out.update((_prefix(key, names), b"") for key, _ in self.prefixes.items())
        for number, table in self.maglevs.items():
            name = names.get(int.from_bytes(number, layout.BYTE_ORDER), b"")
            out[Kind.MAGLEV + name] = table
        if config := self.node.read():
            out[Kind.CONFIG.value] = config
        return out

    def write(self, change: Diff) -> None:
        """Write a Diff; after a failure the same one can be written again.

        Raises:
            FullError: a map is full; what is written already does no harm.
            OSError: the kernel refused.
        """
        new = dict(change.added)
        new.update((key, pair[1]) for key, pair in change.changed.items())
        self.services.begin()
        self.services.name(key for key, _ in of_kind(Kind.SERVICE, change.added))
        for key, value in of_kind(Kind.SERVICE, new):
            self.services.put(key, layout.split_service(value))
        self.maglevs.put_all(
            (self._number(name), table) for name, table in of_kind(Kind.MAGLEV, new)
        )
        self._put_prefixes(new)
        self.marks.serve(key[1:17] for key in new if key[:1] in _SERVED_KINDS)
        self.node_ips.put_all((key, _ONE) for key, _ in of_kind(Kind.NODE_IP, new))
        for _, value in of_kind(Kind.CONFIG, new):
            self.node.put(value)
        self.frontends.put(new, self.services.records)
        self._remove(change.removed)
        self.services.settle()

    def mend(self) -> None:
        """Bring what follows from other maps up to date, where a process was killed at it."""
        self.services.mend()
        self.frontends.mend()

    def served(self) -> Iterator[bytes]:
        """Addresses of frontends, and of this node for its node ports."""
        for table in (self.frontends.map, self.node_ips):
            yield from (key[:16] for key, _ in table.items())

    def _number(self, name: bytes) -> bytes:
        return number_key(self.services.records[name].number)

    def _put_prefixes(self, new: Mapping[bytes, bytes]) -> None:
        keys = [self._prefix_key(key) for key in new if key[:1] in _PREFIX_KINDS]
        for key in keys:  # tries take no batches before Linux 5.16
            self.prefixes.put(key, _ONE)

    def _prefix_key(self, key: bytes) -> bytes:
        if key[:1] == Kind.PREFIX:
            number, cidr = int.from_bytes(key[1:5], "big"), key[5:]
        else:
            number, cidr = self.services.records[key[18:]].number, key[1:18]
        return layout.PREFIX.pack(32 + cidr[0], number, cidr[1:])

    def _drop_prefixes(self, removed: Mapping[bytes, bytes], kind: Kind) -> None:
        keys = [key for key in removed if key[:1] == kind]
        if kind is Kind.RANGE:  # those of a ServicePort go before it
            keys = [key for key in keys if key[18:] in self.services.records]
        self.prefixes.delete_all([self._prefix_key(key) for key in keys])

    def _remove(self, removed: Mapping[bytes, bytes]) -> None:
        # Without its frontend a packet would be dropped for its ServiceCIDR; without the source
        # ranges of its frontend, for them.
        self._drop_prefixes(removed, Kind.PREFIX)
        self.frontends.remove(removed)
        self.node_ips.delete_all(key for key, _ in of_kind(Kind.NODE_IP, removed))
        self._drop_prefixes(removed, Kind.RANGE)
        known = self.services.records.keys()
        tables = [name for name, _ in of_kind(Kind.MAGLEV, removed) if name in known]
        self.maglevs.delete_all([self._number(name) for name in tables])
        for name in [name for name, _ in of_kind(Kind.SERVICE, removed) if name in known]:
            self.services.remove(name)


def _prefix(key: bytes, names: Mapping[int, bytes]) -> bytes:
    length, number, address = layout.PREFIX.unpack(key)
    cidr: bytes = bytes((length - 32,)) + address
    if number >= layout.PREFIXES_PODS:
        return Kind.PREFIX + int(number).to_bytes(4, "big") + cidr
    return Kind.RANGE + cidr + names.get(number, b"")
