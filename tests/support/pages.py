"""A fleet that tests change by hand, and a server of pages about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from steersman.model.names import ObjectName
from steersman.model.node_state import NodeState
from steersman.model.world import World
from steersman.operate.answer import QuestionError
from steersman.ui.fleet import Fleet
from steersman.ui.site import Site
from tests.support.http import free_port


class ScriptedFleet(Fleet):
    """Nodes with states, pages and Worlds that the test gives."""

    def __init__(
        self,
        nodes: Mapping[str, NodeState] | None = None,
        *,
        pages: Mapping[tuple[str, str], bytes] | None = None,
        worlds: Mapping[str, World] | None = None,
    ) -> None:
        self._nodes = dict(nodes or {})
        self.pages = dict(pages or {})
        self.worlds = dict(worlds or {})
        self.lines: list[Any] = []
        """Answer of every request that starts something."""
        self.posted: list[tuple[str, str, object]] = []
        self._change = asyncio.Event()

    @property
    def nodes(self) -> Mapping[str, NodeState]:
        return self._nodes

    def put(self, state: NodeState) -> None:
        self._nodes[state.node] = state
        self.version += 1
        self._change.set()
        self._change = asyncio.Event()

    async def changed(self, since: int) -> int:
        while self.version <= since:
            await self._change.wait()
        return self.version

    async def get(self, node: str, path: str) -> bytes:
        if (node, path) not in self.pages:
            raise QuestionError(f"{node}: no page {path}")
        return self.pages[node, path]

    async def post(self, node: str, path: str, document: object) -> AsyncIterator[Any]:
        self.posted.append((node, path, document))
        for line in self.lines:
            yield line

    async def world(self, node: str, service: ObjectName | None = None) -> World:
        if node not in self.worlds:
            raise QuestionError(f"there is no node {node}")
        return self.worlds[node]


@asynccontextmanager
async def serving(site: Site) -> AsyncIterator[TestClient[Any, Any]]:
    """Serve a site on a free port of loopback; yield its client."""
    async with TestClient(TestServer(site.app)) as client:
        yield client


async def events(
    client: TestClient[Any, Any], path: str, enough: Callable[[list[tuple[str, str]]], bool]
) -> list[tuple[str, str]]:
    """Follow a page until `enough` of its events (name, data) have come; return them."""
    found: list[tuple[str, str]] = []
    name, data = "", []
    async with asyncio.timeout(60):
        async with client.get(path, headers={"Accept": "text/event-stream"}) as reply:
            assert reply.status == 200, await reply.text()
            async for raw in reply.content:
                line = raw.decode().rstrip("\n")
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    data.append(line.removeprefix("data: "))
                elif not line and name:
                    found.append((name, "\n".join(data)))
                    name, data = "", []
                    if enough(found):
                        return found
    raise AssertionError(f"the stream ended with {found}")


@asynccontextmanager
async def serving_pages(app: web.Application, port: int = 0) -> AsyncIterator[int]:
    """Serve pages to a browser, as `steersman ui` does; the port."""
    port = port or free_port()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield port
    finally:
        await runner.cleanup()
