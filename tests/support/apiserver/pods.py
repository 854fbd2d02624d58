"""An API server with a single answer, for requests of one object."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from steersman.source.kubeconfig import ClusterAccess


@asynccontextmanager
async def answering(
    value: Any, status: int = 200
) -> AsyncIterator[tuple[ClusterAccess, list[str]]]:
    """An API server with one answer, and the paths that it was asked for."""
    paths: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        paths.append(request.rel_url.raw_path)
        return web.json_response(value, status=status)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        yield ClusterAccess(servers=(f"http://{host}:{port}",)), paths
    finally:
        await runner.cleanup()
