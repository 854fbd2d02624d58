"""Every server under every attack: it answers others, takes turns, and logs nothing."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias

import h11
import pytest

from steersman.config.types import StateServer
from steersman.model.names import ObjectName
from steersman.model.node_state import NodeState
from steersman.run.observe.metrics import Metrics
from steersman.run.serve.connections import Bounds, ClientPool
from steersman.run.serve.control import ControlSocket
from steersman.run.serve.health import ProxyHealth, ServiceHealthServers, proxy_health_app
from steersman.run.serve.http import Answer, App, Request, listen
from steersman.run.serve.metrics_server import Pages, metrics_app
from steersman.run.serve.state_server import serve_state
from steersman.ui.pages import PAGES
from steersman.ui.site import Site
from tests.support.apiserver.certificates import Authority
from tests.support.http import free_port
from tests.support.iterations import Iterations
from tests.support.pages import ScriptedFleet

SECONDS = 60.0
ATTACKERS = 20
TOKEN = "a token of some length"
HEAD = b" / HTTP/1.1\r\nHost: localhost\r\n"
ATTACKS = {
    "silence": b"",
    "half of a TLS handshake": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "noise": bytes(range(256)) * 400,
    "a slow head": b"GET" + HEAD + b"X: ",
    "an endless header": b"GET" + HEAD + b"X: " + b"y" * (1 << 20),
    "endless headers": b"GET" + HEAD + b"A: b\r\n" * 50_000,
    "a row of requests": (b"GET" + HEAD + b"\r\n") * 1000,
    "a giant body": b"POST" + HEAD + b"Content-Length: %d\r\n\r\n" % (1 << 50) + b"x" * (1 << 20),
    "endless pieces": b"POST" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 9000,
}
WITHOUT_TLS = ("silence", "half of a TLS handshake", "noise")
"""What a client of a server with TLS sends instead of a handshake."""


class Target(NamedTuple):
    """A server, and a request that it answers by `answer`."""

    address: tuple[str, int] | str
    path: str
    answer: bytes
    trust: ssl.SSLContext | None = None

    async def connect(self, tls: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self.address, str):
            return await asyncio.open_unix_connection(self.address)
        return await asyncio.open_connection(*self.address, ssl=self.trust if tls else None)

    async def ask(self) -> bytes:
        reader, writer = await self.connect(tls=True)
        head = f"GET {self.path} HTTP/1.1\r\nHost: localhost\r\nX-Steersman-Token: {TOKEN}\r\n"
        writer.write(head.encode() + b"Accept: application/json\r\nConnection: close\r\n\r\n")
        heard = await reader.read()
        writer.close()
        return heard


@asynccontextmanager
async def served(app: App, path: str, answer: bytes) -> AsyncIterator[Target]:
    server = await listen(app, "127.0.0.1", 0, ClientPool())
    yield Target(("127.0.0.1", server.port), path, answer)
    await server.close()


def health(_: Path) -> AbstractAsyncContextManager[Target]:
    return served(proxy_health_app(ProxyHealth(60.0), lambda: None), "/livez", b'"healthy":true')


def metrics(_: Path) -> AbstractAsyncContextManager[Target]:
    app = metrics_app(Pages(Metrics("nftables"), lambda: "nftables"))
    return served(app, "/proxyMode", b"nftables")


def pages(_: Path) -> AbstractAsyncContextManager[Target]:
    site = Site(ScriptedFleet({"a": NodeState("a", "nftables")}), PAGES)
    return served(site.app, "/about", b'"assets"')


@asynccontextmanager
async def service_health(_: Path) -> AsyncIterator[Target]:
    servers, name, port = (
        ServiceHealthServers(lambda: ["127.0.0.1"], lambda: True),
        ObjectName("shop", "web"),
        free_port(),
    )
    await servers.sync({name: port}, {name: 3})
    yield Target(("127.0.0.1", port), "/", b'"localEndpoints": 3')
    await servers.close()


def here(_: Request) -> Answer:
    return Answer("here")


@asynccontextmanager
async def local_socket(_: Path) -> AsyncIterator[Target]:
    name = f"steersman-hostile-{os.getpid()}"
    server = ControlSocket({("GET", "/page"): here}, name)
    task = asyncio.create_task(server.run())
    await server.listening.wait()
    yield Target(f"\0{name}", "/page", b"here")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def state_server(folder: Path) -> AsyncIterator[Target]:
    authority, port = Authority(), free_port()
    cert, key, token = (folder / name for name in ("cert", "key", "token"))
    for path, data in zip((cert, key), authority.issue("node", "127.0.0.1"), strict=True):
        path.write_bytes(data)
    token.write_text(TOKEN)
    config = StateServer(
        bind_address=f"127.0.0.1:{port}",
        token_file=str(token),
        cert_file=str(cert),
        key_file=str(key),
    )
    serving = serve_state(
        config, {("GET", "/page"): here}, on_failure=lambda _: None, hard_fail=True
    )
    task = asyncio.create_task(serving)
    trust = ssl.create_default_context(cadata=authority.pem.decode())
    target = Target(("127.0.0.1", port), "/page", b"here", trust)
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                await target.ask()
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.01)
    yield target
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


Serving: TypeAlias = Callable[[Path], AbstractAsyncContextManager[Target]]
SERVERS: tuple[Serving, ...] = (health, metrics, service_health, state_server, local_socket, pages)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("serving", SERVERS)
async def test_others_are_answered_under_attack(
    serving: Serving,
    attack: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    original = h11.Connection.receive_data
    async with serving(tmp_path) as target:
        with Iterations() as iterations:

            def receive_data(connection: h11.Connection, data: bytes) -> None:
                iterations.happened()
                original(connection, data)

            monkeypatch.setattr(h11.Connection, "receive_data", receive_data)
            attackers = [
                await target.connect(tls=attack not in WITHOUT_TLS) for _ in range(ATTACKERS)
            ]
            for _, writer in attackers:
                writer.write(ATTACKS[attack])
            async with asyncio.timeout(SECONDS):
                for _ in range(3):
                    heard = await target.ask()
                    assert heard.startswith(b"HTTP/1.1 200 OK\r\n")
                    assert target.answer in heard
            # Who comes when the share of an iteration is renewed takes from that of the next one.
            assert iterations.most <= 4
        for _, writer in attackers:
            writer.transport.abort()
    assert [each.getMessage() for each in caplog.records if each.name != "asyncio"] == []


async def test_ten_thousand_connections() -> None:
    """The last thousand stay open, as far as the server lets them."""
    pool, loop = ClientPool(Bounds(per_server=256)), asyncio.get_running_loop()
    server = await listen(App(lambda _: Answer("here")), "127.0.0.1", 0, pool)
    address = ("127.0.0.1", server.port)
    clients: deque[socket.socket] = deque()
    most = 0
    try:
        async with asyncio.timeout(300):
            for number in range(10_000):
                client = socket.socket()
                client.setblocking(False)
                clients.append(client)
                await loop.sock_connect(client, address)
                if len(clients) > 1000:
                    clients.popleft().close()
                most = max(most, pool.count)
                if number % 500 == 0:
                    assert (await Target(address, "/", b"").ask()).endswith(b"here")
        assert 255 <= most <= 256  # one of them may be being replaced
    finally:
        for client in clients:
            client.close()
        await server.close()
