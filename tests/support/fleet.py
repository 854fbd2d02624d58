"""Simulated nodes: the pages of many processes on one port, each below `/nodes/NAME`.

In a test's own loop: `async with SimulatedNodes(3) as nodes`. As a process, for a browser or a
benchmark: `python -m tests.support.fleet --nodes 1000 --services 10000 --changes 50`; it prints
`listening on URL` and writes the nodes into a file for `steersman ui --nodes-file`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from steersman import __version__
from steersman.compile.planner import compile_all
from steersman.model.drift import Drift, Writer
from steersman.model.findings import Finding, Severity
from steersman.model.inputs import HostFacts, NodeConfig, Snapshot
from steersman.model.names import ObjectName
from steersman.model.node_state import Condition, NodeState
from steersman.model.plan import Traits
from steersman.model.top import TopRow, TopSample
from steersman.model.world import Origin, World
from steersman.run.pages.conditions import judge
from steersman.run.pages.names_page import names
from steersman.run.pages.top import printed
from steersman.run.pages.world_wire import encode_world
from steersman.source.objects import decode_value
from steersman.source.packed import unpacked
from steersman.source.store import Store
from steersman.ui.fleet import Fleet
from tests.support.builders import kube

TOKEN = "a token of the nodes"


@asynccontextmanager
async def followed(fleet: Fleet) -> AsyncIterator[Fleet]:
    """Run a fleet inside."""
    task = asyncio.create_task(fleet.run())
    try:
        yield fleet
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


MODES = ("nftables", "nftables", "nftables", "iptables", "ipvs")


def many_services(count: int, endpoints: int = 3) -> list[kube.Object]:
    """Services `shop-N/web-N` in 20 namespaces; every 50th has no endpoint."""
    found: list[kube.Object] = []
    for number in range(count):
        space, name = f"shop-{number % 20:02}", f"web-{number:05}"
        ip = f"10.{96 + number // 62500}.{number // 250 % 250}.{number % 250 + 1}"
        found.append(kube.service(name, ip, namespace=space))
        pods = [
            f"10.244.{(number * endpoints + each) // 250 % 250}.{(number + each) % 250 + 1}"
            for each in range(endpoints if number % 50 else 0)
        ]
        found.append(kube.endpoint_slice(f"{name}-x", name, *pods, namespace=space))
    return found


class _Node:
    def __init__(self, state: NodeState) -> None:
        self.state = state
        self.up = True
        self.news = asyncio.Event()
        self.requests: set[asyncio.Task[Any]] = set()
        self.digests: dict[str, str] = {}
        self.history: list[Any] = []
        self.answers: list[Any] = [{"verdict": "ok"}]
        """Lines of the answer to `/run`."""


class SimulatedNodes:
    """Nodes that serve the same World, with states that a test changes."""

    def __init__(
        self,
        count: int | Sequence[str] = 3,
        *,
        objects: Iterable[kube.Object] = (),
        token: str = "",
        port: int = 0,
        heartbeat: float = 5.0,
        root: str = "",
    ) -> None:
        """Make nodes by their number or names; `root` is one that answers at `/` as well."""
        self.token = token
        self.heartbeat = heartbeat
        self._root = root
        self.streams = 0
        """Streams of states that were opened."""
        self.asked: list[tuple[str, str]] = []
        """Node and path of each request, streams of states aside."""
        self._port = port
        self._store = Store("")
        for obj in objects:
            value = decode_value(obj["kind"], obj)
            assert not isinstance(value, Finding), value
            self._store.upsert(value)
        for kind in ("Service", "EndpointSlice", "Node", "ServiceCIDR"):
            self._store.retain(kind, self._names(kind))
        self._config = NodeConfig()
        self._facts = HostFacts("node", {"lo": ("127.0.0.1/8",), "eth0": ("10.0.0.1/24",)})
        self._plan = compile_all(self._store.snapshot, self._config, self._facts, Traits())
        digests = {str(name): f"{hash(name) & (1 << 64) - 1:016x}" for name in self._services}
        listed = [f"node-{n + 1:04}" for n in range(count)] if isinstance(count, int) else count
        self._nodes = {name: _Node(self._fresh(name, number)) for number, name in enumerate(listed)}
        for node in self._nodes.values():
            node.digests = digests

    def _names(self, kind: str) -> set[ObjectName]:
        if kind == "Service":
            return {*self._store.snapshot.services, *self._store.unserved}
        return {unpacked(each).metadata.object_name for each in self._store.packed_slices()}

    @cached_property
    def _services(self) -> Sequence[ObjectName]:
        return sorted(self._store.snapshot.services)

    @cached_property
    def _listed(self) -> Sequence[tuple[str, int]]:
        """ServicePorts and the numbers of their endpoints, sorted as `/top` does."""
        plans = sorted(self._plan.services.items())
        return [(printed(key.name), len(plan.reachable)) for key, plan in plans]

    @cached_property
    def _endpoints(self) -> Mapping[str, list[tuple[str, int]]]:
        """Endpoints by Service, as `/top` names them."""
        found: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        for key, plan in self._plan.services.items():
            port = f" ({key.name.port})" if key.name.port else ""
            ends = [(f"{end}{port}", 1) for end in plan.reachable]
            found[str(key.name.object_name)] += ends
        return found

    def _fresh(self, name: str, number: int) -> NodeState:
        now = time.time()
        kinds = ("Synced", "SourceConnected", "KernelMatches", "NoFindings", "Healthy")
        return NodeState(
            name,
            MODES[number % len(MODES)],
            version=__version__ if number % 4 else "0.0.9",
            pid=1000 + number,
            started=now - 3600,
            now=now,
            revision=10,
            synced_at=now - number % 60,
            sync_reason="changes",
            sync_seconds=0.004,
            lag=0.05,
            lag_p99=0.2,
            conditions=tuple(
                Condition(kind, "True", "Well", "as it should", now) for kind in kinds
            ),
            services=len(self._services),
            service_ports=len(self._plan.services),
            endpoint_slices=len(self._services),
            objects=6 * len(self._services),
            cpu=0.01,
            memory=90 << 20,
            digest="5eed5eed5eed5eed",
        )

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/nodes/{name}/{page}", self._serve)
        app.router.add_post("/nodes/{name}/run", self._run)
        app.router.add_get("/{page}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, backlog=1024)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in self._nodes:
            self.stop(name)
        await self._runner.cleanup()

    @property
    def port(self) -> int:
        return self._port

    @property
    def urls(self) -> dict[str, str]:
        """URL of each node by its name."""
        return {name: f"http://127.0.0.1:{self._port}/nodes/{name}" for name in self._nodes}

    def write_file(self, path: Path) -> None:
        """Write the nodes for `--nodes-file`."""
        path.write_text("".join(f"{name}={url}\n" for name, url in self.urls.items()))

    # What tests do to nodes

    def state(self, name: str) -> NodeState:
        return self._nodes[name].state

    def change(self, name: str, **fields: Any) -> None:
        """Change the state of a node, and send it, with the conditions that follow."""
        node = self._nodes[name]
        state = msgspec.structs.replace(node.state, now=time.time(), **fields)
        conditions = tuple(judge(state))
        node.state = msgspec.structs.replace(state, **{"conditions": conditions, **fields})
        news, node.news = node.news, asyncio.Event()
        news.set()

    def find(self, name: str, *findings: Finding) -> None:
        """Give a node these Findings."""
        counts = {each: sum(f.severity is each for f in findings) for each in Severity}
        self.change(name, findings=findings, finding_counts=counts)

    def disagree(self, name: str, *services: str) -> None:
        """Let a node serve something else of these Services than the others."""
        node = self._nodes[name]
        node.digests = {**node.digests, **dict.fromkeys(services, "another")}
        self.change(name, digest="another")

    def set_history(self, name: str, records: Sequence[Any]) -> None:
        self._nodes[name].history = list(records)

    def set_answers(self, name: str, lines: Sequence[Any]) -> None:
        """Set the lines of the answer to `/run`."""
        self._nodes[name].answers = list(lines)

    def stop(self, name: str) -> None:
        """Let a node answer nothing more, and cut its streams."""
        node = self._nodes[name]
        node.up = False
        for task in node.requests:
            task.cancel()

    def start(self, name: str) -> None:
        self._nodes[name].up = True

    # How they answer

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        name, page = request.match_info.get("name", self._root), request.match_info["page"]
        node = self._admit(request, name)
        task = asyncio.current_task()
        assert task is not None
        node.requests.add(task)
        try:
            if page == "node" and request.query.get("watch"):
                return await self._watch(request, node)
            self.asked.append((name, request.path_qs.partition(name)[2]))
            match page:
                case "node":
                    return _json(node.state)
                case "digests":
                    return _json(node.digests)
                case "names":
                    return _json(self._known(request.query.get("kind", "")))
                case "world":
                    return await self._world(request, node)
                case "top":
                    body = msgspec.msgpack.encode(self._top(request, node))
                    return web.Response(body=body, content_type="application/msgpack")
                case "history":
                    history = {"node": name, "now": time.time(), "started": node.state.started}
                    return _json({**history, "records": node.history})
            raise web.HTTPNotFound
        finally:
            node.requests.discard(task)

    def _admit(self, request: web.Request, name: str) -> _Node:
        node = self._nodes.get(name)
        if node is None:
            raise web.HTTPNotFound
        if not node.up:
            raise web.HTTPServiceUnavailable(text="the node is down\n")
        if self.token and request.headers.get("X-Steersman-Token") != self.token:
            raise web.HTTPUnauthorized(text="unauthorized\n")
        return node

    async def _watch(self, request: web.Request, node: _Node) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        self.streams += 1
        while True:
            news = node.news
            await response.write(msgspec.json.encode(node.state) + b"\n")
            try:
                async with asyncio.timeout(self.heartbeat):
                    await news.wait()
            except TimeoutError:
                node.state = msgspec.structs.replace(node.state, now=time.time())

    def _known(self, kind: str) -> list[str]:
        services = {*self._store.snapshot.services, *self._store.unserved}
        plans = list(self._plan.services.values())
        return names(kind, services, map(unpacked, self._store.packed_slices()), (), plans)

    async def _world(self, request: web.Request, node: _Node) -> web.StreamResponse:
        wanted = set(request.query.getall("service", []))
        known = {**self._store.snapshot.services, **self._store.unserved}

        def mine(name: ObjectName) -> bool:
            return not wanted or str(name) in wanted

        if wanted and not any(str(name) in wanted for name in known):
            raise web.HTTPNotFound(text=f"there is no Service {', '.join(sorted(wanted))}\n")
        owners = self._store.snapshot.slices
        kept = {each.metadata.name for name in owners if mine(name) for each in owners[name]}
        slices = [
            each
            for each in self._store.packed_slices()
            if not wanted or unpacked(each).metadata.name in kept
        ]
        store, plan = self._store, self._plan
        process = self._now(node)
        world = World(
            Origin("process", ""),
            Snapshot({name: s for name, s in store.snapshot.services.items() if mine(name)}),
            msgspec.structs.replace(
                plan,
                services={k: p for k, p in plan.services.items() if mine(k.name.object_name)},
            ),
            process.mode,
            process.variant,
            msgspec.structs.replace(self._config, node_name=node.state.node),
            self._facts,
            (*plan.findings, *node.state.findings),
            unserved={name: s for name, s in store.unserved.items() if mine(name)},
            process=process,
        )
        pieces = encode_world(world, slices)
        return web.Response(body=b"".join(pieces))

    @staticmethod
    def _now(node: _Node) -> NodeState:
        return msgspec.structs.replace(node.state, version=__version__, now=time.time())

    def _top(self, request: web.Request, node: _Node) -> TopSample:
        service = request.query.get("service", "")
        text = request.query.get("filter", "")
        if service:
            found = self._endpoints[service]
        else:
            found = [each for each in self._listed if text in each[0]]
        rows = tuple(
            TopRow(name, "TCP", ends, 100 + n, 1.5 + n % 7, n % 3, 0.1 * (n % 3), 0.002)
            for n, (name, ends) in enumerate(found[:500])
        )
        return TopSample(
            self._now(node),
            counted=True,
            total=TopRow("all", "", 0, 1000, 25.0, 3, 0.1, 0.002),
            interval=1.0,
            matching=len(found),
            rows=rows,
        )

    async def _run(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        node = self._admit(request, name)
        self.asked.append((name, (await request.read()).decode()))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for line in node.answers:
            await response.write(msgspec.json.encode(line) + b"\n")
        return response


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def trouble(nodes: SimulatedNodes) -> None:
    """Give some nodes the troubles that pages show: at least twelve nodes are needed."""
    names = list(nodes.urls)
    bad = Finding("Service shop-01/web-00001", "spec.ports[0].port", "is 0", Severity.ERROR)
    hostile = Finding("Service shop/<script>alert(1)</script>", "", "a name to escape")
    for name in names[:: max(1, len(names) // 40)]:
        nodes.find(name, bad, hostile)
    nodes.stop(names[3])
    nodes.change(names[5], failure="nft: Operation not supported", healthy=False)
    writer = Writer("kube-router", 4711, "systemd (1)", time.time())
    nodes.change(names[7], drift=Drift(time.time(), missing=2, writers=(writer,)))
    nodes.change(names[8], lag_p99=42.0)
    nodes.change(names[9], synced_at=0.0, waiting="the first lists of Services")
    nodes.disagree(names[10], "shop-03/web-00003")


async def keep_changing(nodes: SimulatedNodes, per_second: float, seed: int = 1) -> None:
    """Change states of random nodes for ever, a number of times a second in all."""
    chance = random.Random(seed)
    names = list(nodes.urls)
    begin = time.monotonic()
    for number in itertools.count():
        await asyncio.sleep(max(0.0, begin + number / per_second - time.monotonic()))
        name = chance.choice(names)
        nodes.change(
            name,
            revision=nodes.state(name).revision + 1,
            synced_at=time.time(),
            lag=chance.uniform(0.01, 0.4),
            cpu=chance.uniform(0.005, 0.08),
            memory=chance.randrange(80 << 20, 120 << 20),
        )


async def _main(args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    objects = many_services(args.services)
    async with SimulatedNodes(args.nodes, objects=objects, port=args.port) as nodes:
        if args.trouble:
            trouble(nodes)
        if args.file:
            nodes.write_file(args.file)
        print(f"listening on http://127.0.0.1:{nodes.port}", flush=True)
        changing = asyncio.create_task(keep_changing(nodes, args.changes)) if args.changes else None
        await stop.wait()
        if changing is not None:
            changing.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--services", type=int, default=100)
    parser.add_argument("--changes", type=float, default=0.0, help="a second, in all")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--file", type=Path, help="write the nodes there")
    parser.add_argument("--trouble", action="store_true")
    asyncio.run(_main(parser.parse_args()))
