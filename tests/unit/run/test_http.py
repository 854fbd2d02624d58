"""HTTP as clients speak it, well and badly: bodies, streams, rows of requests, and attacks."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import h11
import pytest

from steersman.run.serve.connections import Bounds, ClientPool
from steersman.run.serve.http import Answer, App, Connection, Request, application, listen
from tests.support.apiserver.certificates import Authority
from tests.support.waiting import until

SECONDS = 60.0
HOST = b"Host: x\r\n"
LAST = b"Connection: close\r\n"


async def echo(request: Request) -> Answer:
    return Answer(await request.read())


def described(request: Request) -> Answer:
    return Answer(f"{request.method} {request.path} {request.arguments} {dict(request.query)}")


ECHO = application({"/echo": echo, "/hello": lambda _: Answer("hello")}, described)


@asynccontextmanager
async def serving(app: App = ECHO, bounds: Bounds | None = None) -> AsyncIterator[int]:
    server = await listen(app, "127.0.0.1", 0, ClientPool(bounds or Bounds()))
    try:
        yield server.port
    finally:
        await server.close()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(SECONDS):
            yield reader, writer
    finally:
        writer.close()


async def said(port: int, sent: bytes) -> bytes:
    """All that the server says until it closes the connection."""
    async with connected(port) as (reader, writer):
        writer.write(sent)
        heard = bytearray()
        try:
            while data := await reader.read(65536):
                heard += data
        except ConnectionResetError:  # it has not read all
            pass
        return bytes(heard)


def status(heard: bytes) -> int:
    return int(heard.split(b" ")[1])


# Requests


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("GET /a%20b?x=1&y=&x=2 HTTP/1.1",
         "GET /a b [('x', '1'), ('y', ''), ('x', '2')] {'x': '1', 'y': ''}"),
        ("GET http://node:10249/a?x HTTP/1.1", "GET /a [('x', '')] {'x': ''}"),
        ("BREW //a/../b HTTP/1.1", "BREW //a/../b [] {}"),
        ("OPTIONS * HTTP/1.0", "OPTIONS * [] {}"),
    ],
)  # fmt: skip
async def test_what_is_asked(line: str, text: str) -> None:
    async with serving() as port:
        heard = await said(port, line.encode() + b"\r\n" + HOST + LAST + b"\r\n")
    assert (status(heard), heard.partition(b"\r\n\r\n")[2]) == (200, text.encode())
    assert b"\r\nConnection: close\r\n" in heard
    assert b"server:" not in heard.lower()


async def test_a_head_is_that_of_the_page_without_its_body() -> None:
    asked = b" /hello HTTP/1.1\r\n" + HOST + LAST + b"\r\n"
    async with serving() as port:
        head, whole = await said(port, b"HEAD" + asked), await said(port, b"GET" + asked)
    undated = [re.sub(rb"\r\nDate: .* GMT", b"", each) for each in (head + b"hello", whole)]
    assert undated[0] == undated[1] != whole
    assert b"\r\nContent-Length: 5\r\n" in head


@pytest.mark.parametrize("sent", [b"", b"POST /echo HTTP/1.1\r\nContent-Length: 9\r\n" + HOST])
async def test_requests_before_a_client_ends_its_side_are_answered(sent: bytes) -> None:
    async with serving() as port, connected(port) as (reader, writer):
        writer.write(b"GET /hello HTTP/1.1\r\n" + HOST + b"\r\n")
        writer.write(b"POST /echo HTTP/1.1\r\nContent-Length: 5\r\n" + HOST + b"\r\nagain")
        writer.write(sent)  # one that never becomes whole has no answer
        writer.write_eof()
        heard = await reader.read()
    assert re.findall(rb"\r\n\r\n(hello|again)", heard) == [b"hello", b"again"]


async def test_an_upgrade_is_an_ordinary_request() -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    async with serving() as port, connected(port) as (reader, writer):
        for _ in range(2):  # and the connection goes on
            writer.write(b"GET /hello HTTP/1.1\r\n" + HOST + upgrade + b"\r\n")
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: 9\r\n\r\nsteersman",
        b"Transfer-Encoding: chunked\r\n\r\n5;x=y\r\nsteer\r\n4\r\nsman\r\n0\r\nEnd: of\r\n\r\n",
    ],
)
async def test_a_body_is_read_however_it_comes(body: bytes) -> None:
    asked = b"POST /echo HTTP/1.1\r\n" + HOST + body
    async with serving() as port, connected(port) as (reader, writer):
        for size in (len(asked), 7, 1):
            for at in range(0, len(asked), size):
                writer.write(asked[at : at + size])
                await writer.drain()
                await asyncio.sleep(0)
            assert b" 200 OK" in await reader.readuntil(b"steersman")


async def test_a_client_that_waits_to_send_its_body_may_go_on_if_a_page_reads_it() -> None:
    head = b"HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 9\r\n" + HOST + b"\r\n"
    async with serving() as port:
        async with connected(port) as (reader, writer):
            writer.write(b"POST /echo " + head)
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"steersman")
            assert b" 200 OK" in await reader.readuntil(b"steersman")
        # Otherwise nobody knows whether the body comes: the answer is the last one.
        heard = await said(port, b"POST /hello " + head)
    assert status(heard) == 200
    assert b"\r\nConnection: close\r\n" in heard


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"Content-Length: 1048577\r\n\r\n" + b"x" * 1048577, 413),
        (b"Transfer-Encoding: chunked\r\n\r\n" + (b"ffff\r\n" + b"x" * 65535 + b"\r\n") * 17, 413),
        (b"Transfer-Encoding: chunked\r\n\r\nsteersman\r\n", 400),
        (b"Transfer-Encoding: chunked\r\n\r\n1\r\nxx\r\n", 400),
        (b"Content-Length: 1048576\r\n\r\n" + b"x" * 1048576, 200),
    ],
)
async def test_bodies_that_are_too_large_or_broken(
    body: bytes, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as port, connected(port) as (reader, writer):
        writer.write(b"POST /echo HTTP/1.1\r\n" + HOST + LAST + body)
        assert status(await reader.readuntil(b"\r\n")) == code
    assert not caplog.records


# Attacks


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),  # HTTP/2
        (b"GET /<script> HTTP/3.0\r\n" + HOST + b"\r\n", 505),
        (b"GET /<script>\r\n\r\n", 400),  # HTTP/0.9
        (b"GET /a <script> HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + b"<script>\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + b"X: \x00<script>\r\n\r\n", 400),
        (b"CONNECT <script>:443 HTTP/1.1\r\n" + HOST + b"\r\n", 405),
        (b"GET /" + b"x" * 30_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + HOST + b"A: <script>\r\n" * 3000 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b"y" * (10 << 20), 431),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: <script>\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: <script>\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (b"HEAD / HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
         b"0\r\n\r\nGET /hello HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ],
)  # fmt: skip
async def test_what_is_not_a_request_ends_the_connection(
    sent: bytes, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as port:
        async with connected(port) as (reader, writer):
            writer.write(sent)
            heard = await reader.readuntil(b"\r\n\r\n")
            assert status(heard) == code
            with suppress(ConnectionResetError):
                heard += await reader.read()
        assert heard.count(b"HTTP/1.1") == 1
        assert b"script" not in heard
        assert b"\r\nConnection: close\r\n" in heard
        assert status(await said(port, b"GET / HTTP/1.0\r\n\r\n")) == 200
    assert not caplog.records


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\n\n",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
        b"POST /hello HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
    ],
)
async def test_a_bad_request_leaves_no_cycle_to_the_collector(sent: bytes) -> None:
    """It hardly runs in the process: a thousand such requests would leave 6 MB."""

    def errors() -> int:
        return sum(type(each) is h11.RemoteProtocolError for each in gc.get_objects())

    async with serving() as port:
        gc.collect()
        gc.disable()
        try:
            for _ in range(10):
                await said(port, sent)
            assert errors() == 0
        finally:
            gc.enable()


async def test_noise_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    dice = random.Random(19)
    good = b"POST /echo?x=%20 HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    good += b"3\r\nabc\r\n0\r\n\r\nGET / HTTP/1.0\r\n\r\n"
    async with serving() as port:
        for _ in range(300):
            bad = bytearray(good)
            for _ in range(dice.randint(1, 4)):
                at = dice.randrange(len(bad))
                bad[at : at + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 3))
            async with connected(port) as (reader, writer):
                writer.write(bad)
                writer.write_eof()
                try:
                    heard = await reader.read()
                except ConnectionResetError:
                    continue
                assert heard == b"" or status(heard) in (200, 400, 405, 501, 505), bytes(bad)
        assert status(await said(port, b"GET / HTTP/1.0\r\n\r\n")) == 200
    assert [record for record in caplog.records if record.name != "asyncio"] == []


@pytest.mark.parametrize(
    "sent",
    [
        (b"GET /hello HTTP/1.1\r\n" + HOST + b"\r\n") * 1000,
        b"POST /hello HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"1\r\nx\r\n" * 20_000
        + b"0\r\n\r\n",
    ],
)
async def test_a_row_of_tiny_pieces_leaves_others_their_turn(sent: bytes) -> None:
    longest = 0.0

    async def turn() -> None:
        nonlocal longest
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    async with serving() as port:
        task = asyncio.create_task(turn())
        heard = await said(port, sent + b"GET /last HTTP/1.0\r\n\r\n")
        task.cancel()
    assert heard.count(b" 200 OK") == sent.count(HOST) + 1
    assert b"/last" in heard
    assert longest < 0.1


async def test_a_connection_keeps_little_of_what_it_is_sent() -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def waits(_: Request) -> Answer:
        begun.set()
        await go.wait()
        return Answer("done")

    async with serving(application({"/wait": waits})) as port, connected(port) as (reader, writer):
        writer.write(b"GET /wait HTTP/1.1\r\n" + HOST + b"\r\n")
        await begun.wait()
        writer.transport.set_write_buffer_limits(1 << 16)
        row = b"GET /x HTTP/1.1\r\n" + HOST + b"\r\n"
        sent = 0
        with suppress(TimeoutError):
            while sent < 100 << 20:  # the kernels take a few MB
                writer.write(row * 1000)
                await asyncio.wait_for(writer.drain(), 2.0)
                sent += len(row) * 1000
        assert sent < 50 << 20
        go.set()
        assert b" 200 OK" in await reader.readuntil(b"done")
        assert b" 404 " in await reader.readuntil(b"404 page not found\n")


async def test_a_client_fills_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them may send as much as they can, and wait."""
    most, begun, go = 0, asyncio.Event(), asyncio.Event()
    original = Connection.data_received

    def data_received(connection: Connection, data: bytes) -> None:
        nonlocal most
        original(connection, data)
        most = max(most, len(connection._unread))

    async def waits(_: Request) -> Answer:
        begun.set()
        await go.wait()
        return Answer("done")

    monkeypatch.setattr(Connection, "data_received", data_received)
    async with serving(App(waits)) as port, connected(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: 9000000\r\n" + HOST + b"\r\n")
        writer.write(b"x" * 4_000_000)
        await begun.wait()
        writer.write(b"x" * 4_000_000)
        await asyncio.sleep(0.1)
        go.set()
        assert b" 200 OK" in await reader.readuntil(b"done")
        writer.transport.abort()
    assert 0 < most <= 32_768


# Streams


class Stream:
    """Pieces of a page, counted."""

    def __init__(self, count: int = 1 << 30, size: int = 65536) -> None:
        self.count = count
        self.made = 0
        self.ended = asyncio.Event()
        self.piece = b"x" * size
        self.error: Exception | None = None

    def __call__(self, _: Request) -> Answer:
        return Answer(pieces=self.pieces())

    async def pieces(self) -> AsyncGenerator[bytes]:
        try:
            for _ in range(self.count):
                self.made += 1
                yield self.piece
                await asyncio.sleep(0)
            if self.error:
                raise self.error
        finally:
            self.ended.set()

    def in_a_thread(self) -> Iterator[bytes]:
        for _ in range(self.count):
            self.made += 1
            yield self.piece


GET = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"


async def test_a_stream_has_chunks_or_for_an_old_client_an_end() -> None:
    stream = Stream(3, 5)
    async with serving(App(stream)) as port:
        new = await said(port, b"GET / HTTP/1.1\r\n" + HOST + LAST + b"\r\n")
        old = await said(port, b"GET / HTTP/1.0\r\n\r\n")
        head = await said(port, b"HEAD / HTTP/1.1\r\n" + HOST + LAST + b"\r\n")
    assert b"\r\nTransfer-Encoding: chunked\r\n" in new
    assert new.endswith(b"\r\n\r\n" + b"5\r\nxxxxx\r\n" * 3 + b"0\r\n\r\n")
    assert b"ransfer-" not in old
    assert old.endswith(b"\r\n\r\nxxxxxxxxxxxxxxx")
    assert head.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("threaded", [True, False])
async def test_nothing_is_made_for_a_client_that_reads_nothing(threaded: bool) -> None:
    stream = Stream()
    app = App(lambda _: Answer(pieces=stream.in_a_thread() if threaded else stream.pieces()))
    async with serving(app) as port, connected(port) as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(GET)
        await until(lambda: stream.made > 0)
        seen = 0
        while seen != stream.made:  # until the kernels have taken what they take
            seen = stream.made
            await asyncio.sleep(0.3)
        assert 0 < stream.made < 200, "some MB are in the kernels"
        made = stream.made
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        await reader.readexactly(made * 65536)
        await until(lambda: stream.made > made)


def tls_contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server and of a client that trusts it."""
    authority, cert, key = Authority(), folder / "cert", folder / "key"
    for path, data in zip((cert, key), authority.issue("node", "127.0.0.1"), strict=True):
        path.write_bytes(data)
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(cert, key)
    return ours, ssl.create_default_context(cadata=authority.pem.decode())


async def test_the_end_of_a_client_within_tls_is_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = tls_contexts(tmp_path)
    server = await listen(App(lambda _: Answer("ok")), "127.0.0.1", 0, ClientPool(), ours)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=theirs)
    writer.write(GET)
    async with asyncio.timeout(SECONDS):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        await until(lambda: not (server.clients._working or server.clients._idle))
    await server.close()
    assert not caplog.messages


async def test_a_stream_within_tls_waits_for_its_client_too(tmp_path: Path) -> None:
    (ours, theirs), stream = tls_contexts(tmp_path), Stream()
    server = await listen(App(stream), "127.0.0.1", 0, ClientPool(), ours)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=theirs)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(GET)
    await until(lambda: stream.made > 0)
    seen = 0
    while seen != stream.made:
        seen = stream.made
        await asyncio.sleep(0.3)
    assert stream.made < 200
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    async with asyncio.timeout(SECONDS):
        await reader.readexactly(2 * seen * 65536)
    writer.transport.abort()
    await server.close()
    assert stream.ended.is_set()


async def test_a_client_that_takes_nothing_is_dropped_before_others_are() -> None:
    stream = Stream()
    app = App(lambda _: Answer(pieces=stream.pieces(), patience=0.1))
    async with serving(app) as port, connected(port) as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(GET)
        await asyncio.wait_for(stream.ended.wait(), SECONDS)


async def test_a_stream_ends_with_its_client() -> None:
    stream = Stream()
    async with serving(App(stream)) as port:
        async with connected(port) as (reader, writer):
            writer.write(GET)
            await reader.readexactly(100_000)
            writer.transport.abort()
        await asyncio.wait_for(stream.ended.wait(), SECONDS)


async def test_what_fails_within_a_stream_ends_it_early(caplog: pytest.LogCaptureFixture) -> None:
    stream = Stream(2, 5)
    stream.error = OSError("the disk is full")
    async with serving(App(stream)) as port:
        heard = await said(port, GET)
        assert heard.endswith(b"5\r\nxxxxx\r\n" * 2), "without the last chunk"
        assert "the page '/' ends early" in caplog.text
        assert "the disk is full" in caplog.text
        # Nothing was sent before the first piece: the failure is an answer.
        stream.count = 0
        assert status(await said(port, GET)) == 500


async def test_answers_under_way_are_whole_when_a_server_ends() -> None:
    begun = asyncio.Event()

    async def slow(_: Request) -> Answer:
        begun.set()
        await asyncio.sleep(0.01)
        return Answer("hello")

    server = await listen(App(slow), "127.0.0.1", 0, ClientPool())
    async with connected(server.port) as (reader, writer), connected(server.port) as (idle, _):
        writer.write(GET * 2)
        await begun.wait()
        await server.close()
        heard = await reader.read()
        assert heard.count(b" 200 OK") == heard.count(b"\r\nConnection: close\r\n") == 1
        assert heard.endswith(b"hello")
        assert await idle.read() == b""
