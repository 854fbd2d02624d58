"""The maps that steersman writes, as a Ruleset; and Diffs written into them in a safe order.

    adding:    ServicePorts > Maglev tables > prefixes > presence filter > frontends
    removing:  ServiceCIDRs > frontends > source ranges > Maglev tables > ServicePorts

Endpoints are written before the word that points to them, ServicePorts before their frontends;
removing goes the other way round. A packet or socket sees the old or the new state at any moment,
and either is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from steersman.model.ruleset import Diff
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.bpf import ArrayMap, HashMap
from steersman.modes.ebpf.layout import (
    ByKind,
    FrontendValue,
    Kind,
    ServiceValue,
    by_kind,
)
from steersman.modes.ebpf.presence import PresenceFilter
from steersman.modes.ebpf.services import ServiceTable

_ONE = layout.number_key(1)
_MARKER = layout.FRONTEND.pack(0, 0, layout.FRONTEND_MARKER)


class FrontendTable:
    """The map `frontends`, with a marker for each clusterIP.

    A marker is a frontend without protocol and port. It makes programs refuse connections to
    ports that the clusterIP does not serve.
    """

    def __init__(self, fd: int) -> None:
        """Read what the map holds."""
        self.map = HashMap(fd)
        # Ports and protocols of each clusterIP, joined: a set of keys would take 260 bytes more.
        # Not only how many, because a failed write is repeated.
        self._ports: dict[bytes, bytes] = {}
        # Addresses that have got their first port or lost their last one, until their marker is
        # written.
        self._changed: set[bytes] = set()
        marked = set()
        for key, value in self.map.items():
            flags = layout.FRONTEND.unpack(value)[2]
            if flags & layout.FRONTEND_MARKER:
                marked.add(layout.address_of(key))
            elif flags & layout.FRONTEND_CLUSTER_IP:
                self._note_port(key, True)
        self._changed = marked ^ self._ports.keys()

    def repair(self) -> None:
        """Bring all markers up to date, after a process that was killed."""
        self._update_markers(set(self._changed))

    def read(self, names: Mapping[int, bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Yield the frontends as in the Ruleset; `names` are those of ServicePorts by number."""
        for key, value in self.map.items():
            number, actions, flags = layout.FRONTEND.unpack(value)
            if not flags & layout.FRONTEND_MARKER:
                own = FrontendValue(actions, flags, names.get(number, b""))
                yield Kind.FRONTEND + key, own.pack()

    def put(self, new: Iterable[tuple[bytes, bytes]], numbers: Mapping[bytes, int]) -> None:
        """Write new and changed frontends; `numbers` has every ServicePort that they name."""
        addresses: set[bytes] = set()

        def packed() -> Iterator[tuple[bytes, bytes]]:
            for key, value in new:
                actions, flags, service = FrontendValue.unpack(value)
                addresses.add(self._note_port(key, bool(flags & layout.FRONTEND_CLUSTER_IP)))
                yield key, layout.FRONTEND.pack(numbers[service], actions, flags)

        self.map.put_all(packed())
        self._update_markers(addresses)

    def remove(self, keys: Collection[bytes]) -> None:
        """Remove frontends; markers go first, as they would refuse connections in between."""
        self._update_markers({self._note_port(key, False) for key in keys})
        self.map.delete_all(keys)

    def _note_port(self, key: bytes, is_cluster_ip: bool) -> bytes:
        """Note whether a clusterIP has this frontend; return the address."""
        address, port = layout.address_of(key), layout.port_of(key)
        had = has = self._ports.get(address, b"")
        if had:
            has = b"".join(each for each in layout.cut_ports(had) if each != port)
        if is_cluster_ip:
            has += port
        if has:
            self._ports[address] = has
        elif had:
            del self._ports[address]
        if bool(had) != bool(has):
            self._changed.add(address)
        return address

    def _update_markers(self, addresses: set[bytes]) -> None:
        """Bring the markers of addresses up to date."""
        due = addresses & self._changed
        self.map.put_all((_marker_key(each), _MARKER) for each in due if each in self._ports)
        self.map.delete_all(_marker_key(each) for each in due if each not in self._ports)
        self._changed -= due


def _marker_key(address: bytes) -> bytes:
    return layout.FRONTEND_KEY.pack(address, 0, 0)


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
    """The map `config`: facts about this node for the programs."""

    def __init__(self, fd: int) -> None:
        self._config = ArrayMap(fd)

    def _get(self) -> Config:
        return Config(*layout.CONFIG.unpack(self._config.read(0)))

    def _set(self, config: Config) -> None:
        self._config.write(0, layout.CONFIG.pack(*config))

    def read(self) -> bytes:
        """Return the configuration; b"" if there is none yet."""
        now = self._get()
        own = (now.node_ip4, now.node_ip6, now.flags, now.pod_interface, now.pod_prefix)
        value: bytes = layout.NODE_VALUE.pack(*own)
        return value if any(value) else b""

    def put(self, value: bytes) -> None:
        """Write the configuration."""
        names = ("node_ip4", "node_ip6", "flags", "pod_interface", "pod_prefix")
        own = dict(zip(names, layout.NODE_VALUE.unpack(value), strict=True))
        self._set(self._get()._replace(**own))

    def identify(self, cookie: int, ports: tuple[int, int]) -> None:
        """Note the network namespace of the node, and the port range of its sockets."""
        self._set(self._get()._replace(cookie=cookie, first_port=ports[0], last_port=ports[1]))

    def pod_devices(self) -> tuple[str, str]:
        """Return the detector's interface and interface prefix ("" for none)."""
        now = self._get()
        interface, prefix = (
            text.rstrip(b"\0").decode() for text in (now.pod_interface, now.pod_prefix)
        )
        return interface, prefix

    @property
    def programs(self) -> bytes:
        """Digest of the attached object; zeros if none is attached."""
        return self._get().programs

    @programs.setter
    def programs(self, digest: bytes) -> None:
        self._set(self._get()._replace(programs=digest))


class Tables:
    """The maps that steersman writes."""

    def __init__(
        self, maps: Mapping[str, int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read what the maps hold.

        Args:
            maps: descriptors by name; they stay with their owner.
            clock: seconds, for the reuse of slots.
        """
        self.services = ServiceTable(maps, clock)
        self.frontends = FrontendTable(maps["frontends"])
        self.node = NodeTable(maps["config"])
        self.prefixes = HashMap(maps["prefixes"])
        self.node_ips = HashMap(maps["node_ips"])
        self.maglevs = HashMap(maps["maglevs"])
        self.devices = HashMap(maps["devices"])
        self.presence = PresenceFilter(maps["marks"])

    def read(self) -> dict[bytes, bytes]:
        """Return the Ruleset that the maps hold, without the programs."""
        names = self.services.names_by_number()
        out = {
            Kind.SERVICE + name: self.services.read(number).pack()
            for name, number in self.services.numbers.items()
        }
        out.update(self.frontends.read(names))
        for address, _ in self.node_ips.items():
            out[Kind.NODE_IP + address] = b""
        for key, _ in self.prefixes.items():
            number, cidr = layout.unpack_prefix(key)
            if number >= layout.PREFIXES_PODS:
                out[Kind.PREFIX + layout.node_prefix(number, cidr)] = b""
            else:
                out[Kind.RANGE + cidr + names.get(number, b"")] = b""
        for key, table in self.maglevs.items():
            out[Kind.MAGLEV + names.get(layout.read_number(key), b"")] = table
        if config := self.node.read():
            out[Kind.CONFIG.value] = config
        return out

    def write(self, change: Diff) -> None:
        """Write a Diff; after a failure the same one can be written again.

        Raises:
            FullError: a map is full; the part that is already written does no harm.
            OSError: the kernel refused.
        """
        new = by_kind(change.added)
        added = [name for name, _ in new[Kind.SERVICE.value]]
        for kind, pairs in by_kind({key: pair[1] for key, pair in change.changed.items()}).items():
            new[kind] += pairs
        # ServicePorts and what belongs to them. A new name comes first, a new list of endpoints
        # before the word that points to it.
        self.services.begin()
        self.services.add(added)
        for key, value in new.pop(Kind.SERVICE.value, ()):  # its memory is used again below
            self.services.put(key, ServiceValue.unpack(value))
        numbers = self.services.numbers
        self.maglevs.put_all(
            (layout.number_key(numbers[name]), table) for name, table in new[Kind.MAGLEV.value]
        )
        for key in [*_node_prefixes(new), *self._range_prefixes(new)]:
            self.prefixes.put(key, _ONE)  # tries take no batches before Linux 5.16

        # Addresses and frontends; the presence filter knows an address before it is served.
        frontends = new[Kind.FRONTEND.value]
        node_ips = [key for key, _ in new[Kind.NODE_IP.value]]
        self.presence.serve(node_ips)
        self.presence.serve(layout.address_of(key) for key, _ in frontends)
        self.node_ips.put_all((key, _ONE) for key in node_ips)
        for _, value in new[Kind.CONFIG.value]:
            self.node.put(value)
        self.frontends.put(frontends, numbers)

        # Removed objects, frontends first. After that no frontend leads to a pool to be emptied.
        if change.removed:
            self._remove(by_kind(change.removed))
        self.services.empty_pools()

    def _remove(self, removed: ByKind) -> None:
        # Without its frontend a packet would be dropped for its ServiceCIDR; without the source
        # ranges of its frontend, for them.
        self.prefixes.delete_all(_node_prefixes(removed))
        self.frontends.remove([key for key, _ in removed[Kind.FRONTEND.value]])
        self.node_ips.delete_all(key for key, _ in removed[Kind.NODE_IP.value])
        self.prefixes.delete_all(self._range_prefixes(removed))
        numbers = self.services.numbers
        self.maglevs.delete_all(
            layout.number_key(numbers[name])
            for name, _ in removed[Kind.MAGLEV.value]
            if name in numbers
        )
        for name in [name for name, _ in removed[Kind.SERVICE.value] if name in numbers]:
            self.services.remove(name)

    def repair(self) -> None:
        """Repair maps that follow from others, after a process that was killed while writing."""
        self.services.repair()
        self.frontends.repair()
        self.presence.serve(
            layout.address_of(key)
            for table in (self.frontends.map, self.node_ips)
            for key, _ in table.items()
        )

    def _range_prefixes(self, objects: ByKind) -> list[bytes]:
        """Return the trie keys of source ranges; those of a ServicePort go before it."""
        ranges = (layout.split_range(rest) for rest, _ in objects[Kind.RANGE.value])
        numbers = self.services.numbers
        return [layout.pack_prefix(numbers[name], cidr) for cidr, name in ranges if name in numbers]


def _node_prefixes(objects: ByKind) -> list[bytes]:
    """Return the trie keys of the node's prefixes."""
    return [
        layout.pack_prefix(*layout.split_node_prefix(rest))
        for rest, _ in objects[Kind.PREFIX.value]
    ]
