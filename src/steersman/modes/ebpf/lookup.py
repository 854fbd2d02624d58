"""What the pinned maps say about a packet: the same lookups as those of c/balance.h."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from steersman.model.names import Family
from steersman.model.plan import SourceClass
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.bpf import HashMap, SumMap
from steersman.modes.ebpf.dump import describe
from steersman.modes.ebpf.layout import (
    UNSPECIFIED,
    FrontendValue,
    Kind,
    is_ipv4,
    print_address,
)

_SOURCES = (SourceClass.POD, SourceClass.NODE, SourceClass.EXTERNAL)
_VERDICT_NAMES = ("forward", "drop", "reject")
# Fields of a config: cookie, flags.
_CONFIG_COOKIE, _CONFIG_FLAGS = 0, 3
_DETECTORS = layout.CONFIG_DETECTOR_CIDR | layout.CONFIG_DETECTOR_DEVICE
_ALL_BITS = 32 + 128
_ACTION_BITS, _VERDICT_MASK = 4, 3
# Fields of a service: affinity timeout.
_AFFINITY_SECONDS = 4


class Ruling(NamedTuple):
    """What the maps have for a destination and a class of clients."""

    verdict: str
    """`forward`, `drop`, `reject`; "" if the destination is no Service's."""
    text: str
    """The object in the maps, in words."""
    why: str = ""
    """Why it is dropped or rejected, or not balanced at the socket."""
    service: int = 0
    """Number of the ServicePort."""


class TraceMaps:
    """The mode's pinned maps, read beside the daemon."""

    def __init__(self, directory: Path) -> None:
        """Open the maps, and remember the affinities that clients have now."""
        names = (
            *("frontends", "services", "names", "prefixes", "maglevs", "node_ips", "devices"),
            *("config", "affinities"),
        )
        self._maps: Mapping[str, HashMap] = {
            name: HashMap.pinned(directory / name) for name in names
        }
        self._affinities = dict(self._maps["affinities"].items())
        self._counters = SumMap.pinned(directory / "counters")
        self._dropped = self._count_drops()
        config = self._maps["config"].get(layout.number_key(0)) or bytes(layout.CONFIG.size)
        values = layout.CONFIG.unpack(config)
        self.host_cookie: int = values[_CONFIG_COOKIE]
        """Network namespace of the node; 0 if no sockets are balanced."""
        self._flags: int = values[_CONFIG_FLAGS]

    def close(self) -> None:
        """Close the maps."""
        for each in (*self._maps.values(), self._counters):
            each.close()

    def _count_drops(self) -> dict[str, int]:
        return {
            name: self._counters.sum(layout.number_key(number))
            for number, name in enumerate(layout.COUNTERS)
            if name.startswith("dropped_")
        }

    def new_drops(self) -> list[str]:
        """Return the reasons for which packets were dropped since then, not only of one flow."""
        now = self._count_drops()
        return [name for name, count in now.items() if count > self._dropped[name]]

    # The class of a client

    def class_of_socket(self, netns_cookie: int) -> SourceClass:
        """Return the class of a socket's owner."""
        if netns_cookie == self.host_cookie:
            return SourceClass.NODE
        return SourceClass.POD if self._flags & _DETECTORS else SourceClass.EXTERNAL

    def class_of_packet(self, source: bytes, device: int) -> SourceClass:
        """Return the class of a packet that comes in by a device."""
        if self._flags & layout.CONFIG_DETECTOR_CIDR and self._in_prefixes(
            layout.PREFIXES_PODS, source
        ):
            return SourceClass.POD
        value = self._maps["devices"].get(layout.number_key(device))
        flags = layout.DEVICE.unpack(value)[2] if value else 0
        by_device = self._flags & layout.CONFIG_DETECTOR_DEVICE and flags & layout.DEVICE_POD
        return SourceClass.POD if by_device else SourceClass.EXTERNAL

    def _in_prefixes(self, number: int, end: bytes) -> bool:
        key = layout.PREFIX.pack(_ALL_BITS, number, end[: layout.ADDRESS_SIZE])
        return self._maps["prefixes"].get(key) is not None

    # The destination

    def rule(self, protocol: int, source: bytes, destination: bytes, client: SourceClass) -> Ruling:
        """Look up a destination for a client, as the programs do."""
        address, port = layout.split_endpoint(destination)
        frontends, at = self._maps["frontends"], print_address(address)
        own, ipv4 = client is SourceClass.NODE, is_ipv4(address)
        unspecified = address in UNSPECIFIED.values()

        # Its own frontend, or that of a node port (serves_node_ports).
        keys = [] if unspecified else [(address, port, protocol)]
        serves = self._maps["node_ips"].get(address) is not None
        if unspecified or (ipv4 and at.startswith("127.")):
            localhost = self._flags & layout.CONFIG_LOCALHOST_NODE_PORTS
            serves = own and ipv4 and (serves or bool(localhost))
        if serves:
            keys.append((UNSPECIFIED[Family.IPV4 if ipv4 else Family.IPV6], port, protocol))
        for key in (layout.FRONTEND_KEY.pack(*parts) for parts in keys):
            if value := frontends.get(key):
                break
        else:
            if frontends.get(layout.FRONTEND_KEY.pack(address, 0, 0)):
                return Ruling("reject", f"clusterIP {at}", f"its Service has no port {port}")
            if self._in_prefixes(layout.PREFIXES_SERVICE_CIDRS, address):
                return Ruling("drop", f"{at} is in a ServiceCIDR", "no Service has this address")
            return Ruling("", "")

        # What it does with the client: first its source ranges, then its action for the class.
        service, actions, flags = layout.FRONTEND.unpack(value)
        name = layout.unpack_name(self._maps["names"].get(layout.number_key(service)) or b"")
        text = describe((Kind.FRONTEND + key, FrontendValue(actions, flags, name).pack()))
        why = ""
        if flags & layout.FRONTEND_RANGES:
            why = "" if own else "the client's address is only known in its packets"
            known = any(source[: layout.ADDRESS_SIZE])
            if known and not self._in_prefixes(service, source):
                why = "the client is in none of the Service's source ranges"
                return Ruling("drop", text, why, service)
        action = actions >> _ACTION_BITS * _SOURCES.index(client)
        verdict = _VERDICT_NAMES[action & _VERDICT_MASK]
        if verdict == "forward" and action & layout.ACTION_MASQUERADE and not own:
            why = "its source has to change"
        elif verdict != "forward":
            why = "the Service has no endpoint for this client"
        return Ruling(verdict, text, why, service)

    # The endpoint

    def chosen_by(self, service: int, client: bytes, endpoint: bytes) -> str:
        """Say how an endpoint was chosen for a client: an address, or a network namespace."""
        record = self._maps["services"].get(layout.number_key(service))
        if not record:
            return ""
        seconds: int = layout.SERVICE.unpack(record)[_AFFINITY_SECONDS]
        if not seconds:
            maglev = self._maps["maglevs"].get(layout.number_key(service))
            return "chosen by the Maglev table" if maglev else "chosen at random"
        known = self._affinities.get(layout.AFFINITY_KEY.pack(client, service))
        if known:
            address, last, port = layout.AFFINITY.unpack(known)
            age = time.monotonic_ns() - last
            if address + port == endpoint and age < seconds * 1_000_000_000:
                return f"the client had it {age // 1_000_000_000} s ago (affinity, {seconds} s)"
        return f"chosen at random; the client keeps it for {seconds} s"
