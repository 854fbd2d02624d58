"""The maps that steersman writes, as a Ruleset; and Diffs written into them in a safe order.

    adding:    ServicePorts > Maglev tables > prefixes > presence filter > frontends
    removing:  ServiceCIDRs > frontends > source ranges > Maglev tables > ServicePorts

Endpoints are written before the word that points to them, ServicePorts before their frontends;
removing goes the other way round. A packet or socket sees the old or the new state at any moment,
and either is complete.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from steersman.model.ruleset import Diff
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.bpf import ArrayMap, HashMap
from steersman.modes.ebpf.layout import (
    FLOW_PRESENCE_BITS,
    L3_DEVICE_PLACES,
    OFFSETS,
    PRESENCE_BITS,
    PRESENCE_FACTOR,
    ByKind,
    FrontendValue,
    Kind,
    ServiceValue,
    by_kind,
)
from steersman.modes.ebpf.services import ServiceTable

# -- The presence filter ---------------------------------------------------------------------------
#
# The presence filter: what may belong to a flow or to a frontend (c/presence.h).
#
# It is the map `marks`: an array of bits by a hash of the address, and one by a hash of a flow's
# key. Programs set the bits of every flow they open, its client's and its own, and let a packet
# pass without a lookup if neither of its addresses has its bit set, or if its key has not. Bits are
# shared: a bit too many costs a lookup, a bit too few would lose a connection. So programs trust
# the filter only after every one of them writes it, and the flows that existed before are in it.
#
# Flows come and go, but a bit cannot be cleared for one of them. There are two generations of their
# bits, and programs look at both:
#
#     1. one generation fills; when a quarter of the clients' bits or an eighth of the keys' is set,
#        programs are switched to the other one; for keys only if more than half of them have ended
#     2. a while later all present flows are added to the other generation, and the first is emptied

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


# -- The maps --------------------------------------------------------------------------------------

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
        self._cidrs = ArrayMap(maps["cidrs"])
        # Keys of the node's prefixes; None until they are read.
        self._node_cidrs: set[bytes] | None = None
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
        self._list_cidrs(added=_node_prefixes(new))

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
        self._list_cidrs(removed=_node_prefixes(removed))
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

    def _list_cidrs(self, added: Iterable[bytes] = (), removed: Iterable[bytes] = ()) -> None:
        """Bring the map `cidrs` up to date, given changed keys of the node's prefixes."""
        before = self._node_cidrs
        if before is None:
            numbers = layout.PREFIXES_PODS, layout.PREFIXES_SERVICE_CIDRS
            keys = (key for key, _ in self.prefixes.items())
            now = {key for key in keys if layout.unpack_prefix(key)[0] in numbers}
        else:
            now = (before | set(added)) - set(removed)
        if now == before:
            return
        # Programs look into the trie until the list is complete again.
        record = layout.pack_cidrs(map(layout.unpack_prefix, sorted(now)))
        fields, complete = layout.CIDRS.unpack(record)
        self._cidrs.write(0, layout.CIDRS.pack(fields, 0))
        self._cidrs.store(
            0, layout.OFFSETS["cidrs"]["complete"], complete.to_bytes(8, layout.BYTE_ORDER)
        )
        self._node_cidrs = now

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
