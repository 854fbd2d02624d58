"""HTTP servers under test, and plain requests to them."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress

import aiohttp
import h11

from steersman.model.names import Protocol
from steersman.run.serve.http import Answer, App, Request, listen


def free_port() -> int:
    (port,) = free_ports(1)
    return port


def free_ports(count: int, protocol: Protocol = Protocol.TCP) -> list[int]:
    """Return ports of 127.0.0.1 that nobody uses.

    They are below those that the kernel chooses: one of these may go to a client or a server of
    another process before the test binds it. `random` is seeded alike in all processes.
    """
    kind = socket.SOCK_DGRAM if protocol is Protocol.UDP else socket.SOCK_STREAM
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            sock = stack.enter_context(socket.socket(type=kind))
            port = 12_000 + secrets.randbelow(16_000)
            with suppress(OSError):
                sock.bind(("127.0.0.1", port))
                ports.append(port)
    return ports


def asking(target: str) -> Request:
    """Return a GET request, for a page that is called without a server."""
    head = h11.Request(method="GET", target=target, headers=[("Host", "node")])
    return Request(head, lambda: asyncio.sleep(0), lambda: False)


class Reply(Answer, frozen=True):
    """An Answer as it arrived, with all headers."""

    received: Mapping[str, str] = {}


async def ask(
    port: int,
    path: str = "/",
    method: str = "GET",
    data: str | None = None,
    host: str = "127.0.0.1",
) -> Reply:
    url = f"http://{host}:{port}{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, data=data) as response,
    ):
        text = await response.text()
        return Reply(text, response.status, response.content_type, received=dict(response.headers))


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[int]:
    port = free_port()
    server = await listen(app, "127.0.0.1", port)
    try:
        yield port
    finally:
        await server.close()
