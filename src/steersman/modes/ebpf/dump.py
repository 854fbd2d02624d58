"""Contents of the maps in Kubernetes' words: the Ruleset for tests, pinned maps for people.

`dump` only reads, and may run beside a daemon.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from steersman.host.libbpf import ObjectError
from steersman.model.addresses import join_host_port
from steersman.model.names import PROTOCOL_BY_NUMBER, Family
from steersman.modes.ebpf import PINS, bpf, layout
from steersman.modes.ebpf.bpf import HashMap, SumMap
from steersman.modes.ebpf.flows import FlowEntry
from steersman.modes.ebpf.layout import (
    FrontendValue,
    Kind,
    ServiceValue,
    print_address,
)
from steersman.modes.ebpf.tables import Tables

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
            return f"frontend {frontend_name(rest)}: {print_frontend(FrontendValue.unpack(value))}"
        case Kind.RANGE:
            return f"range {print_range(rest)}"
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
    return f"[{' '.join(map(layout.print_endpoint, layout.cut(endpoints)))}]"


def print_frontend(value: FrontendValue) -> str:
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


def print_range(rest: bytes) -> str:
    """Print a Kind.RANGE, given its key without the kind."""
    cidr, service = layout.split_range(rest)
    return f"{layout.print_cidr(cidr)} may use {service.decode()}"


def frontend_name(key: bytes) -> str:
    """Print a frontend_key."""
    address, port, protocol = layout.FRONTEND_KEY.unpack(key)
    name = PROTOCOL_BY_NUMBER.get(protocol, str(protocol))
    if address in layout.UNSPECIFIED.values():
        family = "IPv4" if address == layout.UNSPECIFIED[Family.IPV4] else "IPv6"
        return f"node port {port}/{name} {family}"
    return f"{join_host_port(print_address(address), port)}/{name}"


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
                f"{name.decode()} > {layout.print_endpoint(end)}: {tally[0]} connections, "
                f"{tally[3]} bytes there, {tally[4]} back"
            )


def _dump_conntrack(maps: Path) -> Iterator[str]:
    now = time.monotonic_ns()
    for key, value in HashMap.pinned(maps / "flows").items():
        flow, last = FlowEntry.unpack(key, value), layout.FLOW.unpack(value)[1]
        name = PROTOCOL_BY_NUMBER.get(flow.protocol, flow.protocol)
        yield (
            f"{name} {layout.print_endpoint(flow.source)} > "
            f"{layout.print_endpoint(flow.destination)} "
            f"{_HOOKS[flow.hook]}, {_KINDS[flow.kind]} {layout.print_endpoint(flow.rewritten)}, "
            f"{_STATES[layout.flow_state(value)]}, "
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
            f"{layout.print_endpoint(address + port)}, {(now - last) // 1_000_000_000} s ago"
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
