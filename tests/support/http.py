"""HTTP servers under test, and plain requests to them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from steersman.run.http import Answer, listen


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Reply(Answer, frozen=True):
    """An Answer as it arrived, with all headers."""

    received: Mapping[str, str] = {}


async def ask(port: int, path: str = "/", method: str = "GET", data: str | None = None) -> Reply:
    url = f"http://127.0.0.1:{port}{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, data=data) as response,
    ):
        text = await response.text()
        return Reply(text, response.status, response.content_type, received=dict(response.headers))


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[int]:
    port = free_port()
    server = await listen(app, "127.0.0.1", port)
    try:
        yield port
    finally:
        await server.close()
