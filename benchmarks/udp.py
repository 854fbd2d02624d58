"""A UDP client that never pauses: from a changed endpoint to the first answer of the new one."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, chosen, chosen_sizes, figure
from tests.support.lab.conntrack_flows import FlowEntry, add_entries
from tests.support.lab.udp_cluster import (
    CLIENT,
    CLIENT6,
    ENDS,
    ENDS6,
    VIP,
    VIP6,
    UdpCluster,
    udp_lab,
)
from tests.support.lab.udp_flows import Flows, Way

WAYS = {"IPv4": Way(CLIENT, VIP, 53), "IPv6": Way(CLIENT6, VIP6, 53)}
PAUSE = 5.0
"""Seconds between two changes: longer than the second look at a changed Service."""
WAIT = 60.0
_UDP = 17


def run(quick: bool) -> list[Figure]:
    """Measure with an almost empty table and with a full one; SIZES are numbers of entries."""
    modes = chosen("MODES", ("iptables", "nftables"))
    sizes = chosen_sizes((0, 50_000))
    return [
        each
        for mode in modes
        for size in sizes
        for each in _measure(mode, size, 2 if quick else 10)
    ]


def _measure(mode: str, entries: int, rounds: int) -> Iterator[Figure]:
    seconds: dict[str, list[float]] = {family: [] for family in WAYS}
    with udp_lab() as lab, tempfile.TemporaryDirectory() as folder:
        lab.node.call(lambda: add_entries(_foreign(entries)))
        cluster = UdpCluster(lab, Path(folder), mode)
        flows = Flows(lambda source: lab.socket(source, "UDP"), every=0.005)
        try:
            cluster.apply([ENDS[0]], [ENDS6[0]])
            flows.add(list(WAYS.values()))
            _follow(flows, 0)
            for number in range(1, rounds + 1):
                time.sleep(PAUSE)
                began = time.monotonic()
                cluster.apply([ENDS[number % 2]], [ENDS6[number % 2]])
                _follow(flows, number)
                for family, way in WAYS.items():
                    seconds[family].append(flows.moved(way) - began)
        finally:
            flows.close()
            cluster.close()
    for family, values in seconds.items():
        for name, value in (("median", statistics.median(values)), ("latest", max(values))):
            text = f"UDP client follows, {family}, {name}"
            yield figure(text, mode, entries, (value * 1e3, "ms"))


def _follow(flows: Flows, number: int) -> None:
    """Wait until all clients have the endpoint of a round."""
    want = {WAYS["IPv4"]: ENDS[number % 2], WAYS["IPv6"]: ENDS6[number % 2]}
    end = time.monotonic() + WAIT
    while any(flows.answer(way, 0.0) != who for way, who in want.items()):
        if time.monotonic() > end:
            raise RuntimeError("a client does not follow")
        time.sleep(0.01)


def _foreign(count: int) -> Iterator[FlowEntry]:
    """Yield flows of UDP to the port of the Service at other addresses, half of each family."""
    for number in range(count):
        high, low = number >> 8, number & 255
        if number % 2:
            yield FlowEntry(
                _UDP, f"10.{high >> 8}.{high & 255}.{low}", 1, "192.0.2.7", 53, "192.0.2.8", 53
            )
        else:
            yield FlowEntry(_UDP, f"fd01::{number:x}", 1, "fd02::7", 53, "fd02::8", 53)
