"""Many events through source, Store, Planner and Sync: the memory that they leave in use.

`python -m tests.support.processes.leaks EVENTS` prints a JSON object: threads, descriptors, live
objects and resident memory after a tenth of the events (everything was in use by then) and after
all of them. The changes are to a world of fixed size; watches break and history is forgotten on
the way.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from steersman.compile.planner import Planner
from steersman.model.inputs import NodeConfig
from steersman.model.ruleset import Diff
from steersman.run.observe.metrics import Metrics
from steersman.run.observe.observers import SyncObservers
from steersman.run.serve.health import ProxyHealth
from steersman.run.sync.runner import Runner
from steersman.run.sync.sync import Sync
from steersman.source.apiserver import ApiServerSource
from steersman.source.kubeconfig import ClusterAccess
from steersman.source.store import Store
from tests.support.apiserver.reading import NODE, node, service, service_cidr, slice_, timing
from tests.support.apiserver.server import ApiServer
from tests.support.apiserver.world import Object
from tests.support.modes.memory import MemoryMode
from tests.support.waiting import until

SERVICES = 200
KINDS = 4


@dataclass(frozen=True)
class Figures:
    """What the process has."""

    events: int
    threads: int
    descriptors: int
    tasks: int
    objects: int
    """Containers that the cycle collector knows."""
    megabytes: float
    """Resident."""

    @classmethod
    def now(cls, events: int) -> Figures:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            events,
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
            len(asyncio.all_tasks()),
            len(gc.get_objects()),
            round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1),
        )


class ForgetfulMode(MemoryMode):
    """A kernel in memory that keeps no record of what was done to it."""

    def apply(self, change: Diff) -> None:
        super().apply(change)
        self.applied.clear()


class Proxy:
    """The daemon's parts from the API server to a kernel in memory."""

    def __init__(self, server: ApiServer) -> None:
        mode = ForgetfulMode()
        self.runner = Runner(self._work, 0.01, 1.0, 3600.0)
        self.store = Store(NODE, on_change=self.runner.request)
        config = NodeConfig(node_name=NODE)
        self.sync = Sync(self.store, Planner(config, mode.traits), mode)
        self.observers = SyncObservers(
            self.store,
            self.sync.in_force,
            Metrics(mode.name),
            ProxyHealth(60.0),
            {},
            mode=mode,
            objects=self.sync.objects,
        )
        access = ClusterAccess(servers=(server.url,))
        self.source = ApiServerSource(access, NODE, timing=timing(idle_timeout=5.0, answer=10.0))
        self.tasks = [
            asyncio.create_task(self.source.run(self.store)),
            asyncio.create_task(self.runner.run()),
        ]

    async def _work(self) -> None:
        if report := await self.sync.run():
            await self.observers.observe(report)

    @property
    def planned(self) -> set[str]:
        return {key.name.service for key in self.sync.state.plan.services}

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def change(server: ApiServer, dice: random.Random) -> None:
    """One event: an object changes, is deleted, or comes back."""
    number = dice.randrange(SERVICES)
    name = f"s{number}"
    if dice.random() < 0.1:
        server.delete("Service", name, "shop")
    elif dice.random() < 0.3:
        server.add(service(name, f"10.96.{number // 100}.{number % 100 + 1}"))
    else:
        server.add(_slice(number, dice))


def _slice(number: int, dice: random.Random) -> Object:
    addresses = [f"10.244.{number}.{dice.randint(1, 250)}" for _ in range(3)]
    return slice_(f"s{number}-x", f"s{number}", *dict.fromkeys(addresses))


async def batch(
    server: ApiServer, proxy: Proxy, size: int, number: int, dice: random.Random
) -> None:
    """Some changes, now and then with a broken watch, until all of them were planned."""
    for count in range(size - 2):
        change(server, dice)
        if count % 50 == 0:
            await asyncio.sleep(0)
    if number % 8 == 0:
        server.drop(dice.choice(["", "Service", "EndpointSlice"]))
    if number % 4 == 0:
        server.compact()
    marker = f"marker-{number}"
    server.add(service(marker, "10.96.9.9"))
    await until(lambda: marker in proxy.planned, 60.0)
    server.delete("Service", marker, "shop")
    await until(lambda: marker not in proxy.planned, 60.0)


async def settled(server: ApiServer) -> None:
    """Until requests that nobody waits for any more have ended on the server, too."""
    await until(lambda: server.watching() == KINDS, 60.0)


async def measure(events: int) -> tuple[Figures, Figures]:
    """The figures after a tenth of the events, and after all."""
    dice = random.Random(11)
    early: Figures | None = None
    size = max(500, events // 200)
    async with ApiServer([node(), service_cidr()]) as server:
        server.bookmark_seconds = 1.0  # writing to a client that left ends its watch
        proxy = Proxy(server)
        total = 0
        while total < events:
            await batch(server, proxy, size, total // size + 1, dice)
            server.log.clear()
            server.world.history.clear()  # the server's own memory is not measured
            total += size
            if early is None and total >= events / 10:
                await settled(server)
                early = Figures.now(total)
        await settled(server)
        late = Figures.now(total)
        await proxy.close()
    assert early is not None
    return early, late


if __name__ == "__main__":
    begun = time.perf_counter()
    figures = asyncio.run(measure(int(sys.argv[1])))
    seconds = round(time.perf_counter() - begun, 1)
    print(json.dumps({"seconds": seconds, "figures": [asdict(each) for each in figures]}))
