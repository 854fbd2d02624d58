"""Servers that speak HTTP/2 as a test tells them, over TLS or without a network."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import Event, RequestReceived
from h2.exceptions import ProtocolError
from h2.settings import Settings

from steersman.source.http2_connection import Http2Connection
from tests.support.apiserver.certificates import Authority

REQUEST = 1
"""The stream of the first request."""


class Peer:
    """The server's end of a connection over TLS."""

    def __init__(
        self,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        settings: dict[Any, int],
    ) -> None:
        self.number = number
        self._reader = reader
        self.writer = writer
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.h2.local_settings = Settings(client=False, initial_values=settings)
        self.h2.initiate_connection()
        self._events: list[Event] = []
        self.flush()

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    async def event(self, kind: type[Event]) -> Any:
        """The next event of a kind; others before it are left out."""
        while True:
            while self._events:
                found = self._events.pop(0)
                if isinstance(found, kind):
                    return found
            data = await self._reader.read(1 << 16)
            if not data:
                raise ConnectionError("the client has left")
            self._events = self.h2.receive_data(data)
            self.flush()

    async def request(self) -> int:
        """The number of the next request."""
        number: int = (await self.event(RequestReceived)).stream_id
        return number

    def answer(self, number: int, body: bytes = b"ok", *, end: bool = True) -> None:
        self.h2.send_headers(number, [(":status", "200"), ("content-type", "text/plain")])
        self.h2.send_data(number, body, end_stream=end)
        self.flush()

    def go_away(self, last: int) -> None:
        """Take no more requests; h2 itself would also send no more answers."""
        state = self.h2.state_machine.state
        self.h2.close_connection(last_stream_id=last)
        self.h2.state_machine.state = state
        self.flush()

    async def gone(self) -> None:
        """Wait until the client has closed the connection."""
        with suppress(ConnectionError):
            while await self._reader.read(1 << 16):
                pass


class Server:
    def __init__(self, port: int, tls: ssl.SSLContext) -> None:
        self.url = f"https://127.0.0.1:{port}"
        self.tls = tls
        """For clients."""
        self.visits = 0
        self.open = 0
        self.failures: list[BaseException] = []


@asynccontextmanager
async def serving2(
    talk: Callable[[Peer], Awaitable[None]], folder: Path, settings: dict[Any, int] | None = None
) -> AsyncIterator[Server]:
    authority = Authority()
    context = authority.server_context(folder)
    context.set_alpn_protocols(["h2"])
    client = ssl.create_default_context(cadata=authority.pem.decode())
    client.set_alpn_protocols(["h2", "http/1.1"])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.visits += 1
        made.open += 1
        try:
            with suppress(OSError, ProtocolError):
                await talk(Peer(made.visits, reader, writer, settings or {}))
        except AssertionError as error:
            made.failures.append(error)
        finally:
            made.open -= 1
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    made = Server(server.sockets[0].getsockname()[1], client)
    try:
        yield made
        assert not made.failures, made.failures
    finally:
        server.close()


async def answering2(peer: Peer) -> None:
    """Answer each request, until the client leaves."""
    while True:
        peer.answer(await peer.request())


class Wire(asyncio.Transport):
    """The client's transport without a network."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.closed = False
        self.unsent = 0

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.sent += data

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return self.unsent


class Bare(NamedTuple):
    """A client and a server that are joined by the test itself."""

    client: Http2Connection
    wire: Wire
    server: H2Connection

    def exchange(self) -> list[Event]:
        """Give each end what the other one has sent; return what the server has received."""
        events = self.server.receive_data(bytes(self.wire.sent))
        self.wire.sent.clear()
        if answer := self.server.data_to_send():
            self.client.data_received(answer)
        return events


def bare() -> Bare:
    """A connection whose beginning is over."""
    made = Bare(Http2Connection("server"), Wire(), H2Connection(H2Configuration(client_side=False)))
    made.client.connection_made(made.wire)
    made.server.initiate_connection()
    made.exchange()
    made.exchange()
    return made
