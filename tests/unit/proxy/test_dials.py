"""Endpoints that lead back to the proxy itself: relayed once if that ends, refused otherwise.

Sockets are counted and capped, so that a loop fails a test and does not use up the machine.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec
import pytest

from steersman.model.names import Family, Protocol
from steersman.model.plan import Endpoint
from steersman.proxy import engine, tcp, udp
from steersman.proxy.dials import DialRegistry
from steersman.proxy.engine import Proxy
from steersman.proxy.listeners import FrontendKey, ListenerPlan
from steersman.proxy.ports import PortAllocator
from steersman.proxy.sockets import open_socket
from tests.support.http import free_ports
from tests.support.modes.userspace_proxy import (
    LOCAL,
    answering,
    ask,
    endpoint,
    key,
    listener,
    owner,
)
from tests.support.waiting import until

TCP, UDP = Protocol.TCP, Protocol.UDP
BOTH = pytest.mark.parametrize("protocol", [TCP, UDP])
_MOST = 40
"""Sockets that a test may open."""
_IP_LOCAL_PORT_RANGE = 51  # linux/in.h, since Linux 6.3


class Sockets:
    """Opens sockets of a proxy, up to a limit."""

    def __init__(self) -> None:
        self.opened = 0

    def __call__(self, address: str, protocol: str) -> socket.socket:
        self.opened += 1
        if self.opened > _MOST:
            raise OSError(errno.EMFILE, "the test's limit")
        return open_socket(address, protocol)


class World:
    """A proxy with Services on fixed ports of loopback."""

    def __init__(self, proxy: Proxy, sockets: Sockets) -> None:
        self.proxy = proxy
        self._sockets = sockets
        self._listeners = 0

    async def serve(self, protocol: Protocol, services: dict[str, tuple[int, Endpoint]]) -> None:
        """Start the listeners: by name of the Service, its port and its endpoint."""
        wanted: dict[FrontendKey, ListenerPlan] = {}
        for name, (port, to) in services.items():
            made = listener(to, protocol=protocol, port=port)
            wanted[key(protocol, LOCAL, port)] = msgspec.structs.replace(
                made, owner=owner(protocol, name)
            )
        await self.proxy.start(wanted)
        self._listeners = len(wanted)

    @property
    def dials(self) -> int:
        """Sockets opened towards endpoints."""
        return self._sockets.opened - self._listeners


@asynccontextmanager
async def world(limit: int = 400) -> AsyncIterator[World]:
    sockets = Sockets()
    made = Proxy(PortAllocator(), 60.0, limit)
    with pytest.MonkeyPatch.context() as patch:
        for module in (engine, tcp, udp):
            patch.setattr(module, "open_socket", sockets)
        try:
            yield World(made, sockets)
        finally:
            await made.drain(0)
            await until(lambda: made.open_connections == 0)
        assert len(made.shared.dials) == 0


@contextmanager
def udp_client(port: int) -> Iterator[socket.socket]:
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.connect((LOCAL, port))
        yield sock


async def refused(protocol: Protocol, port: int, log: pytest.LogCaptureFixture) -> None:
    """Use a Service that leads back to itself, until the proxy says so."""
    if protocol is TCP:
        with pytest.raises(ConnectionResetError):
            await ask(port)
    else:
        with udp_client(port) as client:
            client.send(b"who?")
            await until(lambda: bool(log.records))


@BOTH
async def test_a_service_that_is_its_own_endpoint_is_dialled_once(
    protocol: Protocol, caplog: pytest.LogCaptureFixture
) -> None:
    (port,) = free_ports(1, protocol)
    async with world() as made:
        await made.serve(protocol, {"cart": (port, Endpoint(LOCAL, port))})
        await refused(protocol, port, caplog)
        assert made.dials == 1
        (record,) = caplog.records
        assert record.getMessage().startswith(
            f"{owner(protocol)}: endpoint {LOCAL}:{port} leads back to this proxy, "
            f"to {owner(protocol)}; refusing its connections"
        )
        await refused(protocol, port, caplog)
        assert len(caplog.records) == 1


@BOTH
async def test_a_loop_of_two_services_is_refused(
    protocol: Protocol, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = free_ports(2, protocol)
    async with world() as made:
        await made.serve(protocol, {"a": (a, Endpoint(LOCAL, b)), "b": (b, Endpoint(LOCAL, a))})
        await refused(protocol, a, caplog)
        assert made.dials == 2
        (record,) = caplog.records
        start = f"{owner(protocol, 'b')}: endpoint {LOCAL}:{a} leads back to this proxy, "
        assert record.getMessage().startswith(f"{start}to {owner(protocol, 'a')};")


@BOTH
async def test_only_two_services_of_a_chain_are_relayed(
    protocol: Protocol, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c, nobody = free_ports(4, protocol)
    async with world() as made:
        ends = {"a": (a, b), "b": (b, c), "c": (c, nobody)}
        await made.serve(
            protocol, {name: (port, Endpoint(LOCAL, to)) for name, (port, to) in ends.items()}
        )
        await refused(protocol, a, caplog)
        assert made.dials == 2
        assert f"to {owner(protocol, 'c')};" in caplog.text


async def test_a_service_may_be_the_endpoint_of_another_one() -> None:
    said = bytes(range(256)) * 20_000  # 5 MB: spliced
    a, b = free_ports(2, TCP)
    async with endpoint(answering(b"one")) as one, world() as made:
        await made.serve(TCP, {"a": (a, Endpoint(LOCAL, b)), "b": (b, one)})
        assert await ask(a, said) == b"one" + said
        await until(lambda: made.proxy.open_connections == 0)
        assert made.dials == 2


async def test_a_service_of_udp_may_be_the_endpoint_of_another_one() -> None:
    loop = asyncio.get_running_loop()
    a, b = free_ports(2, UDP)
    async with world() as made:
        with udp_client(a) as client, socket.socket(type=socket.SOCK_DGRAM) as one:
            one.setblocking(False)
            one.bind((LOCAL, 0))
            await made.serve(
                UDP, {"a": (a, Endpoint(LOCAL, b)), "b": (b, Endpoint(*one.getsockname()))}
            )
            for question in (b"1", b"2"):
                client.send(question)
                async with asyncio.timeout(60):
                    data, sender = await loop.sock_recvfrom(one, 99)
                    await loop.sock_sendto(one, b"re:" + data, sender)
                    assert await loop.sock_recv(client, 99) == b"re:" + question
            assert made.dials == 2


async def test_an_endpoint_on_this_node_may_be_a_client_itself() -> None:
    a, b = free_ports(2, TCP)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await ask(b, await reader.read()))

    async with endpoint(answering(b"two")) as two, endpoint(forward) as one, world() as made:
        await made.serve(TCP, {"a": (a, one), "b": (b, two)})
        assert await ask(a, b"?") == b"two?"


async def test_another_program_may_have_the_local_port_of_a_dial() -> None:
    """Sockets with different destinations may share one (ip(7), ephemeral ports)."""
    names: list[tuple[str, int]] = []

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        names.append(writer.get_extra_info("peername"))
        writer.write(b"one")
        await reader.read()

    (a,) = free_ports(1, TCP)
    loop = asyncio.get_running_loop()
    async with endpoint(keep) as one, world() as made:
        await made.serve(TCP, {"a": (a, one)})
        with socket.create_connection((LOCAL, a)), socket.socket() as client:
            await until(lambda: bool(names))
            port = names[0][1]
            client.setblocking(False)
            try:
                only = struct.pack("I", port << 16 | port)
                client.setsockopt(socket.IPPROTO_IP, _IP_LOCAL_PORT_RANGE, only)
            except OSError:
                pytest.skip("needs IP_LOCAL_PORT_RANGE (Linux 6.3)")
            await loop.sock_connect(client, (LOCAL, a))
            assert client.getsockname() == names[0]
            async with asyncio.timeout(60):
                assert await loop.sock_recv(client, 3) == b"one"
        await until(lambda: made.proxy.open_connections == 0)


@BOTH
async def test_a_dial_that_is_refused_is_forgotten(protocol: Protocol) -> None:
    port, nobody = free_ports(2, protocol)
    async with world() as made:
        await made.serve(protocol, {"a": (port, Endpoint(LOCAL, nobody))})
        with open_socket(LOCAL, protocol) as client:
            client.connect((LOCAL, port))
            client.send(b"?")
            await until(lambda: made.dials > 0 and made.proxy.open_connections == 0)
        assert len(made.proxy.shared.dials) == 0


async def test_a_session_evicted_as_soon_as_it_begins_leaves_no_dial() -> None:
    (port,) = free_ports(1, UDP)
    async with world(limit=4) as made:  # one session for each client address
        with open_socket(LOCAL, UDP) as one, udp_client(port) as first, udp_client(port) as second:
            one.bind((LOCAL, 0))
            one.setblocking(False)
            await made.serve(UDP, {"a": (port, Endpoint(*one.getsockname()))})
            first.send(b"1")
            second.send(b"2")  # both are read at once
            await until(lambda: made.proxy.budget.evicted == 1 and made.dials > 0)
            async with asyncio.timeout(60):
                # On Windows the first one ends before its datagram is passed on.
                while await asyncio.get_running_loop().sock_recv(one, 9) != b"2":
                    pass
            assert len(made.proxy.shared.dials) == made.proxy.open_connections == 1


def test_a_dial_is_known_before_its_task_runs_again_and_as_an_ipv4_mapped_address() -> None:
    with socket.socket() as server, socket.socket(socket.AF_INET6) as sock:
        server.bind((LOCAL, 0))
        server.listen()
        port = server.getsockname()[1]
        dials = DialRegistry()
        dial = dials.add(sock, owner(), Endpoint(LOCAL, port), None)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # as Linux has it
        sock.setblocking(False)
        sock.connect_ex((f"::ffff:{LOCAL}", port))
        with server.accept()[0] as client:
            peer = client.getpeername()
            assert dials.find(TCP, peer, lambda: [client.getsockname()]) is dial
            assert (
                dials.find(TCP, (f"::ffff:{LOCAL}", peer[1], 0, 0), lambda: [(LOCAL, port)]) is dial
            )
            assert dials.find(TCP, peer, lambda: [("10.96.0.1", 80)]) is None
            assert dials.find(UDP, peer) is None
        dials.remove(dial)
        assert dials.find(TCP, peer, lambda: [(LOCAL, port)]) is None
        assert len(dials) == 0


def test_a_loop_is_logged_again_after_its_service_was_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dials = DialRegistry()
    ipv6 = owner()._replace(family=Family.IPV6)
    with socket.socket() as sock:
        mine = dials.add(sock, owner(), Endpoint(LOCAL, 1), None)
        assert not dials.refuses(mine, ipv6)
        assert dials.refuses(mine, owner())
        assert dials.refuses(mine, owner())
        assert len(caplog.records) == 1
        dials.forget(owner())
        assert dials.refuses(mine, owner())
        assert len(caplog.records) == 2
