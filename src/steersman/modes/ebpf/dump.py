"""What the pinned maps hold, printed for people; reads only, also while a daemon works."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from steersman.model.names import PROTOCOL_BY_NUMBER
from steersman.modes.ebpf import bpf, layout
from steersman.modes.ebpf.layout import Kind, print_address
from steersman.modes.ebpf.maps import HashMap, SumMap
from steersman.modes.ebpf.services import endpoints_of, number_key
from steersman.modes.ebpf.tables import Tables
from steersman.modes.ebpf.text import describe, endpoint_name

PINS = Path("/sys/fs/bpf/steersman")
_KINDS = ("", "to endpoint", "from service", "masquerade", "to client")
_STATES = ("opening", "established", "closing", "waiting", "half closed", "refused")
_HOOKS = ("ingress", "egress")
_NETNS = b"\xff" * 8  # begins the client of an affinity that is a network namespace


def dump(what: str, pins: Path = PINS) -> Iterator[str]:
    """Print one of DUMPS, a line per entry.

    Raises:
        FileNotFoundError: nothing is pinned: the mode does not run here.
        PermissionError: only root may look.
    """
    return DUMPS[what](pins / "maps")


def _services(maps: Path) -> Iterator[str]:
    wanted = (Kind.SERVICE.value, Kind.FRONTEND.value, Kind.RANGE.value)
    ruleset = _tables(maps).read()
    return iter(sorted(describe(item) for item in ruleset.items() if item[0][:1] in wanted))


def _endpoints(maps: Path) -> Iterator[str]:
    """Of bytes only those are known whose packets are rewritten here."""
    tables = _tables(maps)
    counted = dict(SumMap.pinned(maps / "used").sums())
    for name, record in sorted(tables.services.records.items()):
        for end in sorted(set(endpoints_of(tables.services.read(record)))):
            tally = counted.get(layout.MEMBER_KEY.pack(record.number, end), (0,) * 5)
            yield (
                f"{name.decode()} > {endpoint_name(end)}: {tally[0]} connections, "
                f"{tally[3]} bytes there, {tally[4]} back"
            )


def _conntrack(maps: Path) -> Iterator[str]:
    now = time.monotonic_ns()
    for key, value in HashMap.pinned(maps / "flows").items():
        source, destination, ports, protocol, hook = layout.FLOW_KEY.unpack(key)
        address, last, port, kind, state, _ = layout.FLOW.unpack(value)
        name = PROTOCOL_BY_NUMBER.get(protocol, protocol)
        yield (
            f"{name} {endpoint_name(source + ports[:2])} > "
            f"{endpoint_name(destination + ports[2:])} "
            f"{_HOOKS[hook]}, {_KINDS[kind]} {endpoint_name(address + port)}, {_STATES[state]}, "
            f"{(now - last) // 1_000_000_000} s ago"
        )


def _affinity(maps: Path) -> Iterator[str]:
    names = _tables(maps).services.number_names()
    now = time.monotonic_ns()
    for key, value in HashMap.pinned(maps / "affinities").items():
        client, service = layout.AFFINITY_KEY.unpack(key)
        address, last, port = layout.AFFINITY.unpack(value)
        who = f"network namespace {int.from_bytes(client[8:], layout.BYTE_ORDER)}"
        yield (
            f"{names.get(service, b'gone').decode()}: "
            f"{who if client.startswith(_NETNS) else print_address(client)} > "
            f"{endpoint_name(address + port)}, {(now - last) // 1_000_000_000} s ago"
        )


def _counters(maps: Path) -> Iterator[str]:
    counters = SumMap.pinned(maps / "counters")
    return (f"{name} {counters.sum(number_key(n))}" for n, name in enumerate(layout.COUNTERS))


DUMPS: Mapping[str, Callable[[Path], Iterator[str]]] = {
    "services": _services,
    "endpoints": _endpoints,
    "conntrack": _conntrack,
    "affinity": _affinity,
    "counters": _counters,
}
"""Printers by table: ModeSpec.dumps has the names."""


def _tables(maps: Path) -> Tables:
    return Tables({path.name: bpf.Object.pinned(path).fd for path in maps.iterdir()})
