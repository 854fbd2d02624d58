"""The nftables mode: cold start, changes, restart, memory, first packets; upstream's beside it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from benchmarks import footprint, world
from benchmarks.figures import Figure, figure
from benchmarks.nft_world import NftFlat, endpoints, service
from benchmarks.node import Node
from benchmarks.packets import _SERVER, _Client
from steersman.compile.planner import Planner
from steersman.host.facts import read_facts
from steersman.model.inputs import NodeConfig
from steersman.model.names import Family, ObjectName
from steersman.modes.nftables.mode import NftablesMode
from steersman.run.process.daemon import external_change
from steersman.run.process.memory import collect_rarely, freeze_live_objects
from steersman.run.sync.sync import Sync
from steersman.source.store import Store
from tests.support.builders.store import replace_objects

MODE = "nftables"
BATCH = "1,000 endpoints replaced in one batch"
_BATCHES = 27
Events = Sequence[tuple[str, bytes]]


class NftNode(Node):
    """A node in nftables mode, measured from the event to the kernel."""

    def __init__(self) -> None:
        super().__init__(MODE, 0)
        self.kernel = 0.0
        assert isinstance(self._mode, NftablesMode)
        netlink: Any = self._mode._opened().netlink
        batch = netlink.batch

        def timed(requests: Any) -> Any:
            begun = time.perf_counter()
            try:
                return batch(requests)
            finally:
                self.kernel += time.perf_counter() - begun

        netlink.batch = timed

    def feed(self, events: Events, gone: str = "") -> float:
        """Milliseconds from JSON in memory to the kernel."""
        self.netns.enter()
        return self._runner.run(self._feed(events, gone))

    async def _feed(self, events: Events, gone: str) -> float:
        begun = time.perf_counter()
        for kind, raw in events:
            self.event(kind, raw)
        if gone:
            self.store.delete("Service", ObjectName("bench", gone))
            self.store.delete("EndpointSlice", ObjectName("bench", f"{gone}-abcde"))
        report = await self._sync.run()
        assert report
        assert report.result
        return (time.perf_counter() - begun) * 1e3

    def restart(self) -> tuple[float, int]:
        """Seconds that a new process' first sync takes over the same objects; what it wrote."""
        self.netns.enter()
        return self._runner.run(self._restart())

    async def _restart(self) -> tuple[float, int]:
        snapshot = self.store.snapshot
        store = Store(world.NODE, facts=await read_facts())
        replace_objects(store, "Service", snapshot.services.values())
        slices = chain.from_iterable(snapshot.slices.values())
        replace_objects(store, "EndpointSlice", slices)
        config = NodeConfig(
            node_name=world.NODE, families=(Family.IPV4,), cluster_cidrs=(world.CLUSTER_CIDR,)
        )
        mode = NftablesMode(self.exec)
        collect_rarely()  # as at the start of a process
        begun = time.perf_counter()
        assert (await mode.worker.do(mode.probe)).usable
        report = await Sync(store, Planner(config, mode.traits), mode).run()
        took = time.perf_counter() - begun
        freeze_live_objects()
        assert report is not None
        return took, len(report.written)

    def heal(self, *targets: str) -> tuple[float, ...]:
        """Milliseconds from the end of `nft flush ruleset`.

        Args:
            targets: clusterIPs to which a client tries to connect all the time.

        Returns:
            Until everything is in force again, then until each target answers.
        """
        self.netns.enter()
        return self._runner.run(self._heal(targets))

    async def _heal(self, targets: tuple[str, ...]) -> tuple[float, ...]:
        assert isinstance(self._mode, NftablesMode)
        heard = asyncio.create_task(external_change(self._mode))
        await asyncio.sleep(0)  # it listens from now on
        await self._sync.check()
        await asyncio.to_thread(subprocess.run, ["nft", "flush", "ruleset"], check=True)
        begun = time.perf_counter()
        answers = [asyncio.create_task(asyncio.to_thread(_until_answered, to)) for to in targets]
        await heard
        healed = await self._sync.check()
        took = time.perf_counter() - begun
        assert healed
        assert healed.written.added
        answered = await asyncio.gather(*answers)
        return tuple(end * 1e3 for end in (took, *(at - begun for at in answered)))


def _until_answered(address: str) -> float:
    """Connect again and again; return when the first connection was made."""
    while True:
        with socket.socket() as client:
            client.settimeout(0.002)
            with contextlib.suppress(OSError):
                client.connect((address, 80))
                return time.perf_counter()


def events_of(numbers: Sequence[int], count: int = world.ENDPOINTS) -> list[tuple[str, bytes]]:
    """Services with so many endpoints each, as JSON."""
    out = []
    for number in numbers:
        pods = [world.pod_ip(number * count + index) for index in range(count)]
        out.append(("Service", world.service(number)))
        out.append(("EndpointSlice", world.endpoint_slice(number, pods)))
    return out


def _slice(number: int, pods: Sequence[str]) -> list[tuple[str, bytes]]:
    return [("EndpointSlice", world.endpoint_slice(number, pods))]


def batches(services: int) -> Iterator[list[tuple[str, bytes]]]:
    """An endpoint of a thousand Services replaced at once, of other Services each time."""
    for number in range(_BATCHES):
        some = dict.fromkeys((number * 1000 + each) % services for each in range(1000))
        shift = 70_000 + number * 1000
        yield [event for at in some for event in _slice(at, world.pods(at, shift + at % 1000))]


def _cold(services: int, count: int, runs: int) -> list[Figure]:
    events, whole, kernel = events_of(range(services), count), [], []
    for _ in range(runs):
        node = NftNode()
        gc.collect()
        collect_rarely()
        whole.append(node.feed(events) / 1e3)
        kernel.append(node.kernel)
        node.close()
    return [
        figure(f"cold start x {count}, from JSON", MODE, services, (statistics.median(whole), "s")),
        figure("  the kernel's share", MODE, services, (statistics.median(kernel), "s")),
    ]


class _Changes:
    """Changes of one kind and another, on a node that holds a cluster."""

    def __init__(self, services: int, runs: int) -> None:
        self.services, self.runs, self.count = services, runs, 0
        self.node = NftNode()
        self.node.feed(events_of(range(services)))
        freeze_live_objects()

    def _figures(self, name: str, values: list[float], flat: list[float]) -> list[Figure]:
        values.sort()
        reference = statistics.median(flat) if flat else None
        p99 = values[int(len(values) * 0.99)]
        return [
            figure(name, MODE, self.services, (statistics.median(values), "ms"), reference),
            figure("  p99", MODE, self.services, (p99, "ms")),
        ]

    def endpoint(self, flat: NftFlat | None) -> list[Figure]:
        """Replace one, add one, remove one, in turn; upstream replaces."""
        replaced, grown, shrunk, upstream = [], [], [], []
        for number in range(self.runs):
            self.count += 1
            at, pods = number * 37 % self.services, world.pods(number * 37 % self.services)
            new = world.pods(at, self.count)
            replaced.append(self.node.feed(_slice(at, new)))
            grown.append(self.node.feed(_slice(at, [*new, pods[-1]])))
            shrunk.append(self.node.feed(_slice(at, new)))
            if flat and number < 9:
                begun = time.perf_counter()
                flat.load(endpoints(at, new))
                upstream.append((time.perf_counter() - begun) * 1e3)
        return [
            *self._figures("one endpoint replaced", replaced, upstream),
            *self._figures("one endpoint added", grown, []),
            *self._figures("one endpoint removed", shrunk, []),
        ]

    def service(self, flat: NftFlat | None) -> list[Figure]:
        """Add a Service that was not there, and remove it."""
        added, removed, upstream = [], [], []
        for number in range(self.services, self.services + self.runs):
            added.append(self.node.feed(events_of([number])))
            if flat and number < self.services + 9:
                begun = time.perf_counter()
                flat.load(service(number, world.pods(number)))
                upstream.append((time.perf_counter() - begun) * 1e3)
        for number in range(self.services, self.services + self.runs):
            removed.append(self.node.feed((), f"service-{number}"))
        return [
            *self._figures("one Service added", added, upstream),
            *self._figures("one Service removed", removed, []),
        ]

    def rest(self) -> list[Figure]:
        """A thousand at once, of other Services each time; a restart."""
        took = [self.node.feed(events) for events in batches(self.services)]
        seconds, wrote = self.node.restart()
        return [
            figure(BATCH, MODE, self.services, (statistics.median(took), "ms")),
            figure("  the best", MODE, self.services, (min(took), "ms")),
            figure(f"restart, {wrote} objects written", MODE, self.services, (seconds, "s")),
        ]


def _healing(services: int, runs: int) -> list[Figure]:
    """Somebody flushes the ruleset; a client of the last Service waits."""
    node, last = NftNode(), services - 1
    node.feed(events_of(range(services)))
    node.feed(_slice(last, [_SERVER]))
    freeze_live_objects()
    client = _Client(node.netns, world.cluster_ip(last), 80)
    rounds = [node.heal(world.cluster_ip(last)) for _ in range(runs)]
    client.close()
    node.close()
    names = ("healed after flush", "  the last Service answers")
    return [
        figure(name, MODE, services, (statistics.median(took), "ms"))
        for name, took in zip(names, zip(*rounds, strict=True), strict=True)
    ]


def _changes(services: int, runs: int, flat_services: int) -> list[Figure]:
    flat = NftFlat(flat_services) if flat_services else None
    changes = _Changes(services, runs)
    figures = [*changes.endpoint(flat), *changes.service(flat), *changes.rest()]
    changes.node.close()
    if flat:
        flat.close()
    return figures


_SOURCES = {"a pod's address": "10.0.0.2", "the node's own": "192.0.2.1"}
"""Addresses of this node to connect from: connections from its own are masqueraded."""


def _packets(services: int, rounds: int) -> list[Figure]:
    """Connection set-up as a pod's process and as the node's own sees it."""
    return [
        each
        for whose, source in _SOURCES.items()
        for each in _first_packets(services, rounds, whose, source)
    ]


def _first_packets(services: int, rounds: int, whose: str, source: str) -> list[Figure]:
    """Connections to the last Service, beside direct and beside upstream's rules."""
    last = services - 1
    empty, node, flat = NftNode(), NftNode(), NftFlat(services)
    empty.feed(())
    node.feed(events_of(range(services)))
    node.feed(_slice(last, [_SERVER]))
    flat.load(endpoints(last, [_SERVER]))
    direct = _Client(empty.netns, _SERVER, 8080, source)
    ours = _Client(node.netns, world.cluster_ip(last), 80, source)
    upstream = _Client(flat.netns, world.cluster_ip(last), 80, source)
    for _ in range(rounds):
        for client in (direct, ours, upstream):
            client.connect()
    figures = [
        figure(f"first packet, from {whose}", MODE, services, (ours.p50, "us"), direct.p50),
        figure("  upstream's shape", MODE, services, (upstream.p50, "us"), direct.p50),
    ]
    for client in (direct, ours, upstream):
        client.close()
    for each in (empty, node, flat):
        each.close()
    return figures


def _memory(services: int) -> list[Figure]:
    """The whole process, as `steersman run`."""
    first, _, now, _ = footprint.measured(MODE, services)
    return [
        figure("the process: resident memory", MODE, services, (first, "MB")),
        figure("  after metrics and state", MODE, services, (now, "MB")),
    ]


def run(quick: bool) -> list[Figure]:
    """Measure at 1,000, 10,000 and 50,000 Services (500 when quick)."""
    collect_rarely()
    if quick:
        return [
            *_cold(500, 3, 1),
            *_changes(500, 20, 500),
            *_healing(500, 3),
            *_packets(500, 5),
            *_memory(500),
        ]
    return [
        *_cold(10_000, 3, 3),
        *_cold(50_000, 3, 1),
        *_cold(5_000, 50, 1),
        *_changes(1_000, 200, 1_000),
        *_changes(10_000, 200, 2_000),
        *_changes(50_000, 200, 0),
        *_healing(100, 9),
        *_healing(1_000, 9),
        *_healing(10_000, 3),
        *_packets(10_000, 20),
        *_memory(10_000),
    ]
