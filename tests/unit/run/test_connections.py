"""Servers under attack: idle clients, more clients than descriptors, requests that are not HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import resource
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest

from steersman.host.limits import descriptor_limit, raise_descriptor_limit
from steersman.model.names import ObjectName
from steersman.run.serve import control
from steersman.run.serve.connections import (
    Bounds,
    ClientPool,
    Clients,
    ListenError,
    listening_socket,
    next_turn,
)
from steersman.run.serve.control import ControlSocket
from steersman.run.serve.health import ServiceHealthServers
from steersman.run.serve.http import (
    Answer,
    App,
    Connection,
    Listening,
    Request,
    application,
    keep_serving,
    listen,
)
from tests.support.http import ask, free_port, free_ports
from tests.support.iterations import Iterations
from tests.support.waiting import until

FEW = Bounds(per_server=4, total=6)
PROBE = (
    b"GET /healthz HTTP/1.1\r\nHost: 10.0.0.1:10256\r\nUser-Agent: kube-probe/1.36\r\n"
    b"Accept: */*\r\nConnection: close\r\n\r\n"
)


def hello() -> App:
    return application({"/": lambda _: Answer("hello")})


@asynccontextmanager
async def serving(app: App, pool: ClientPool) -> AsyncIterator[int]:
    port = free_port()
    server = await listen(app, "127.0.0.1", port, pool)
    try:
        yield port
    finally:
        await server.close()


class Client:
    """A connection to a server that may send nothing at all."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, text: bytes = b"") -> Client:
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        client.writer.write(text)
        return client

    async def closed(self) -> None:
        """Return when the server has closed the connection."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass
        self.writer.close()


async def test_idle_clients_make_room_for_a_new_one() -> None:
    pool = ClientPool(FEW)
    async with serving(hello(), pool) as port:
        idle = [await Client.connect(port) for _ in range(20)]
        assert (await ask(port)).body == "hello"
        assert pool.count <= 4
        await asyncio.gather(*(client.closed() for client in idle[:16]))
    await asyncio.gather(*(client.closed() for client in idle[16:]))


async def test_who_asks_again_and_again_outlives_the_idle() -> None:
    async with serving(hello(), ClientPool(FEW)) as port:
        steady = await Client.connect(port)
        for _ in range(8):
            idle = await Client.connect(port)
            steady.writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in await steady.reader.readuntil(b"hello")
            idle.writer.close()
        steady.writer.close()


async def test_clients_that_are_gone_take_no_room() -> None:
    """Probes come by new connections again and again: none of them pushes anybody out."""
    async with serving(hello(), ClientPool(FEW)) as port:
        others = [await Client.connect(port) for _ in range(2)]
        for _ in range(20):
            assert (await ask(port)).body == "hello"
        for client in others:
            client.writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in await client.reader.readuntil(b"hello")
            client.writer.close()


async def test_one_server_does_not_take_the_room_of_another() -> None:
    pool = ClientPool(FEW)
    async with serving(hello(), pool) as attacked, serving(hello(), pool) as other:
        quiet = [await Client.connect(other) for _ in range(2)]
        idle = [await Client.connect(attacked) for _ in range(20)]
        for client in quiet:  # these were not dropped
            client.writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in await client.reader.readuntil(b"hello")
        assert pool.count <= 6
    await asyncio.gather(*(client.closed() for client in (*idle, *quiet)))


@pytest.mark.parametrize("text", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "])
async def test_a_client_that_sends_no_whole_request_is_dropped(text: bytes) -> None:
    async with serving(hello(), ClientPool(Bounds(header=0.0))) as port:
        await (await Client.connect(port, text)).closed()


async def test_a_client_that_does_not_ask_again_is_dropped() -> None:
    async with serving(hello(), ClientPool(Bounds(idle=0.0))) as port:
        await (await Client.connect(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")).closed()


async def test_a_client_that_takes_no_answer_is_dropped() -> None:
    endless = application({"/": lambda _: Answer(pieces=iter(lambda: b"x" * 65536, b""))})
    pool = ClientPool(Bounds(busy=0.0))
    async with serving(endless, pool) as port:
        client = await Client.connect(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await client.reader.readexactly(1)
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: not pool.count)
        client.writer.close()


async def test_clients_that_hang_do_not_hold_up_the_end() -> None:
    begun = asyncio.Event()

    async def hangs(_: Request) -> Answer:
        begun.set()
        await asyncio.Event().wait()
        return Answer()

    async with serving(application({"/": hangs}), ClientPool()) as port:
        clients = [await Client.connect(port), await Client.connect(port, b"GET ")]
        clients.append(await Client.connect(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
        await begun.wait()
    async with asyncio.timeout(60):
        await asyncio.gather(*(client.closed() for client in clients))


async def test_without_descriptors_accepting_pauses_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop, refused = asyncio.get_running_loop(), 0
    original = type(loop).sock_accept

    async def sock_accept(*args: object) -> object:
        nonlocal refused
        if refused < 50:
            refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return await original(*args)  # type: ignore[arg-type]

    pauses = []
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(type(loop), "sock_accept", sock_accept)
    monkeypatch.setattr(asyncio, "sleep", pause)
    async with serving(hello(), ClientPool()) as port:
        assert (await ask(port)).body == "hello"
    assert pauses.count(1.0) == 50
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "cannot accept connections: Too many open files" in caplog.text


@pytest.mark.parametrize("text", [b"\x16\x03\x01\x02\x00\n\n", b"GET / HTTP/9\r\n\r\n", b"\r\n" * 9,
                                  b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
                                  b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
                                  b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"])  # fmt: skip
async def test_what_is_not_http_is_not_logged(
    text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(hello(), ClientPool()) as port:
        client = await Client.connect(port, text)
        client.writer.write_eof()
        await client.closed()
        assert (await ask(port)).body == "hello"
    assert not caplog.records


async def test_what_fails_here_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(application({"/": lambda _: Answer(str(1 // 0))}), ClientPool()) as port:
        assert (await ask(port)).status == 500
    assert "ZeroDivisionError" in caplog.text


async def test_listening_leaves_the_reserve_alone() -> None:
    with pytest.raises(ListenError, match="too few file descriptors"):
        await listen(hello(), "127.0.0.1", free_port(), ClientPool(limit=lambda: 4))


async def test_requests_of_clients_that_are_gone_change_nothing() -> None:
    clients = Clients(ClientPool())
    with clients.request(asyncio.Transport()):
        assert len(clients) == 0
    assert not clients.drop_one()


CHILD = """
import asyncio, json, logging, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from steersman.host.exec import SubprocessExec
from steersman.run.serve.http import Answer, application, listen
logging.basicConfig()
async def main():
    server = await listen(application({"/": lambda _: Answer("hello")}), "127.0.0.1", 0)
    print(server.port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    results = [await SubprocessExec().run(["true"]) for _ in range(3)]
    print(json.dumps([result.returncode for result in results]), flush=True)
    await server.close()
asyncio.run(main())
"""


async def test_under_idle_clients_programs_can_still_be_run() -> None:
    """As iptables-restore must be, with more clients than this process has descriptors."""
    child = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    port = int(await asyncio.to_thread(child.stdout.readline))
    idle = [await Client.connect(port) for _ in range(300)]
    assert (await ask(port)).body == "hello"
    child.stdin.write("go\n")
    child.stdin.flush()
    assert json.loads(await asyncio.to_thread(child.stdout.readline)) == [0, 0, 0]
    _, errors = await asyncio.to_thread(child.communicate)
    assert (child.returncode, errors) == (0, "")
    await asyncio.gather(*(client.closed() for client in idle))


def test_the_limit_of_descriptors_is_raised() -> None:
    text = (
        "import resource\n"
        "from steersman.host.limits import descriptor_limit, raise_descriptor_limit\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "print(raise_descriptor_limit(200), descriptor_limit(), raise_descriptor_limit(100))\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["200"] * 3
    assert raise_descriptor_limit(1) == descriptor_limit()


INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("now", "privileged", "then"),
    [
        ((64, 128), True, (500, 500)),
        ((64, 128), False, (128, 128)),
        ((64, INFINITE), False, (500, INFINITE)),
        ((64, 9999), False, (500, 9999)),
        ((INFINITE, INFINITE), True, (INFINITE, INFINITE)),
        ((600, 700), True, (600, 700)),
    ],
)
def test_how_far_the_limit_is_raised(
    now: tuple[int, int], privileged: bool, then: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = now

    def setrlimit(_: int, wanted: tuple[int, int]) -> None:
        nonlocal limits
        if not privileged and wanted[1] > limits[1] != INFINITE:
            raise ValueError("not allowed to raise maximum limit")
        limits = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    raise_descriptor_limit(500)
    assert limits == then


@pytest.mark.parametrize(
    "path", ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/a/..//hello", "/%00", "*", "/%ff"]
)
async def test_no_path_leads_elsewhere(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(application({"/hello": lambda _: Answer("hello")}), ClientPool()) as port:
        client = await Client.connect(
            port, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
        )
        reply = await client.reader.read()
        client.writer.close()
        assert reply.split(b" ")[1] in (b"400", b"404")
        assert b"root:" not in reply
    assert not caplog.records


async def test_requests_in_a_row_are_answered_in_order() -> None:
    app = application({"/": lambda request: Answer(f"<{request.path}>")})
    async with serving(app, ClientPool()) as port:
        asked = [f"GET /{number} HTTP/1.1\r\nHost: x\r\n\r\n" for number in range(300)]
        client = await Client.connect(port, "".join(asked).encode())
        for number in range(300):
            assert b" 200 OK" in await client.reader.readuntil(f"</{number}>".encode())
        client.writer.close()


@pytest.mark.parametrize(
    "head",
    [
        f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {60 << 20}\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 60}\r\n\r\n",
    ],
)
async def test_bodies_are_not_waited_for(head: str) -> None:
    """The answer comes at once, and bytes sent after it are not kept."""
    pool = ClientPool(Bounds(idle=0.0))
    async with serving(hello(), pool) as port:
        client = await Client.connect(port, head.encode())
        assert b" 200 OK" in await client.reader.readuntil(b"hello")
        with contextlib.suppress(ConnectionError):
            while True:
                client.writer.write(b"ffff\r\n" + b"x" * 65535 + b"\r\n")
                await client.writer.drain()
        await client.closed()
        assert (await ask(port)).body == "hello"


async def test_opening_many_servers_leaves_others_their_turn() -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    servers = ServiceHealthServers(lambda: ["127.0.0.1"], lambda: True)
    task = asyncio.create_task(turn())
    await servers.sync({ObjectName("shop", f"s{port}"): port for port in free_ports(20)}, {})
    task.cancel()
    assert turns >= 20
    await servers.close()


async def test_a_defect_in_accepting_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()

    async def broken(*_: object) -> None:
        raise RuntimeError("out of cheese")

    monkeypatch.setattr(type(loop), "sock_accept", broken)
    with pytest.raises(RuntimeError, match="out of cheese"):
        await keep_serving(hello, "127.0.0.1", free_port(), what="healthz server")


@asynccontextmanager
async def probed(pool: ClientPool | None = None) -> AsyncIterator[int]:
    port = free_port()
    app = application({"/healthz": lambda _: Answer("fine", 503)})
    server = await listen(app, "127.0.0.1", port, pool or ClientPool())
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


@pytest.mark.parametrize(("path", "status"), [(b"/healthz", b"503"), (b"/nothing", b"404")])
async def test_a_probe_is_answered_and_its_connection_closed(path: bytes, status: bytes) -> None:
    async with probed() as port:
        first, headers, body = await exchange(port, PROBE.replace(b"/healthz", path))
    assert first.split()[1] == status
    assert headers == {
        b"Content-Type: text/plain; charset=utf-8",
        b"X-Content-Type-Options: nosniff",
        b"Content-Length: %d" % len(body),
        b"Connection: close",
    }


# Turns of the event loop


class Backlog:
    """Clients that wait in the backlog of a socket that is not accepted from yet."""

    def __init__(self, count: int, text: bytes = b"") -> None:
        self.socket = listening_socket("127.0.0.1", 0)
        self.clients = [socket.create_connection(self.socket.getsockname()) for _ in range(count)]
        for client in self.clients:
            client.sendall(text)

    def close(self) -> None:
        for sock in (self.socket, *self.clients):
            sock.close()


def counting_accepts(monkeypatch: pytest.MonkeyPatch, iterations: Iterations) -> None:
    loop = asyncio.get_running_loop()
    original = loop.sock_accept

    async def sock_accept(sock: socket.socket) -> Any:
        accepted = await original(sock)
        iterations.happened()
        return accepted

    monkeypatch.setattr(loop, "sock_accept", sock_accept)


async def accepting(backlog: Backlog, app: App, tls: ssl.SSLContext | None = None) -> Listening:
    clients = Clients(ClientPool(), tls)
    task = asyncio.create_task(
        clients.accept(backlog.socket, lambda: Connection(app, clients), "the test's server")
    )
    return Listening(backlog.socket, task, clients)


async def test_requests_that_wait_are_answered_a_few_in_an_iteration() -> None:
    backlog = Backlog(100, PROBE)
    with Iterations() as iterations:

        def page(_: Request) -> Answer:
            iterations.happened()
            return Answer("fine")

        server = await accepting(backlog, App(page))
        await until(lambda: iterations.total == 100)
        assert iterations.most <= 4  # with those of the next iteration's share
    await server.close()
    backlog.close()


@pytest.mark.parametrize("over_tls", [False, True])
async def test_clients_are_accepted_a_few_in_an_iteration(
    over_tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if over_tls else None
    backlog = Backlog(100)
    with Iterations() as iterations:
        counting_accepts(monkeypatch, iterations)
        server = await accepting(backlog, hello(), tls)
        await until(lambda: iterations.total == 100)
        assert iterations.most <= 3  # one more may have been accepted, and wait
        await until(lambda: len(server.clients._starting) <= 16)
    await server.close()
    backlog.close()


async def test_strangers_at_the_local_socket_are_refused_a_few_in_an_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "is_trusted", lambda _user: False)
    name = f"steersman-strangers-{os.getpid()}"
    served = ControlSocket({}, name)
    with Iterations() as iterations:
        counting_accepts(monkeypatch, iterations)
        task = asyncio.create_task(served.run())
        await served.listening.wait()
        strangers = [socket.socket(socket.AF_UNIX) for _ in range(16)]
        for stranger in strangers:
            stranger.connect(f"\0{name}")
        await until(lambda: iterations.total == 16)
        assert iterations.most <= 3
    for stranger in strangers:
        stranger.settimeout(60)
        assert stranger.recv(1) == b""
        stranger.close()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_many_servers_share_the_iterations() -> None:
    """As of Services with a health check node port, each with a client at the same moment."""
    with Iterations() as iterations:

        def page(_: Request) -> Answer:
            iterations.happened()
            return Answer("fine")

        backlogs = [Backlog(1, PROBE) for _ in range(50)]
        servers = [await accepting(each, App(page)) for each in backlogs]
        await until(lambda: iterations.total == 50)
        assert iterations.most <= 2
    for server, backlog in zip(servers, backlogs, strict=True):
        await server.close()
        backlog.close()


async def test_clients_that_send_at_the_same_moment_are_read_a_few_in_an_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of requests and tiny pieces of bodies, from many clients at once."""
    original = h11.Connection.receive_data
    longest = 0
    with Iterations() as iterations:

        def receive_data(connection: h11.Connection, data: bytes) -> None:
            nonlocal longest
            iterations.happened()
            longest = max(longest, len(data))
            original(connection, data)

        monkeypatch.setattr(h11.Connection, "receive_data", receive_data)
        async with serving(hello(), ClientPool()) as port:
            clients = [await Client.connect(port) for _ in range(60)]
            row = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20
            body = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            body += b"1\r\nx\r\n" * 1000 + b"0\r\n\r\n"
            for client in clients:
                client.writer.write(row + body + PROBE)
            for client in clients:
                heard = await client.reader.read()
                assert heard.count(b" 200 OK") == 22
                client.writer.close()
        assert iterations.most <= 2
    assert longest <= 1024


async def test_a_probe_does_not_wait_behind_clients_that_send_for_ever() -> None:
    row = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 2000
    async with probed() as port:
        clients = [await Client.connect(port, row) for _ in range(100)]
        for client in clients:  # all of them are being answered now
            await client.reader.readexactly(1)
        with Iterations() as iterations:
            assert (await exchange(port, PROBE))[2] == b"fine"
            taken = iterations.now
        for client in clients:
            client.writer.transport.abort()
    assert taken < 25, "at two steps in an iteration, a round of the others takes 50"


async def test_a_client_that_goes_gives_its_turn_to_the_next() -> None:
    turns = [asyncio.create_task(next_turn()) for _ in range(9)]
    await asyncio.sleep(0)
    turns[2].cancel()
    turns[3].cancel()
    done = await asyncio.wait_for(asyncio.gather(*turns, return_exceptions=True), 60)
    assert [type(each) for each in done].count(asyncio.CancelledError) == 2


# Probes


async def test_a_client_waits_before_it_asks() -> None:
    async with probed() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await exchange(port, PROBE)  # the first client was accepted before this one
        writer.write(PROBE)
        assert (await reader.read()).endswith(b"fine")
        writer.close()


async def test_a_client_goes_without_a_word() -> None:
    pool = ClientPool()
    async with probed(pool) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: pool.count == 1)
        writer.close()
        await until(lambda: pool.count == 0)
        assert (await exchange(port, PROBE))[2] == b"fine"


async def test_who_says_nothing_makes_room_and_is_dropped_in_time() -> None:
    pool = ClientPool(Bounds(per_server=2, header=0.0))
    async with probed(pool) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        assert (await exchange(port, PROBE))[2] == b"fine"
        assert pool.count <= 2
        for reader, writer in idle:
            assert await reader.read() == b""
            writer.close()
