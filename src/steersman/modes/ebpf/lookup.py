"""What the maps say about a new connection: the twin of c/balance.h in Python.

Tracing explains by it what the programs did, and failover chooses an endpoint as they would.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from steersman.model.names import Family
from steersman.model.plan import SourceClass
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.bpf import HashMap
from steersman.modes.ebpf.tables import Config

MAPS = (
    *("frontends", "services", "slots", "members", "prefixes", "node_ips", "devices", "config"),
    *("affinities", "maglevs", "names"),
)
"""Names of the maps that a Lookup reads."""
SOURCES = (SourceClass.POD, SourceClass.NODE, SourceClass.EXTERNAL)
"""In the order of `enum source_class`."""
_ACTION_BITS = 4
_DETECTORS = layout.CONFIG_DETECTOR_CIDR | layout.CONFIG_DETECTOR_DEVICE
_ALL_BITS = 32 + 128
_LOOPBACK4 = layout.IPV4_PREFIX + b"\x7f"


class Match(NamedTuple):
    """The frontend that serves a destination."""

    key: bytes
    service: int
    """Number of the ServicePort."""
    actions: int
    flags: int

    def action(self, client: SourceClass) -> int:
        """Return the four bits of a class of clients."""
        return self.actions >> _ACTION_BITS * SOURCES.index(client) & 15


class Candidate(NamedTuple):
    """An endpoint that a client may get."""

    service: int
    session: bytes
    """Key of the client's affinity; b"" if the ServicePort has none."""
    endpoint: bytes


class Lookup:
    """The maps of balancing."""

    def __init__(self, maps: Mapping[str, int]) -> None:
        """Read the node's facts; descriptors stay with their owner."""
        self.maps = {name: HashMap(maps[name]) for name in MAPS}
        record = self.maps["config"].get(layout.number_key(0)) or bytes(layout.CONFIG.size)
        config = Config(*layout.CONFIG.unpack(record))
        self.host_cookie = config.cookie
        """Network namespace of the node; 0 if no sockets are balanced."""
        self.flags = config.flags

    def class_of_socket(self, netns_cookie: int) -> SourceClass:
        """Return the class of a socket's owner."""
        if netns_cookie == self.host_cookie:
            return SourceClass.NODE
        return SourceClass.POD if self.flags & _DETECTORS else SourceClass.EXTERNAL

    def class_of_packet(self, source: bytes, device: int) -> SourceClass:
        """Return the class of a packet that comes in by a device."""
        by_address = self.flags & layout.CONFIG_DETECTOR_CIDR
        if by_address and self.in_prefixes(layout.PREFIXES_PODS, source):
            return SourceClass.POD
        value = self.maps["devices"].get(layout.number_key(device))
        flags = layout.DEVICE.unpack(value)[2] if value else 0
        by_device = self.flags & layout.CONFIG_DETECTOR_DEVICE and flags & layout.DEVICE_POD
        return SourceClass.POD if by_device else SourceClass.EXTERNAL

    def in_prefixes(self, number: int, end: bytes) -> bool:
        """Whether an address is in the prefixes of a number."""
        key = layout.PREFIX.pack(_ALL_BITS, number, end[: layout.ADDRESS_SIZE])
        return self.maps["prefixes"].get(key) is not None

    def find_frontend(self, protocol: int, destination: bytes, *, own: bool) -> Match | None:
        """Find the frontend of a destination: its own, or that of a node port.

        Args:
            protocol: number.
            destination: packed endpoint.
            own: whether the client is the node itself.
        """
        address, port = layout.split_endpoint(destination)
        unspecified = address in layout.UNSPECIFIED.values()
        addresses = [] if unspecified else [address]
        if self._serves_node_ports(address, own=own):
            family = Family.IPV4 if layout.is_ipv4(address) else Family.IPV6
            addresses.append(layout.UNSPECIFIED[family])
        for each in addresses:
            key = layout.FRONTEND_KEY.pack(each, port, protocol)
            if value := self.maps["frontends"].get(key):
                return Match(key, *layout.FRONTEND.unpack(value))
        return None

    def _serves_node_ports(self, address: bytes, *, own: bool) -> bool:
        if address in layout.UNSPECIFIED.values() or address.startswith(_LOOPBACK4):
            if not own or not layout.is_ipv4(address):
                return False
            if self.flags & layout.CONFIG_LOCALHOST_NODE_PORTS:
                return True
        return self.maps["node_ips"].get(address) is not None

    def affinity_seconds(self, service: int) -> int:
        """Return the affinity timeout of a ServicePort; 0 if it has none, or is not there."""
        return self._service(service)[1]

    def candidates(
        self, match: Match, source: SourceClass, client: bytes, count: int
    ) -> Iterator[Candidate]:
        """Yield the endpoint that the client is bound to, then others at random.

        Args:
            match: the frontend that the client connects to.
            source: its class.
            client: its address, or `layout.netns_client`.
            count: at most so many others.
        """
        local = bool(match.action(source) & layout.ACTION_LOCAL)
        pools, seconds = self._service(match.service)
        session = layout.AFFINITY_KEY.pack(client, match.service) if seconds else b""
        if session and (bound := self.maps["affinities"].get(session)):
            address, _, port = layout.AFFINITY.unpack(bound)
            member = layout.MEMBER_KEY.pack(match.service, address + port)
            if layout.read_number(self.maps["members"].get(member) or bytes(4)) & 1 << local:
                yield Candidate(match.service, session, address + port)
        base, size = pools[local]
        for place in random.sample(range(size), min(size, count)):
            slot = self.maps["slots"].get(layout.number_key(base + place))
            (endpoint,) = layout.SLOT.unpack(slot or bytes(layout.SLOT.size))
            yield Candidate(match.service, session, endpoint)

    def _service(self, number: int) -> tuple[tuple[tuple[int, int], tuple[int, int]], int]:
        """Return both pools of a ServicePort, and its affinity timeout."""
        record = self.maps["services"].get(layout.number_key(number))
        values = layout.SERVICE.unpack(record or bytes(layout.SERVICE.size))
        return (values[0:2], values[2:4]), values[4]
