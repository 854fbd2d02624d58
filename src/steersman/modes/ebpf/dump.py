"""Contents of the maps in Kubernetes' words: the Ruleset for tests, pinned maps for people.

`dump` only reads, and may run beside a daemon.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from steersman.model.addresses import join_host_port
from steersman.model.names import PROTOCOL_BY_NUMBER, Family
from steersman.model.plan import SourceClass
from steersman.modes.ebpf import PINS, bpf, layout
from steersman.modes.ebpf.bpf import HashMap, SumMap
from steersman.modes.ebpf.layout import (
    UNSPECIFIED,
    FrontendValue,
    Kind,
    ServiceValue,
    is_ipv4,
    print_address,
)
from steersman.modes.ebpf.loader import ObjectError
from steersman.modes.ebpf.tables import Tables

# -- Dumps -----------------------------------------------------------------------------------------

_CLASSES = ("pods", "node", "others")
_VERDICTS = ("to", "dropped", "rejected")
_KINDS = ("", "to endpoint", "from service", "masquerade", "to client")
_STATES = (
    "opening",
    "established",
    "closing",
    "waiting",
    "half closed",
    "refused",
    "answered",
    "reset",
)
_HOOKS = ("ingress", "egress")


def describe(item: tuple[bytes, bytes]) -> str:
    """Describe one object of the Ruleset in a line."""
    key, value = item
    kind, rest = layout.split_key(key)
    match kind:
        case Kind.SERVICE:
            own = ServiceValue.unpack(value)
            affinity = f", affinity {own.seconds} s" if own.seconds else ""
            return (
                f"service {rest.decode()}: all {_list(own.cluster)}, local {_list(own.local)}"
                f"{affinity}"
            )
        case Kind.FRONTEND:
            return f"frontend {frontend_name(rest)}: {_frontend(FrontendValue.unpack(value))}"
        case Kind.RANGE:
            cidr, service = layout.split_range(rest)
            return f"range {layout.print_cidr(cidr)} may use {service.decode()}"
        case Kind.NODE_IP:
            return f"node port address {print_address(rest)}"
        case Kind.PREFIX:
            number, cidr = layout.split_node_prefix(rest)
            name = "pods are in" if number == layout.PREFIXES_PODS else "ServiceCIDR"
            return f"{name} {layout.print_cidr(cidr)}"
        case Kind.CONFIG:
            return f"configuration flags {layout.NODE_VALUE.unpack(value)[2]}"
        case Kind.MAGLEV:
            return f"table of {rest.decode()}"
        case Kind.PROGRAMS:
            return f"programs {value.hex()}"


def _list(endpoints: bytes) -> str:
    return f"[{' '.join(map(endpoint_name, layout.cut(endpoints)))}]"


def _frontend(value: FrontendValue) -> str:
    """Describe the actions of a frontend by class of the source."""
    parts = []
    for place, source in enumerate(_CLASSES):
        action = value.actions >> 4 * place & 15
        verdict = _VERDICTS[action & 3]
        if verdict == "to":
            verdict = "to local" if action & layout.ACTION_LOCAL else "to all"
            verdict += " masqueraded" if action & layout.ACTION_MASQUERADE else ""
        parts.append(f"{source} {verdict}")
    if value.flags & layout.FRONTEND_RANGES:
        parts.append("source ranges")
    return f"{value.service.decode()}, {', '.join(parts)}"


def frontend_name(key: bytes) -> str:
    """Print a frontend_key."""
    address, port, protocol = layout.FRONTEND_KEY.unpack(key)
    name = PROTOCOL_BY_NUMBER.get(protocol, str(protocol))
    if address in layout.UNSPECIFIED.values():
        family = "IPv4" if address == layout.UNSPECIFIED[Family.IPV4] else "IPv6"
        return f"node port {port}/{name} {family}"
    return f"{join_host_port(print_address(address), port)}/{name}"


def endpoint_name(packed: bytes) -> str:
    """Print a packed endpoint."""
    address, port = layout.split_endpoint(packed)
    return join_host_port(print_address(address), port)


def dump(name: str, pins: Path = PINS) -> Iterator[str]:
    """Print one of DUMPS, a line per entry.

    Raises:
        FileNotFoundError: nothing is pinned: the mode does not run here.
        PermissionError: only root may look.
    """
    return DUMPS[name](pins / "maps")


def _dump_services(maps: Path) -> Iterator[str]:
    wanted = (Kind.SERVICE.value, Kind.FRONTEND.value, Kind.RANGE.value)
    ruleset = open_tables(maps).read()
    return iter(sorted(describe(i) for i in ruleset.items() if layout.kind_of(i[0]) in wanted))


def _dump_endpoints(maps: Path) -> Iterator[str]:
    """Bytes are only known of connections whose packets are rewritten here."""
    tables = open_tables(maps)
    counted = dict(SumMap.pinned(maps / "used").sums())
    for name, number in sorted(tables.services.numbers.items()):
        for end in sorted(set(tables.services.read(number).endpoints())):
            tally = counted.get(layout.MEMBER_KEY.pack(number, end), (0,) * 5)
            yield (
                f"{name.decode()} > {endpoint_name(end)}: {tally[0]} connections, "
                f"{tally[3]} bytes there, {tally[4]} back"
            )


def _dump_conntrack(maps: Path) -> Iterator[str]:
    now = time.monotonic_ns()
    for key, value in HashMap.pinned(maps / "flows").items():
        source, destination, source_port, destination_port, protocol, hook = layout.FLOW_KEY.unpack(
            key
        )
        address, last, port, kind, state, _ = layout.FLOW.unpack(value)
        name = PROTOCOL_BY_NUMBER.get(protocol, protocol)
        yield (
            f"{name} {endpoint_name(source + source_port)} > "
            f"{endpoint_name(destination + destination_port)} "
            f"{_HOOKS[hook]}, {_KINDS[kind]} {endpoint_name(address + port)}, {_STATES[state]}, "
            f"{(now - last) // 1_000_000_000} s ago"
        )


def _dump_affinity(maps: Path) -> Iterator[str]:
    names = open_tables(maps).services.names_by_number()
    now = time.monotonic_ns()
    for key, value in HashMap.pinned(maps / "affinities").items():
        client, service = layout.AFFINITY_KEY.unpack(key)
        address, last, port = layout.AFFINITY.unpack(value)
        netns = layout.netns_of_client(client)
        client_name = print_address(client) if netns is None else f"network namespace {netns}"
        yield (
            f"{names.get(service, b'gone').decode()}: {client_name} > "
            f"{endpoint_name(address + port)}, {(now - last) // 1_000_000_000} s ago"
        )


def _dump_counters(maps: Path) -> Iterator[str]:
    counters = SumMap.pinned(maps / "counters")
    for number, name in enumerate(layout.COUNTERS):
        yield f"{name} {counters.sum(layout.number_key(number))}"


DUMPS: Mapping[str, Callable[[Path], Iterator[str]]] = {
    "services": _dump_services,
    "endpoints": _dump_endpoints,
    "conntrack": _dump_conntrack,
    "affinity": _dump_affinity,
    "counters": _dump_counters,
}
"""Printers by table: ModeSpec.dumps has the names."""


def open_tables(maps: Path) -> Tables:
    """Open the maps that are pinned in a directory.

    Raises:
        FileNotFoundError: nothing is pinned.
        ObjectError: another version has pinned its maps.
    """
    pinned = {path.name: bpf.Object.pinned(path).fd for path in maps.iterdir()}
    try:
        return Tables(pinned)
    except KeyError as missing:
        text = f"the maps in {maps} are those of another version: there is no map {missing}"
        raise ObjectError(errno.ESTALE, text) from None


# -- Lookups ---------------------------------------------------------------------------------------
#
# What the pinned maps say about a packet: the same lookups as those of c/balance.h.

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
