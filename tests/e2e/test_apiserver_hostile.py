"""What calls itself an API server and sends what it likes: bounded, counted, and tried again."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import pytest

from steersman.source import lister
from steersman.source.http import Response
from steersman.source.kubeconfig import ClusterAccess
from steersman.source.pace import MAX_RETRY_AFTER
from tests.support.apiserver.reading import WORLD, Reading, reading, service, timing
from tests.support.apiserver.server import ApiServer
from tests.support.waiting import until

MIB = 1 << 20
JSON = "Content-Type: application/json\r\n"
CHUNKED = JSON + "Transfer-Encoding: chunked\r\n"
LIST = {"kind": "ServiceList", "metadata": {"resourceVersion": "7"}, "items": []}
Sent = Callable[[str], Iterable[bytes]]
"""From a request's first line to all bytes of the answer."""


@asynccontextmanager
async def serving(sent: Sent) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            for data in sent(head.decode()):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@asynccontextmanager
async def told(sent: Sent, *, watch_list: bool = False) -> AsyncIterator[Reading]:
    async with serving(sent) as url:
        access = ClusterAccess(servers=(url,))
        async with reading(access, watch_list=watch_list, timing=timing(longest=0.5)) as r:
            yield r


def answer(headers: str, *body: bytes, status: str = "200 OK") -> Sent:
    return lambda _: (f"HTTP/1.1 {status}\r\n{headers}\r\n".encode(), *body)


def chunked(body: Iterable[bytes]) -> Iterable[bytes]:
    yield f"HTTP/1.1 200 OK\r\n{CHUNKED}\r\n".encode()
    for piece in body:
        yield b"%x\r\n%s\r\n" % (len(piece), piece)


def compressed(body: bytes, encoding: str = "gzip") -> Sent:
    return answer(f"{JSON}Content-Encoding: {encoding}\r\nConnection: close\r\n", body)


BOMB = gzip.compress(bytes(64 * MIB), 9)
EMPTY_LIST = gzip.compress(b'{"kind": "ServiceList", "metadata": {"resourceVersion": "1"}}')
DEEP = b'{"kind": "ServiceList", "items": ' + b"[" * 100_000


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (compressed(BOMB), "too_long"),
        (compressed(BOMB[:100]), "connection"),
        (compressed(b"no gzip"), "connection"),
        (compressed(EMPTY_LIST + EMPTY_LIST), "connection"),
        (compressed(EMPTY_LIST + bytes(MIB)), "connection"),
        (compressed(b"x", "br"), "connection"),
        (lambda _: chunked(itertools.repeat(b" " * 65536)), "too_long"),
        (answer(f"{JSON}Content-Length: 99999999999999\r\n", b"{}"), "connection"),
        (answer(f"{JSON}Content-Length: 1\r\n", b'{"kind": "ServiceList"}'), "connection"),
        (answer(f"{JSON}Content-Length: -1\r\n", b"{}"), "connection"),
        (answer(CHUNKED, b"zz\r\n{}\r\n"), "connection"),
        (lambda _: itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.repeat(b"X: y\r\n" * 99)),
         "connection"),
        (lambda _: itertools.chain([b"HTTP/1.1 200 OK\r\nX: "], itertools.repeat(b"y" * 9999)),
         "connection"),
        (lambda _: itertools.repeat(b"y" * 9999), "connection"),
        (answer(f"{JSON}Connection: close\r\n", DEEP), "malformed"),
        (answer(f"{JSON}Connection: close\r\n", b'{"kind": "\xff\xfe"}'), "malformed"),
        (answer(f"{JSON}Connection: close\r\n", b'{"kind": "ServiceList", "metadata": 7}'),
         "malformed"),
        (answer(f"{JSON}Connection: close\r\n", b"{}" * MIB, status="500 Oops"), "http_500"),
        (answer("Location: http://127.0.0.1:1/\r\nContent-Length: 0\r\n", status="302 Found"),
         "redirect"),
        (answer("Location: " + "x" * 7000 + "\r\nContent-Length: 0\r\n", status="307 Found"),
         "redirect"),
    ],
)  # fmt: skip
async def test_lists(
    sent: Sent, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lister, "MAX_BODY", 8 * MIB)
    async with told(sent) as r:
        await until(lambda: r.source.stats.kind("Service").errors[reason] >= 2)
        assert not r.store.replaced
    assert max(len(record.getMessage()) for record in caplog.records) < 1000


async def test_a_gzip_bomb_is_taken_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    chunks = Response.chunks

    async def noted(response: Response) -> AsyncIterator[bytes]:
        async for piece in chunks(response):
            sizes.append(len(piece))
            yield piece

    monkeypatch.setattr(Response, "chunks", noted)
    monkeypatch.setattr(lister, "MAX_BODY", 8 * MIB)
    async with told(compressed(BOMB)) as r:
        await until(lambda: r.errors("too_long"))
    assert max(sizes) <= MIB // 4


async def test_large_pages_are_in_memory_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a server which answers all kinds with bombs takes the memory of one."""
    held = most = 0
    chunks = Response.chunks

    async def noted(response: Response) -> AsyncIterator[bytes]:
        nonlocal held, most
        size = 0
        try:
            async for piece in chunks(response):
                yield piece  # it was taken when this returns
                size, held = size + len(piece), held + len(piece)
                most = max(most, held)
        finally:
            held -= size

    monkeypatch.setattr(Response, "chunks", noted)
    monkeypatch.setattr(lister, "MAX_BODY", 8 * MIB)
    monkeypatch.setattr(lister, "LARGE_BODY", MIB)
    async with told(compressed(BOMB)) as r:
        await until(lambda: len({k for k, s in r.source.stats.kinds.items() if s.errors}) == 4)
    assert most <= 13 * MIB


async def test_pages_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lister, "MAX_PAGES", 5)
    page = {**LIST, "metadata": {"resourceVersion": "7", "continue": "again"}}
    body = json.dumps(page).encode()
    asked = 0

    def sent(head: str) -> Iterable[bytes]:
        nonlocal asked
        asked += "/services?" in head
        yield from answer(f"{JSON}Content-Length: {len(body)}\r\n", body)(head)

    async with told(sent) as r:
        errors = r.source.stats.kind("Service").errors
        await until(lambda: errors["too_long"] >= 2)
        assert asked <= 5 * (errors["too_long"] + 1)


@pytest.mark.parametrize("watch_list", [True, False])
async def test_lists_of_endless_pages_or_events(
    watch_list: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lister, "MAX_LIST", MIB)
    obj = service("a")
    line = json.dumps({"type": "ADDED", "object": obj}).encode() + b"\n"
    page = {**LIST, "metadata": {"resourceVersion": "7", "continue": "x"}, "items": [obj] * 500}
    body = json.dumps(page).encode()

    def sent(head: str) -> Iterable[bytes]:
        if watch_list:
            return chunked(itertools.repeat(line * 100))
        return answer(f"{JSON}Content-Length: {len(body)}\r\n", body)(head)

    async with told(sent, watch_list=watch_list) as r:
        await until(lambda: r.source.stats.kind("Service").errors["too_long"] >= 2)
        assert not r.store.replaced


@pytest.mark.parametrize("wish", ["9" * 600, "1e400", "-5", "NaN", "\u0663", " 7 "])
async def test_no_retry_after_is_longer_than_the_longest(wish: str) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await asyncio.sleep(0)

    sent = answer(
        f"{JSON}Content-Length: 2\r\nRetry-After: {wish}\r\n", b"{}", status="429 Slow down"
    )
    async with serving(sent) as url:
        quick = timing(sleep=sleep)
        async with reading(ClusterAccess(servers=(url,)), watch_list=False, timing=quick) as r:
            await until(lambda: r.errors("http_429") >= 4)
    assert all(0 <= seconds <= MAX_RETRY_AFTER + 30 for seconds in waits)
    assert max(waits) >= (MAX_RETRY_AFTER if wish.isdigit() and wish.isascii() else 0)


async def test_a_redirect_does_not_carry_the_request_elsewhere() -> None:
    async with ApiServer(WORLD) as elsewhere:
        to = f"Location: {elsewhere.url}/api/v1/services\r\nContent-Length: 0\r\n"
        async with told(answer(to, status="302 Found")) as r:
            await until(lambda: r.errors("redirect") >= 4)
        assert not elsewhere.log


async def test_objects_that_are_not_what_they_should_be_leave_the_others_in() -> None:
    deep: object = 1
    for _ in range(300):
        deep = [deep]
    bad = [
        {**service("a"), "spec": deep},
        {**service("b"), "spec": {"ports": [{"port": 10**30}]}},
        {**service("c"), "spec": {"ports": [{"port": "80"}]}},
        {"metadata": {}},
        7,
    ]
    async with ApiServer(WORLD) as server, reading(server, protobuf=False) as r:
        await r.synced()
        for obj in bad:
            server.send("Service", json.dumps({"type": "ADDED", "object": obj}) + "\n")
        server.add(service("new"))
        await until(lambda: "new" in r.store.services)
        assert r.store.services == {"cart", "till", "new"}
