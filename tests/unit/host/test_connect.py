"""One connection, to see whether somebody listens."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Iterator

import pytest

from steersman.host import connect
from steersman.host.probe import outcome_of, try_http, try_tcp, try_udp


@pytest.fixture(params=["127.0.0.1", "::1"])
def address(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def listener(address: str) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=0) as sock:
        yield sock


async def test_somebody_listens(address: str, listener: socket.socket) -> None:
    assert await try_tcp(address, listener.getsockname()[1], 20) == "answered"


async def test_an_answer_in_time_counts_if_this_process_reads_it_late() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        attempt = asyncio.create_task(try_tcp("127.0.0.1", listener.getsockname()[1], 0.01))
        await asyncio.sleep(0)
        time.sleep(0.05)  # noqa: ASYNC251 - whatever else the process does
        assert await attempt == "answered"


async def test_nobody_listens(address: str, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    assert await try_tcp(address, port, 20) == "refused"


async def test_a_full_backlog_is_silence(address: str, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    waiting = []
    try:
        for _ in range(8):
            if await try_tcp(address, port, 0.2) == "silent":
                return
            sock = socket.socket(listener.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            sock.connect_ex((address, port))
            waiting.append(sock)
        pytest.fail("eight connections fit into a backlog of none")
    finally:
        for sock in waiting:
            sock.close()


async def test_a_datagram_that_nobody_refuses_counts_as_answered(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.bind((address, 0))
        port = sock.getsockname()[1]
        assert await try_udp(address, port) == "answered"
    assert await try_udp(address, port) == "refused"


class WindowsError(OSError):
    """An error as Windows reports it: with a number of its own, which Linux does not keep."""

    def __init__(self, winerror: int) -> None:
        super().__init__(errno.EINVAL, "")
        self.winerror = winerror


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (TimeoutError(errno.ETIMEDOUT, ""), "silent"),
        (WindowsError(121), "silent"),
        (ConnectionRefusedError(errno.ECONNREFUSED, ""), "refused"),
        (ConnectionResetError(errno.ECONNRESET, ""), "refused"),
        (WindowsError(1234), "refused"),
        (OSError(errno.EHOSTUNREACH, ""), "unreachable"),
        (OSError(errno.ENETUNREACH, ""), "unreachable"),
        (WindowsError(1231), "unreachable"),
        (WindowsError(1232), "unreachable"),
        (OSError(errno.EMFILE, ""), None),
        (OSError(errno.EADDRNOTAVAIL, ""), None),
        (WindowsError(1450), None),
    ],
)
def test_what_an_error_says_about_the_other_side(error: OSError, outcome: str | None) -> None:
    assert outcome_of(error) == outcome


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", "answered"),
        (b"HTTP/1.0 302 Found\r\nLocation: /elsewhere\r\n\r\n", "answered"),
        (b"HTTP/1.1 399\r\n\r\n", "answered"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "unhealthy"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "unhealthy"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "unhealthy"),
        (b"SSH-2.0-OpenSSH\r\n", "unhealthy"),
        (b"x" * 100_000, "unhealthy"),
        (b"", "unhealthy"),
    ],
)
async def test_a_request_by_http(address: str, answer: bytes, outcome: str) -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, address, 0) as server:
        number = server.sockets[0].getsockname()[1]
        assert await try_http(address, number, "/healthz?a=b", 20) == outcome
    [request] = asked
    assert request.startswith(b"GET /healthz?a=b HTTP/1.1\r\nHost: ")


async def test_a_request_without_an_answer_in_time_is_silence(
    address: str, listener: socket.socket
) -> None:
    assert await try_http(address, listener.getsockname()[1], "/", 0.2) == "silent"


async def test_a_request_to_nobody(address: str, listener: socket.socket) -> None:
    number = listener.getsockname()[1]
    listener.close()
    assert await try_http(address, number, "/", 20) == "refused"


async def test_of_two_connections_made_at_once_one_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[socket.socket] = []
    both = asyncio.Event()

    async def connected(_: object) -> socket.socket:
        sock = socket.socket()
        made.append(sock)
        if len(made) == 2:
            both.set()
        await both.wait()
        return sock

    async def addresses(*_: object) -> list[int]:
        return [1, 2]

    monkeypatch.setattr(connect, "_addresses", addresses)
    monkeypatch.setattr(connect, "_connected", connected)
    chosen = await connect.connect_tcp("api.test", 1)
    assert sorted(sock.fileno() >= 0 for sock in made) == [False, True]
    assert chosen.fileno() >= 0
    chosen.close()


async def test_attempts_that_others_cancel_are_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As at the end of the event loop, which cancels all tasks."""
    begun: list[object] = []
    both = asyncio.Event()

    async def connected(address: object) -> socket.socket:
        begun.append(address)
        if len(begun) == 2:
            both.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def addresses(*_: object) -> list[int]:
        return [1, 2]

    monkeypatch.setattr(connect, "_addresses", addresses)
    monkeypatch.setattr(connect, "_connected", connected)
    here = asyncio.all_tasks()
    attempt = asyncio.create_task(connect.connect_tcp("api.test", 1))
    async with asyncio.timeout(60):
        await both.wait()
        for task in asyncio.all_tasks() - here:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
