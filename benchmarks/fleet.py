"""What the nodes of a large cluster ask of its API servers, and when: real Sources, virtual time.

    python -m benchmarks.fleet --nodes 1000 --histogram

Each node is a Source with its HTTP client; the servers are the test API server, three of them on
one world. Connections are in memory, and the clock jumps from timer to timer
(`tests.support.virtual`), so requests are counted at their exact times, however slow it is;
CPU time is not part of it. A change is made every five seconds. The scenarios, one after the other:

    restart   each server in turn ends its watches in order, is down for 10 s, and comes back
    outage    all servers crash, and come back after 60 s without history: everybody lists again
    rollout   endpoints are replaced, all within a minute

What an idle Source costs is measured apart, with real sockets, and delays 60 times as short.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import logging
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from aiohttp import web

from benchmarks.figures import Figure, figure
from benchmarks.process import api_server
from steersman.model.findings import Finding
from steersman.model.kube import KubeObject
from steersman.model.names import ObjectName
from steersman.source.apiserver import ApiServerSource
from steersman.source.kubeconfig import ClusterAccess
from steersman.source.pace import Timing
from steersman.source.store import Store
from tests.support.apiserver.remote import control
from tests.support.apiserver.server import ApiServer
from tests.support.apiserver.world import Object, World
from tests.support.builders import kube
from tests.support.virtual import VirtualLoop
from tests.support.virtual import run as in_virtual_time
from tests.support.waiting import until

Address = tuple[str, int]

_BALANCER = ("10.0.0.9", 6443)
_SERVERS = tuple((f"10.0.0.{number}", 6443) for number in (1, 2, 3))
_PER_SLICE = 10
_SPEED = 60.0
"""Seconds of the true delays in one in which idle Sources are measured."""
_CORES, _WATCH_COST, _LIST_COST = 4, 0.001, 0.020
"""The server that queues are computed for: cores, and CPU seconds of a watch and of a list."""


class MemoryServer(ApiServer):
    """A test API server without sockets, in virtual time."""

    def __init__(
        self, loop: VirtualLoop, address: Address, world: World, on_change: Callable[[], None]
    ) -> None:
        super().__init__(host=address[0], port=address[1], world=world)
        self._on_change = on_change
        self._hosts = loop.network.hosts
        self._address = address
        self.up = False

    async def _listen(self) -> None:
        self.up = True
        self._hosts[self._address] = self.accept
        self._on_change()

    def accept(self) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection."""
        assert isinstance(self._runner.server, web.Server)
        return self._runner.server()

    async def end(self, *, in_order: bool) -> None:
        """Be down: refuse connections; end the open watches in order, or cut them."""
        self.up = False
        self._hosts.pop(self._address, None)
        self._on_change()
        if in_order:
            for watcher in self._watchers:
                watcher.queue.put_nowait(None)
            await asyncio.sleep(0.005)  # until the ends have arrived
        self.drop()
        assert isinstance(self._runner.server, web.Server)
        for connection in list(self._runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def begin(self) -> None:
        await self._listen()


class Node(Store):
    """Receives what one Source reads, and knows which version of each object it was told last."""

    def __init__(self, source: ApiServerSource) -> None:
        super().__init__()
        self.source = source
        self.told: dict[tuple[str, ObjectName], str] = {}
        self.ready: set[str] = set()

    def retain(self, kind: str, names: Container[ObjectName], keep: Container[str] = ()) -> None:  # noqa: ARG002
        self.ready.add(kind)
        gone = [key for key in self.told if key[0] == kind and key[1] not in names]
        for key in gone:
            del self.told[key]

    def upsert(self, obj: KubeObject) -> bool:
        meta = obj.metadata
        self.told[type(obj).__name__, meta.object_name] = meta.resource_version
        return True

    def delete(self, kind: str, name: ObjectName) -> bool:
        return self.told.pop((kind, name), None) is not None

    def reject(self, finding: Finding) -> None:
        raise AssertionError(finding)


@dataclass
class Outcome:
    """What a scenario cost the servers."""

    name: str
    nodes: int
    began: float
    attempts: list[float] = field(default_factory=list)
    """When connections were refused."""
    requests: list[tuple[float, str]] = field(default_factory=list)
    """When requests came, and the verb: list, watch, watchlist, or probe (a list of one object)."""
    connections: int = 0
    sent: int = 0
    """Bytes to the nodes."""
    converged: float = 0.0
    """Seconds after the servers were back until every node knew everything."""

    def times(self) -> list[float]:
        return sorted(self.attempts + [when for when, _ in self.requests])

    def peak(self, width: float) -> int:
        """Requests and refused connections in the busiest interval of this many seconds."""
        times, first, most = self.times(), 0, 0
        for last, when in enumerate(times):
            while when - times[first] >= width:
                first += 1
            most = max(most, last - first + 1)
        return most

    def queue(self) -> tuple[int, float]:
        """Return the longest queue of requests, and the longest wait in seconds.

        Computed: the three servers together have 3 x _CORES cores and one queue.
        """
        free, waiting = [0.0] * (3 * _CORES), list[float]()
        longest, wait = 0, 0.0
        for when, verb in sorted(self.requests):
            begin = max(when, heapq.heappop(free))
            cost = _LIST_COST if "list" in verb else _WATCH_COST
            heapq.heappush(free, begin + cost)
            while waiting and waiting[0] <= when:
                heapq.heappop(waiting)
            if begin > when:
                heapq.heappush(waiting, begin)
            longest, wait = max(longest, len(waiting)), max(wait, begin - when)
        return longest, wait

    def histogram(self) -> str:
        """Draw requests and refused connections, a line for each second that has some."""
        seconds = Counter(int(when - self.began) for when in self.times())
        most = max(seconds.values(), default=1)
        rows = (f"{second:5} s {count:6} {'#' * (60 * count // most)}"
                for second, count in sorted(seconds.items()))  # fmt: skip
        return "\n".join(rows)

    def line(self) -> str:
        verbs = Counter(verb for _, verb in self.requests)
        queue, wait = self.queue()
        per_node = (len(self.requests) + len(self.attempts)) / self.nodes
        return (
            f"{self.name:8} {len(self.requests):7} {len(self.attempts):7} {per_node:6.1f}"
            f" {self.peak(1.0):7} {self.peak(0.1):7} {queue:7} {wait:7.2f}"
            f" {self.connections:7} {self.sent / 1e6:8.1f} {self.converged:7.1f}"
            f"   {dict(sorted(verbs.items()))}"
        )


@dataclass
class IdleCost:
    """What one Source costs while nothing changes, in an hour of the true delays."""

    kilobytes: float
    cpu_seconds: float
    requests: float


HEADER = "scenario    sent refused a node  peak/s  /100ms   queue  wait,s   conns  MB down  conv,s"


class Fleet:
    """Three API servers on one world, and many Sources."""

    def __init__(
        self,
        loop: VirtualLoop,
        nodes: int,
        seed: int,
        *,
        balanced: bool = True,
        timing: Timing | None = None,
    ) -> None:
        self.loop = loop
        self.dice = random.Random(seed)
        self.world = World()
        for number in range(-(-nodes // _PER_SLICE)):
            self.world.put(kube.service(f"s{number}", f"10.96.{number // 250}.{number % 250 + 1}"))
            self._put_slice(number, nodes)
        self.size = nodes
        self.servers = [
            MemoryServer(loop, address, self.world, self._balance) for address in _SERVERS
        ]
        urls = tuple(f"http://{host}:{port}" for host, port in
                     ((_BALANCER,) if balanced else _SERVERS))  # fmt: skip
        timing = msgspec.structs.replace(timing or Timing(), now=loop.time, random=self.dice.random)
        access = ClusterAccess(servers=urls)
        sources = (ApiServerSource(access, f"node-{n}", timing=timing) for n in range(nodes))
        self.nodes = [Node(source) for source in sources]
        self.outcomes: list[Outcome] = []

    def _put_slice(self, number: int, nodes: int) -> None:
        """Put a slice with an endpoint on each of ten nodes."""
        endpoints: list[str | Object] = [
            {
                "addresses": [f"10.{self.dice.randrange(128, 192)}.{number % 250}.{each + 1}"],
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "nodeName": f"node-{(number * _PER_SLICE + each) % nodes}",
            }
            for each in range(_PER_SLICE)
        ]
        self.world.put(kube.endpoint_slice(f"s{number}-x", f"s{number}", *endpoints))

    def _balance(self) -> None:
        """Have the load balancer use the servers that are up."""
        up = [server for server in self.servers if server.up]
        hosts = self.loop.network.hosts
        if up:
            hosts[_BALANCER] = lambda: self.dice.choice(up).accept()
        else:
            hosts.pop(_BALANCER, None)

    async def __aenter__(self) -> Fleet:
        for server in self.servers:
            await server.__aenter__()
        self._tasks = [asyncio.create_task(self._start(node)) for node in self.nodes]
        self._tasks.append(asyncio.create_task(self._change()))
        await self._wait(self.converged)
        await asyncio.sleep(70)  # bookmarks come
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self.servers:
            await server.__aexit__(None, None, None)

    async def _start(self, node: Node) -> None:
        await asyncio.sleep(self.dice.uniform(0, 10))
        await node.source.run(node)

    async def _change(self) -> None:
        """Replace a slice's endpoints every few seconds."""
        while True:
            await asyncio.sleep(5.0)
            self._put_slice(self.dice.randrange(-(-self.size // _PER_SLICE)), self.size)

    async def _wait(self, condition: Callable[[], bool]) -> float:
        began = self.loop.time()
        while not condition():
            await asyncio.sleep(0.25)
            assert self.loop.time() - began < 600, "some nodes do not converge"
        return self.loop.time() - began

    def converged(self) -> bool:
        """Whether every node knows everything but, at most, the change of this moment."""
        wanted = {
            (kind, ObjectName(*key)): obj["metadata"]["resourceVersion"]
            for kind in ("Service", "EndpointSlice")
            for key, obj in self.world.objects[kind].items()
        }.items()
        return all(
            node.source.stats.connected
            and len(node.ready) == 4
            and len(wanted - node.told.items()) <= 1
            for node in self.nodes
        )

    async def measure(self, name: str, scenario: Callable[[], Awaitable[None]]) -> Outcome:
        """Run a scenario until every node has converged."""
        network, loop = self.loop.network, self.loop
        outcome = Outcome(name, self.size, loop.time())
        logs = [len(server.log) for server in self.servers]
        network.refused.clear()
        connections, sent = network.connections, network.sent
        await scenario()
        outcome.converged = await self._wait(self.converged)
        outcome.attempts = list(network.refused)
        for server, before in zip(self.servers, logs, strict=True):
            for entry in server.log[before:]:
                probe = entry.query.get("limit") == "1"
                outcome.requests.append((entry.time, "probe" if probe else entry.verb))
        outcome.connections = network.connections - connections
        outcome.sent = network.sent - sent
        self.outcomes.append(outcome)
        return outcome

    # The scenarios

    async def restart(self) -> None:
        for server in self.servers:
            await server.end(in_order=True)
            await asyncio.sleep(10)
            await server.begin()
            await asyncio.sleep(30)

    async def outage(self) -> None:
        await asyncio.gather(*(server.end(in_order=False) for server in self.servers))
        await asyncio.sleep(60)
        self.world.compact()
        for server in self.servers:
            await server.begin()

    async def rollout(self) -> None:
        slices = -(-self.size // _PER_SLICE)
        changes = max(1, 5 * self.size // _PER_SLICE)
        for number in range(changes):
            self._put_slice(number % slices, self.size)
            await asyncio.sleep(60 / changes)


def simulate(
    nodes: int,
    seed: int = 1,
    *,
    balanced: bool = True,
    tell: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Run the scenarios one after the other; return what each cost, and tell it at once."""

    async def main(loop: VirtualLoop) -> list[Outcome]:
        async with Fleet(loop, nodes, seed, balanced=balanced) as fleet:
            tell(await fleet.measure("restart", fleet.restart))
            await asyncio.sleep(30)
            tell(await fleet.measure("outage", fleet.outage))
            await asyncio.sleep(30)
            tell(await fleet.measure("rollout", fleet.rollout))
            return fleet.outcomes

    return in_virtual_time(main)


async def _be_idle(url: str, nodes: int, seconds: float) -> IdleCost:
    """Run Sources in this process; measure it while nothing changes."""
    timing = Timing(
        watch_shortest=300.0 / _SPEED,
        watch_longest=600.0 / _SPEED,
        optional_retry=300.0 / _SPEED,
        steady=5.0 / _SPEED,
    )
    access = ClusterAccess((url,))
    sources = [ApiServerSource(access, f"node-{n}", timing=timing) for n in range(nodes + 1)]

    def memory() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def requests() -> int:
        return sum(source.stats.requests.codes.total() for source in sources)

    async with asyncio.TaskGroup() as tasks:
        # The first one brings the memory that all share.
        running = [tasks.create_task(sources[0].run(Node(sources[0])))]
        await until(lambda: sources[0].stats.connected, 60)
        before = memory()
        running += [tasks.create_task(source.run(Node(source))) for source in sources[1:]]
        await until(lambda: all(source.stats.connected for source in sources), 120)
        kilobytes = (memory() - before) / nodes / 1000
        cpu, asked = time.process_time(), requests()
        await asyncio.sleep(seconds)
        cpu, asked = time.process_time() - cpu, requests() - asked
        for task in running:
            task.cancel()
    share = 3600 / (seconds * _SPEED) / len(sources)
    return IdleCost(kilobytes, cpu * share, asked * share)


def idle(nodes: int, seconds: float) -> IdleCost:
    """Measure idle Sources in a process of their own, beside a server; a minute is an hour."""
    with TemporaryDirectory() as folder, api_server([], Path(folder)) as url:
        control(url, "configure", bookmark_seconds=60.0 / _SPEED)
        words = ["--idle", url, "--nodes", str(nodes), "--seconds", str(seconds)]
        argv = [sys.executable, "-m", "benchmarks.fleet", *words]
        done = subprocess.run(argv, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=IdleCost)


def run(quick: bool) -> list[Figure]:
    """Simulate 300 nodes (60 when quick) and measure idle ones."""
    nodes = 60 if quick else 300
    logging.disable(logging.WARNING)
    try:
        restart, outage, _ = simulate(nodes)
    finally:
        logging.disable(logging.NOTSET)
    figures = []
    for each in (restart, outage):
        what = f"fleet, {each.name}"
        all_at_once = float(len(each.requests) + len(each.attempts))
        figures += [
            figure(f"{what}: busiest 100 ms", "", nodes, (each.peak(0.1), "req"), all_at_once),
            figure(f"{what}: requests of a node", "", nodes, (all_at_once / nodes, "req")),
            figure(f"{what}: all converged after", "", nodes, (each.converged, "s")),
        ]
    cost = idle(20 if quick else 100, 10 if quick else 30)
    return [
        *figures,
        figure("fleet, idle Source: memory", "", 0, (cost.kilobytes, "kB")),
        figure("fleet, idle Source: CPU an hour", "", 0, (cost.cpu_seconds, "s")),
        figure("fleet, idle Source: requests", "", 0, (cost.requests, "/h")),
    ]


def main() -> int:
    """Print the outcomes of one simulation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--urls", action="store_true", help="three URLs, not a load balancer")
    parser.add_argument("--histogram", action="store_true")
    parser.add_argument("--idle", metavar="URL", help="be idle Sources of this API server")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    logging.disable()
    if options.idle:
        cost = asyncio.run(_be_idle(options.idle, options.nodes, options.seconds))
        print(msgspec.json.encode(cost).decode())
        return 0
    print(HEADER, flush=True)
    outcomes = simulate(
        options.nodes,
        options.seed,
        balanced=not options.urls,
        tell=lambda outcome: print(outcome.line(), flush=True),
    )
    for outcome in outcomes if options.histogram else ():
        print(f"\n{outcome.name}: requests and refused connections in each second\n")
        print(outcome.histogram())
    return 0


if __name__ == "__main__":
    sys.exit(main())
