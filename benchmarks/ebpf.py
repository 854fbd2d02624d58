"""The ebpf mode: loading, cold start, changes and memory; the way of a packet is in path.py."""

from __future__ import annotations

import gc
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks import world
from benchmarks.ebpf_place import Place
from benchmarks.figures import Figure, figure
from benchmarks.memory import _resident
from benchmarks.nftables import BATCH, batches, events_of
from benchmarks.node import Node
from steersman.modes.base import Mode
from steersman.modes.ebpf.bpf import Object
from steersman.modes.ebpf.datapath import EbpfOptions
from steersman.modes.ebpf.links import XDP_PROGRAM
from steersman.modes.ebpf.loader import FILE, LoadedObject
from steersman.modes.ebpf.mode import EbpfMode
from steersman.run.process.memory import collect_rarely, freeze_live_objects

MODE = "ebpf"


class EbpfNode(Node):
    """A node in ebpf mode, measured from the event to the maps."""

    def __init__(self, options: EbpfOptions | None = None) -> None:
        """Make a node, in a place of its own where no options are given."""
        self._options = options
        super().__init__(MODE, 0)

    def _make(self, variant: str) -> Mode:
        return EbpfMode(self.exec, self._options) if self._options else super()._make(variant)

    def feed(self, events: Sequence[tuple[str, bytes]]) -> float:
        """Seconds from JSON in memory to the maps."""
        self.netns.enter()
        return self._runner.run(self._feed(events))

    async def _feed(self, events: Sequence[tuple[str, bytes]]) -> float:
        begun = time.perf_counter()
        for kind, raw in events:
            self.event(kind, raw)
        report = await self._sync.run()
        assert report
        assert report.result
        return time.perf_counter() - begun

    def map_memory(self) -> float:
        """What the maps take in the kernel, in MB."""
        assert isinstance(self._mode, EbpfMode)
        total = 0
        for path in (self._mode.datapath.pins.root / "maps").iterdir():
            pinned = Object.pinned(path)
            lines = Path(f"/proc/self/fdinfo/{pinned.fd}").read_text().splitlines()
            (taken,) = (line.split()[1] for line in lines if line.startswith("memlock:"))
            total += int(taken)
            pinned.close()
        return total / 1e6


def start(services: int, options: EbpfOptions) -> tuple[float, float, float, float]:
    """In a fresh process: seconds whole and in the kernel, MB resident and in maps."""
    collect_rarely()
    events = events_of(range(services))
    gc.collect()
    node = EbpfNode(options)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    whole = node.feed(events)
    kernel = resource.getrusage(resource.RUSAGE_SELF).ru_stime - before
    del events
    gc.collect()
    taken = node.map_memory()
    node.close()
    return whole, kernel, _resident(), taken


def _child(services: int, options: EbpfOptions) -> list[float]:
    argv = [sys.executable, "-m", "benchmarks.ebpf", *map(str, (services, options.pins))]
    found = subprocess.run([*argv, str(options.cgroup)], check=True, capture_output=True, text=True)
    return [float(word) for word in found.stdout.split()]


def _starts(services: int, runs: int) -> Iterator[tuple[list[float], list[float]]]:
    """Start with nothing in the kernel, and again with all of it there."""
    for _ in range(runs):
        place = Place()
        yield _child(services, place.options), _child(services, place.options)
        place.close()


def _medians(rows: Iterable[Sequence[float]]) -> list[float]:
    return [statistics.median(each) for each in zip(*rows, strict=True)]


def _cold(services: int, runs: int) -> list[Figure]:
    first, again = map(_medians, zip(*_starts(services, runs), strict=True))
    whole, kernel, resident, taken = first
    return [
        figure("cold start x 3, from JSON", MODE, services, (whole, "s")),
        figure("  the kernel's share (CPU)", MODE, services, (kernel, "s")),
        figure("  resident memory then", MODE, services, (resident, "MB")),
        figure("  memory of all maps", MODE, services, (taken, "MB")),
        figure("started again, all is there", MODE, services, (again[0], "s")),
        figure("  the kernel's share (CPU)", MODE, services, (again[1], "s")),
    ]


def _loads(runs: int) -> list[Figure]:
    """The object, from its file to maps and programs in the kernel."""
    took = []
    for _ in range(runs):
        place = Place()
        place.options.pins.mkdir()
        begun = time.perf_counter()
        loaded = LoadedObject(FILE, place.options.pins, {XDP_PROGRAM})
        took.append((time.perf_counter() - begun) * 1e3)
        loaded.close()
        place.close()
    return [figure("loading maps and programs", MODE, 0, (statistics.median(took), "ms"))]


def _changes(services: int, runs: int) -> list[Figure]:
    """One endpoint replaced, then a thousand at once: from slices, as JSON, to the maps."""
    node = EbpfNode()
    node.feed(events_of(range(services)))
    freeze_live_objects()
    took = []
    for count in range(1, runs + 1):
        number = count * 37 % services
        raw = world.endpoint_slice(number, world.pods(number, count))
        took.append(node.feed([("EndpointSlice", raw)]) * 1e3)
    many = [node.feed(events) * 1e3 for events in batches(services)]
    node.close()
    took.sort()
    return [
        figure("one endpoint replaced", MODE, services, (statistics.median(took), "ms")),
        figure("  p99", MODE, services, (took[int(len(took) * 0.99)], "ms")),
        figure(BATCH, MODE, services, (statistics.median(many), "ms")),
        figure("  the best", MODE, services, (min(many), "ms")),
    ]


def run(quick: bool) -> list[Figure]:
    """Measure at 1,000, 10,000 and 50,000 Services (500 when quick)."""
    collect_rarely()
    if quick:
        return [*_loads(3), *_cold(500, 1), *_changes(500, 50)]
    return [
        *_loads(15),
        *_cold(10_000, 3),
        *_cold(50_000, 3),
        *_changes(1_000, 300),
        *_changes(10_000, 300),
        *_changes(50_000, 300),
    ]


if __name__ == "__main__":
    _, number, *places = sys.argv
    pins, cgroup = map(Path, places)
    print(*start(int(number), EbpfOptions(pins, cgroup)))
