"""HTTP/2 over TLS in front of a server that speaks HTTP/1.1: each stream is a connection to it."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Self

import h11
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset, WindowUpdated
from h2.exceptions import ProtocolError

SUBJECT = "X-Client-Subject"
"""Header with the common name of the client's certificate."""


class Front:
    """Listens with TLS and passes requests on; clients without HTTP/2 are served, too."""

    def __init__(self, backend: int, host: str, port: int, tls: ssl.SSLContext) -> None:
        """Create it; `backend` is a port of this machine."""
        self._backend, self._host, self.port, self._tls = backend, host, port, tls
        self.visits = 0
        """Connections so far."""
        self.streams = 0
        """Requests in HTTP/2 so far."""
        self._visits: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.sessions: set[Session] = set()

    async def listen(self) -> Self:
        self._tls.set_alpn_protocols(["h2", "http/1.1"])
        self._server = await asyncio.start_server(
            self._serve, self._host, self.port, ssl=self._tls, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def close(self) -> None:
        """Stop, and cut all connections."""
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.gather(*self._visits, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.visits += 1
        self._visits.add(task)
        self._writers.add(writer)
        try:
            with suppress(OSError, ProtocolError):
                if writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2":
                    await Session(self, self._backend, reader, writer).run()
                else:
                    await _relay(self._backend, reader, writer)
        finally:
            self._visits.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()


async def _relay(backend: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on in both directions, until one side ends; the first head names the client."""

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()

    inner, outer = await asyncio.open_connection("127.0.0.1", backend)
    try:
        pumps = [
            asyncio.ensure_future(pump(reader, outer)),
            asyncio.ensure_future(pump(inner, writer)),
        ]
        _, rest = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for each in rest:
            each.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
    finally:
        outer.transport.abort()


class Session:
    """A connection in HTTP/2."""

    def __init__(
        self, front: Front, backend: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._front, self._backend = front, backend
        self._reader, self._writer = reader, writer
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self._bodies: dict[int, bytearray] = {}
        self._heads: dict[int, list[tuple[str, str]]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._room = asyncio.Event()

    async def run(self) -> None:
        self._front.sessions.add(self)
        self.h2.initiate_connection()
        self.flush()
        try:
            while data := await self._reader.read(1 << 16):
                self._take(data)
                self.flush()
        finally:
            self._front.sessions.discard(self)
            for task in list(self._tasks.values()):
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def flush(self) -> None:
        self._writer.write(self.h2.data_to_send())

    def go_away(self, last: int | None = None) -> None:
        """Say that this connection takes no more requests, as a server that shuts down."""
        saved = self.h2.state_machine.state
        self.h2.close_connection(last_stream_id=last)
        self.h2.state_machine.state = saved  # what was begun is answered
        self.flush()

    def _take(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            match event:
                case RequestReceived():
                    number = event.stream_id or 0
                    self._front.streams += 1
                    self._bodies[number] = bytearray()
                    self._heads[number] = [
                        (str(name), str(value)) for name, value in event.headers or ()
                    ]
                case DataReceived():
                    number = event.stream_id or 0
                    self._bodies.get(number, bytearray()).extend(event.data or b"")
                    self.h2.acknowledge_received_data(event.flow_controlled_length or 0, number)
                case StreamEnded():
                    number = event.stream_id or 0
                    answer = self._answer(number, self._heads.pop(number), self._bodies.pop(number))
                    self._tasks[number] = asyncio.ensure_future(answer)
                case StreamReset():
                    if running := self._tasks.get(event.stream_id or 0):
                        running.cancel()
                case WindowUpdated():
                    self._room.set()

    async def _answer(self, number: int, head: list[tuple[str, str]], body: bytearray) -> None:
        pseudo = {name: value for name, value in head if name.startswith(":")}
        headers = [(name.title(), value) for name, value in head if name[0] != ":"]
        certificate = self._writer.get_extra_info("peercert") or {}
        subject = dict(pair for (pair,) in certificate.get("subject", ())).get("commonName", "")
        headers += [("Host", pseudo[":authority"]), (SUBJECT, subject), ("Connection", "close")]
        request = h11.Request(method=pseudo[":method"], target=pseudo[":path"], headers=headers)
        http = h11.Connection(h11.CLIENT)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._backend)
        try:
            for event in (request, h11.Data(data=bytes(body)), h11.EndOfMessage()):
                writer.write(http.send(event) or b"")
            await self._pass_on(number, http, reader)
        except (OSError, h11.RemoteProtocolError):
            with suppress(ProtocolError):
                self.h2.reset_stream(number, ErrorCodes.INTERNAL_ERROR)
            self.flush()
        except ProtocolError:
            pass  # the client has ended the stream
        finally:
            writer.transport.abort()
            self._tasks.pop(number, None)

    async def _pass_on(
        self, number: int, http: h11.Connection, reader: asyncio.StreamReader
    ) -> None:
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await reader.read(1 << 16))
            elif isinstance(event, h11.Response):
                hop = (b"connection", b"transfer-encoding", b"keep-alive")
                headers = [(name, value) for name, value in event.headers if name not in hop]
                status = (b":status", str(event.status_code).encode())
                self.h2.send_headers(number, [status, *headers])
            elif isinstance(event, h11.Data):
                await self._send(number, memoryview(bytes(event.data)))
            else:
                self.h2.end_stream(number)
                self.flush()
                return
            self.flush()

    async def _send(self, number: int, rest: memoryview) -> None:
        while rest:
            window = self.h2.local_flow_control_window(number)
            room = min(window, self.h2.max_outbound_frame_size)
            if room > 0:
                self.h2.send_data(number, bytes(rest[:room]))
                rest = rest[room:]
                self.flush()
                await self._writer.drain()
            else:
                self._room.clear()
                await self._room.wait()
