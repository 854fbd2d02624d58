"""Destinations in the maps, and the markers by which a clusterIP refuses what it does not serve."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from steersman.modes.ebpf import layout
from steersman.modes.ebpf.layout import Kind
from steersman.modes.ebpf.maps import HashMap
from steersman.modes.ebpf.services import Record

_MARKER = layout.FRONTEND.pack(0, 0, layout.FRONTEND_MARKER)
_HEAD = layout.FRONTEND_VALUE.size


class FrontendTable:
    """The map `frontends`."""

    def __init__(self, fd: int) -> None:
        """Take over what the map holds."""
        self.map = HashMap(fd)
        self._cluster_ips: defaultdict[bytes, set[bytes]] = defaultdict(set)
        """The frontends of each clusterIP. As sets, for a write that failed is done again."""
        self._marked: set[bytes] = set()
        for key, value in self.map.items():
            flags = layout.FRONTEND.unpack(value)[2]
            if flags & layout.FRONTEND_MARKER:
                self._marked.add(key[:16])
            elif flags & layout.FRONTEND_CLUSTER_IP:
                self._cluster_ips[key[:16]].add(key)

    def mend(self) -> None:
        """Bring all markers up to date."""
        self._mark(self._marked | self._cluster_ips.keys())

    def read(self, names: Mapping[int, bytes]) -> Iterator[tuple[bytes, bytes]]:
        """What is in the map, as in the Ruleset; `names` of the ServicePorts by number."""
        for key, value in self.map.items():
            index, actions, flags = layout.FRONTEND.unpack(value)
            if not flags & layout.FRONTEND_MARKER:
                head = layout.FRONTEND_VALUE.pack(actions, flags)
                yield Kind.FRONTEND + key, head + names.get(index, b"")

    def put(self, new: Mapping[bytes, bytes], records: Mapping[bytes, Record]) -> None:
        """Write what is new or changed; `records` has every ServicePort that it names."""
        values = {
            key: _pack(value, records[value[_HEAD:]].number)
            for key, value in of_kind(Kind.FRONTEND, new)
        }
        self._note(of_kind(Kind.FRONTEND, new))
        self.map.put_all(values.items())
        self._mark({key[:16] for key in values})

    def remove(self, removed: Mapping[bytes, bytes]) -> None:
        """Remove what is gone; markers first, by which connections would be refused meanwhile."""
        frontends = list(of_kind(Kind.FRONTEND, removed))
        for key, _ in frontends:
            self._cluster_ips[key[:16]].discard(key)
        self._mark({key[:16] for key, _ in frontends})
        self.map.delete_all(key for key, _ in frontends)

    def _mark(self, addresses: set[bytes]) -> None:
        """Bring the markers of addresses up to date."""
        wanted = {address for address in addresses if self._cluster_ips.get(address)}
        gone = (addresses & self._marked) - wanted
        self.map.put_all((_marker(address), _MARKER) for address in wanted - self._marked)
        self.map.delete_all(map(_marker, gone))
        self._marked |= wanted
        self._marked -= gone
        for address in addresses - wanted:
            self._cluster_ips.pop(address, None)

    def _note(self, frontends: Iterable[tuple[bytes, bytes]]) -> None:
        """Note which frontends are of clusterIPs now."""
        for key, value in frontends:
            if layout.FRONTEND_VALUE.unpack_from(value)[1] & layout.FRONTEND_CLUSTER_IP:
                self._cluster_ips[key[:16]].add(key)
            else:
                self._cluster_ips[key[:16]].discard(key)


def of_kind(kind: Kind, objects: Mapping[bytes, bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Keys (without their kind) and values of one kind."""
    first = kind.value
    return ((key[1:], value) for key, value in objects.items() if key[:1] == first)


def _pack(value: bytes, number: int) -> bytes:
    actions, flags = layout.FRONTEND_VALUE.unpack_from(value)
    return layout.FRONTEND.pack(number, actions, flags)


def _marker(address: bytes) -> bytes:
    return layout.FRONTEND_KEY.pack(address, 0, 0)
