"""HTTP servers that say exactly what a test tells them, and a client that leaves nothing open."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from steersman.source.http import HttpClient, Response
from steersman.source.http_connection import HttpError
from tests.support.waiting import until

PATIENCE = 60.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
BEGINS = b"HTTP/1.1 200 OK\r\nContent-Type: Text/Plain; charset=x\r\n"
CHUNKED = BEGINS + b"Transfer-Encoding: chunked\r\n\r\n"
Talk = Callable[["Visit"], Awaitable[None]]


class Visit:
    """A connection to a test server."""

    def __init__(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.number = number
        self._reader = reader
        self._writer = writer

    async def head(self) -> str:
        """The next request without its body."""
        return (await self._reader.readuntil(b"\r\n\r\n")).decode()

    async def body(self, size: int) -> bytes:
        return await self._reader.readexactly(size)

    async def say(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()

    async def gone(self) -> None:
        """Wait until the client has closed it."""
        with suppress(ConnectionError):
            while await self._reader.read(1 << 16):
                pass

    def reset(self) -> None:
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._writer.transport.abort()

    def lead_to(self, port: int) -> Awaitable[object]:
        """Pass everything on to a port of this machine, in both directions."""

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                writer.write(data)
            writer.close()

        async def both() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pump(self._reader, writer), pump(reader, self._writer))

        return both()


class Server:
    """Talks to each client as told, and counts them."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.visits = 0
        self.open = 0

    def url(self, scheme: str = "http", host: str = "127.0.0.1") -> str:
        return f"{scheme}://{host}:{self.port}"


@asynccontextmanager
async def serving(
    talk: Talk, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[Server]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.visits += 1
        made.open += 1
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await talk(Visit(made.visits, reader, writer))
        finally:
            made.open -= 1
            writer.close()

    server = await asyncio.start_server(serve, host, port, ssl=tls)
    made = Server(server.sockets[0].getsockname()[1])
    try:
        yield made
    finally:
        server.close()


def answering(*pieces: bytes) -> Talk:
    """The same pieces for each request, until the client leaves."""

    async def talk(visit: Visit) -> None:
        while True:
            await visit.head()
            await visit.say(*pieces)

    return talk


def once(*pieces: bytes) -> Talk:
    """One answer; then the server closes the connection."""

    async def talk(visit: Visit) -> None:
        await visit.head()
        await visit.say(*pieces)

    return talk


@asynccontextmanager
async def client(**options: Any) -> AsyncIterator[HttpClient]:
    """A client that leaves no descriptor open."""
    before = descriptors()
    made = HttpClient(**options)
    yield made
    await made.aclose()
    await until(lambda: descriptors() <= before)


def descriptors() -> set[str]:
    """What this process has connected, without the ends that belong to test servers."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found.add(target)
    return found


async def body_of(response: Response) -> bytes:
    with_end = [chunk async for chunk in response.chunks()]
    return b"".join(with_end)


async def get(made: HttpClient, url: str, **more: Any) -> tuple[int, bytes]:
    response = await made.request(url, patience=more.pop("patience", PATIENCE), **more)
    try:
        return response.status, await body_of(response)
    finally:
        response.close()


async def failure(made: HttpClient, url: str, **more: Any) -> HttpError:
    with pytest.raises(HttpError) as caught:
        await get(made, url, **more)
    return caught.value
