"""A proxy on loopback, without rules, and scripted endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

from steersman.model.names import Family, PlanKey, Protocol, ServicePortName
from steersman.model.plan import Action, Endpoint, ServicePlan, Verdict
from steersman.proxy.engine import Proxy
from steersman.proxy.listeners import LISTENER, Decision, FrontendKey, ListenerPlan
from steersman.proxy.ports import PortAllocator
from tests.support.builders import plans
from tests.support.waiting import PATIENCE, until

LOCAL = "127.0.0.1"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def owner(protocol: Protocol = Protocol.TCP, name: str = "cart") -> PlanKey:
    return PlanKey(ServicePortName("shop", name, "http", protocol), Family.IPV4)


def cart(
    *endpoints: Endpoint,
    at: tuple[str, int],
    node_port: int,
    verdict: Verdict = Verdict.FORWARD,
    of: PlanKey | None = None,
    **more: Any,
) -> ServicePlan:
    """The plan of a ServicePort with a clusterIP and a node port, the same for all clients."""
    every = (Action(verdict),) * 3
    frontends = plans.cluster_ip(at[0], every, at[1]), plans.node_port(node_port, every)
    return plans.plan(of or owner(), *frontends, cluster=endpoints, **more)


def key(
    protocol: Protocol = Protocol.TCP, address: str = "10.96.0.1", port: int = 80
) -> FrontendKey:
    return FrontendKey(LISTENER, Family.IPV4, protocol, address, port)


def listener(*endpoints: Endpoint, protocol: Protocol = Protocol.TCP, **more: Any) -> ListenerPlan:
    choice = Decision(Verdict.FORWARD, endpoints)
    return ListenerPlan(owner(protocol), LOCAL, more.pop("port", 0), choice, choice, choice, **more)


@asynccontextmanager
async def proxy(limit: int = 0, udp_idle: float = 5.0) -> AsyncIterator[Proxy]:
    """A Proxy that is gone afterwards, whatever happened."""
    made = Proxy(PortAllocator(), udp_idle, limit)
    try:
        yield made
    finally:
        await made.drain(0)
        await until(lambda: made.open_connections == 0)


@asynccontextmanager
async def endpoint(serve: Serve, address: str = LOCAL) -> AsyncIterator[Endpoint]:
    """A TCP server on a free port of an address (objects may not name loopback ones)."""

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(run, address, 0)
    try:
        yield Endpoint(address, server.sockets[0].getsockname()[1])
    finally:
        server.close()


def answering(name: bytes) -> Serve:
    """Sends a name, then everything it gets, to the end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(name)
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    return serve


@contextmanager
def silent() -> Iterator[Endpoint]:
    """An endpoint that answers nobody: its backlog is full."""
    with socket.socket() as sock:
        sock.bind((LOCAL, 0))
        sock.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(sock.getsockname())
        yield Endpoint(*sock.getsockname())
        for filler in fillers:
            filler.close()


async def refusing() -> Endpoint:
    """An endpoint where nobody listens."""
    server = await asyncio.start_server(answering(b""), LOCAL, 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return Endpoint(LOCAL, port)


async def ask(port: int, said: bytes = b"", address: str = LOCAL) -> bytes:
    """Say something, end, and return everything that comes back."""
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection(address, port)
        try:
            writer.write(said)
            with contextlib.suppress(OSError):  # it was reset already: reading will tell
                writer.write_eof()
            return await reader.read()
        finally:
            writer.close()


@contextmanager
def a_reset() -> Iterator[None]:
    """Expect a ConnectionResetError inside; Wine tells of a reset as of an end."""
    try:
        yield
    except ConnectionResetError:
        return
    assert sys.platform == "win32", "the connection was not reset"


UDP = Protocol.UDP


class Answers(asyncio.DatagramProtocol):
    """Sends back a name and what it got; knows its clients."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.clients: list[object] = []
        self.keep: bytes | None = None
        """A question that is answered only when `give` is called."""
        self.kept: list[tuple[str, int]] = []
        """Who asked it."""
        self.transport: asyncio.DatagramTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if addr not in self.clients:
            self.clients.append(addr)
        if data == self.keep:
            self.kept.append(addr)
        else:
            self.transport.sendto(self.name + data, addr)

    def give(self) -> None:
        for addr in self.kept:
            self.transport.sendto(self.name + (self.keep or b""), addr)


class Client(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.got: asyncio.Queue[bytes] = asyncio.Queue()
        self.transport: asyncio.DatagramTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.got.put_nowait(data)

    async def ask(self, data: bytes) -> bytes:
        self.transport.sendto(data)
        async with asyncio.timeout(PATIENCE):
            return await self.got.get()


@asynccontextmanager
async def server(name: bytes, address: str = LOCAL) -> AsyncIterator[tuple[Endpoint, Answers]]:
    loop = asyncio.get_running_loop()
    transport, answers = await loop.create_datagram_endpoint(
        lambda: Answers(name), local_addr=(address, 0)
    )
    yield Endpoint(address, transport.get_extra_info("sockname")[1]), answers
    transport.close()
    await asyncio.sleep(0)


@asynccontextmanager
async def client(port: int, address: str = LOCAL, source: str = "") -> AsyncIterator[Client]:
    loop = asyncio.get_running_loop()
    transport, made = await loop.create_datagram_endpoint(
        Client, (source, 0) if source else None, (address, port)
    )
    yield made
    transport.close()
    await asyncio.sleep(0)
