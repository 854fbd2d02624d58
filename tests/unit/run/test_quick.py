"""Probes' requests, answered without aiohttp, and what is left to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.run.accept import Bounds, Pool
from steersman.run.http import NOT_FOUND, Answer, listen, short_pages
from steersman.run.quick import simple_path
from tests.support.apiserver.reading import until
from tests.support.http import free_port

PROBE = (
    b"GET /healthz HTTP/1.1\r\nHost: 10.0.0.1:10256\r\nUser-Agent: kube-probe/1.36\r\n"
    b"Accept: */*\r\nConnection: close\r\n\r\n"
)


def test_a_probe_is_simple() -> None:
    assert simple_path(PROBE) == "/healthz"


@pytest.mark.parametrize(
    "head",
    [
        b"",
        PROBE[:-1],
        PROBE + b"GET ",
        PROBE.replace(b"GET", b"POST"),
        PROBE.replace(b"/healthz", b"/healthz?verbose"),
        PROBE.replace(b"/healthz", b"/health%7a"),
        PROBE.replace(b"HTTP/1.1", b"HTTP/1.0"),
        PROBE.replace(b"Connection: close\r\n", b""),
        PROBE.replace(b"Accept: */*", b"Content-Length: 2"),
        PROBE.replace(b"Accept: */*", b"transfer-encoding: chunked"),
        PROBE.replace(b"Accept: */*", b"Upgrade: websocket"),
        PROBE.replace(b"Accept: */*", b"Expect: 100-continue"),
        PROBE.replace(b"Accept: */*", b" folded"),
        PROBE.replace(b"Accept: */*", b"X: \xff"),
        PROBE.replace(b"\r\n", b"\n"),
    ],
)
def test_anything_else_is_not(head: bytes) -> None:
    assert simple_path(head) is None


@given(st.binary(max_size=200), st.integers(0, len(PROBE)))
def test_no_input_is_an_error(noise: bytes, at: int) -> None:
    simple_path(PROBE[:at] + noise + PROBE[at:])


@asynccontextmanager
async def serving(pool: Pool | None = None) -> AsyncIterator[int]:
    port = free_port()
    app = short_pages({"/healthz": lambda: Answer("fine", 503)}, lambda: NOT_FOUND)
    server = await listen(app, "127.0.0.1", port, pool or Pool())
    try:
        yield port
    finally:
        await server.close()


async def exchange(port: int, request: bytes) -> tuple[bytes, set[bytes], bytes]:
    """The answer to a request: status line, headers but for the date, and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    first, *headers = head.split(b"\r\n")
    return first, {each for each in headers if not each.startswith(b"Date: ")}, body


@pytest.mark.parametrize("path", [b"/healthz", b"/nothing"])
async def test_the_answer_is_that_of_the_real_server(path: bytes) -> None:
    request = PROBE.replace(b"/healthz", path)
    async with serving() as port:
        quick = await exchange(port, request)
        assert quick == await exchange(port, request.replace(b"Accept: */*", b"Content-Length: 0"))
    assert quick[0].split()[1] == (b"503" if path == b"/healthz" else b"404")
    assert b"Connection: close" in quick[1]


async def test_a_client_waits_before_it_asks() -> None:
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await exchange(port, PROBE)  # the first client was accepted before this one
        writer.write(PROBE)
        assert (await reader.read()).endswith(b"fine")
        writer.close()


async def test_a_client_goes_without_a_word() -> None:
    pool = Pool()
    async with serving(pool) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: pool.count == 1)
        writer.close()
        await until(lambda: pool.count == 0)
        assert (await exchange(port, PROBE))[2] == b"fine"


async def test_who_says_nothing_makes_room_and_is_dropped_in_time() -> None:
    pool = Pool(Bounds(per_server=2, header=0.0))
    async with serving(pool) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        assert (await exchange(port, PROBE))[2] == b"fine"
        assert pool.count <= 2
        for reader, writer in idle:
            assert await reader.read() == b""
            writer.close()
