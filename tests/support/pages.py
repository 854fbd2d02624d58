"""A fleet that tests change by hand, and a server of pages about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientResponse, ClientSession, CookieJar, TraceConfig, TraceRequestEndParams

from steersman.model.names import ObjectName
from steersman.model.node_state import NodeState
from steersman.model.world import World
from steersman.operate.answer import QuestionError
from steersman.operate.node_trouble import SeenNode
from steersman.run.serve.http import App, listen
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
        self.version, self.problem = 0, ""
        self.disagreements = ()
        self._nodes = dict(nodes or {})
        self.pages = dict(pages or {})
        self.worlds = dict(worlds or {})
        self.lines: list[Any] = []
        """Answer of every request that starts something."""
        self.posted: list[tuple[str, str, object]] = []
        self._put = asyncio.Event()

    @property
    def nodes(self) -> Mapping[str, NodeState]:
        return self._nodes

    @property
    def seen(self) -> Sequence[SeenNode]:
        return tuple(
            SeenNode(name, "", state, state.now, state.now) for name, state in self.nodes.items()
        )

    def put(self, state: NodeState) -> None:
        self._nodes[state.node] = state
        self.version += 1
        self._put.set()
        self._put = asyncio.Event()

    async def changed(self, since: int) -> int:
        while self.version <= since:
            await self._put.wait()
        return self.version

    async def get(self, node: str, path: str) -> bytes:
        if (node, path) not in self.pages:
            raise QuestionError(f"{node}: no page {path}")
        return self.pages[node, path]

    async def post(self, node: str, path: str, document: object) -> AsyncIterator[Any]:
        self.posted.append((node, path, document))
        for line in self.lines:
            yield line

    async def world(self, node: str, services: Sequence[ObjectName] = ()) -> World:
        if node not in self.worlds:
            raise QuestionError(f"there is no node {node}")
        return self.worlds[node]


@asynccontextmanager
async def serving_pages(app: App, port: int = 0) -> AsyncIterator[int]:
    """Serve pages on loopback, as `steersman ui` does; yield the port."""
    server = await listen(app, "127.0.0.1", port or free_port())
    try:
        yield server.port
    finally:
        await server.close()


@asynccontextmanager
async def serving(site: Site) -> AsyncIterator[ClientSession]:
    """Serve a site on a free port of loopback; yield a client of it, whose replies it closes."""
    replies: list[ClientResponse] = []
    tracing = TraceConfig()

    async def keep(_: ClientSession, __: object, ended: TraceRequestEndParams) -> None:
        replies.append(ended.response)

    tracing.on_request_end.append(keep)
    jar = CookieJar(unsafe=True)
    async with (
        serving_pages(site.app) as port,
        ClientSession(
            f"http://127.0.0.1:{port}", cookie_jar=jar, trace_configs=[tracing]
        ) as client,
    ):
        try:
            yield client
        finally:
            for reply in replies:
                reply.close()


async def events(
    client: ClientSession, path: str, enough: Callable[[list[tuple[str, str]]], bool]
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
