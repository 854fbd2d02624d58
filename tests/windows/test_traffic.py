"""Traffic through the winuserspace mode on Windows' Python."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from steersman.model.plan import Endpoint
from tests.support.builders import kube
from tests.support.modes.userspace_proxy import Answers, answering, ask, client, endpoint
from tests.support.processes.steersman import manifests
from tests.support.waiting import until
from tests.windows.node import HOST, HOST6, Node, on_a_node

pytestmark = [pytest.mark.kernel, pytest.mark.slow(seconds=60)]

VIP, VIP6, EXTERNAL, BALANCER = "10.96.0.10", "fd00:96::10", "198.51.100.7", "198.51.100.8"
EMPTY, STICKY, BROKEN, FIRST, SECOND = (f"10.96.0.{number}" for number in range(11, 16))


@asynccontextmanager
async def udp_endpoint(name: bytes, address: str) -> AsyncIterator[Endpoint]:
    """A UDP server that answers with its name and the question."""
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: Answers(name), local_addr=(address, 0)
    )
    yield Endpoint(address, transport.get_extra_info("sockname")[1])
    transport.close()


def slices(name: str, port: str, *ends: Endpoint, protocol: str = "TCP") -> list[dict[str, Any]]:
    """Return a slice for each endpoint, since each has a port of its own."""
    return [
        kube.endpoint_slice(
            f"{name}-{port}-{number}",
            name,
            end.ip,
            ports=[{"name": port, "port": end.port, "protocol": protocol}],
            family="IPv6" if ":" in end.ip else "IPv4",
        )
        for number, end in enumerate(ends)
    ]


async def udp(address: str, port: int, said: bytes = b"?") -> bytes:
    """Ask by UDP from a new port."""
    async with client(port, address) as asker:
        return await asker.ask(said)


def test_every_kind_of_frontend_serves_tcp_and_udp(tmp_path: Path) -> None:
    async def body(node: Node) -> None:
        async with AsyncExitStack() as stack:
            tcp = [
                await stack.enter_async_context(endpoint(answering(n), HOST))
                for n in (b"1", b"2", b"3")
            ]
            tcp6 = await stack.enter_async_context(endpoint(answering(b"6"), HOST6))
            datagrams = [
                await stack.enter_async_context(udp_endpoint(name, HOST)) for name in (b"a", b"b")
            ]
            datagrams6 = await stack.enter_async_context(udp_endpoint(b"c", HOST6))
            ports = [
                {"name": "http", "port": 80, "nodePort": 30080},
                {"name": "echo", "port": 90, "nodePort": 30090, "protocol": "UDP"},
            ]
            web = kube.service(
                *("web", VIP),
                ports=ports,
                type="LoadBalancer",
                externalIPs=[EXTERNAL],
                ingress=[{"ip": BALANCER}],
            )
            web6 = kube.service(
                *("web6", VIP6),
                ports=ports,
                type="NodePort",
                clusterIPs=[VIP6],
                ipFamilies=["IPv6"],
            )
            manifests(
                node.folder / "manifests",
                *(web, *slices("web", "http", *tcp)),
                *slices("web", "echo", *datagrams, protocol="UDP"),
                *(web6, *slices("web6", "http", tcp6)),
                *slices("web6", "echo", datagrams6, protocol="UDP"),
            )
            async with node.steersman() as process:
                await process.said("kernel objects")
                assert node.service_addresses() == {VIP, VIP6, EXTERNAL, BALANCER}
                for address, port in ((VIP, 80), (EXTERNAL, 80), (BALANCER, 80), (HOST, 30080)):
                    # In turn: each of them as often as the others.
                    said = Counter([await ask(port, b"!", address) for _ in range(6)])
                    assert said == {b"1!": 2, b"2!": 2, b"3!": 2}, (address, port)
                for address, port in ((VIP, 90), (EXTERNAL, 90), (BALANCER, 90), (HOST, 30090)):
                    said = Counter([await udp(address, port) for _ in range(4)])
                    assert said == {b"a?": 2, b"b?": 2}, (address, port)
                assert await ask(80, b"!", VIP6) == b"6!"
                assert await udp(VIP6, 90) == b"c?"

    on_a_node(tmp_path, body)


def tcp_service(name: str, address: str, *ends: Endpoint, **spec: Any) -> list[dict[str, Any]]:
    """Return a Service with the port 80 and its slices."""
    service = kube.service(name, address, ports=[{"name": "http", "port": 80}], **spec)
    return [service, *slices(name, "http", *ends)]


def test_connections_begin_last_and_end_as_they_should(tmp_path: Path) -> None:
    async def body(node: Node) -> None:
        async with endpoint(answering(b"1"), HOST) as one, endpoint(answering(b"2"), HOST) as two:
            affinity = {"sessionAffinity": "ClientIP"}
            world = [
                *tcp_service("web", VIP, one, two),
                *tcp_service("empty", EMPTY),
                *tcp_service("sticky", STICKY, one, two, **affinity),
                *tcp_service("broken", BROKEN, Endpoint(HOST, 9), one),
                *tcp_service("first", FIRST, Endpoint(SECOND, 80)),
                *tcp_service("second", SECOND, Endpoint(FIRST, 80)),
            ]
            folder = manifests(node.folder / "manifests", *world)
            async with node.steersman() as process:
                await process.said("kernel objects")
                # None of a thousand connections is lost, a hundred at a time.
                said: Counter[bytes] = Counter()
                for _ in range(10):
                    said.update(await asyncio.gather(*(ask(80, b"!", VIP) for _ in range(100))))
                # An endpoint whose dial has timed out comes last, so they may have unlike shares.
                assert said.total() == said[b"1!"] + said[b"2!"] == 1000
                # The client ends first, and gets all that the endpoint has to say after that.
                long = b"x" * 3_000_000
                assert (await ask(80, long, VIP))[1:] == long
                assert len({await ask(80, b"!", STICKY) for _ in range(6)}) == 1
                assert [await ask(80, b"!", BROKEN) for _ in range(4)] == [b"1!"] * 4
                for address in (EMPTY, FIRST):
                    with pytest.raises(ConnectionError):
                        assert await ask(80, b"!", address) != b""
                # A connection outlives its endpoint's place in the Service.
                reader, writer = await asyncio.open_connection(VIP, 80)
                first = await reader.readexactly(1)
                remaining = two if first == b"1" else one
                manifests(folder, *tcp_service("web", VIP, remaining))
                await until(lambda: node.service_addresses() == {VIP})
                writer.write(b"on")
                assert await reader.readexactly(2) == b"on"
                writer.close()
                assert await ask(80, b"!", VIP) == (b"2!" if first == b"1" else b"1!")

    on_a_node(tmp_path, body)


def test_affinity_ends_after_its_time(tmp_path: Path) -> None:
    async def body(node: Node) -> None:
        async with endpoint(answering(b"1"), HOST) as one, endpoint(answering(b"2"), HOST) as two:
            brief = {"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 1}}}
            affinity = {"sessionAffinity": "ClientIP"}
            world = [
                *tcp_service("brief", VIP, one, two, **affinity, **brief),
                *tcp_service("sticky", STICKY, one, two, **affinity),
            ]
            manifests(node.folder / "manifests", *world)
            async with node.steersman() as process:
                await process.said("kernel objects")
                assert node.service_addresses() == {VIP, STICKY}, process.log
                said: Counter[str] = Counter()
                for _ in range(4):
                    said[f"brief {(await ask(80, b'', VIP)).decode()}"] += 1
                    said[f"sticky {(await ask(80, b'', STICKY)).decode()}"] += 1
                    await asyncio.sleep(1.5)  # longer than the affinity of one of them
                assert said["brief 1"] == said["brief 2"] == 2
                assert 4 in (said["sticky 1"], said["sticky 2"])

    on_a_node(tmp_path, body)


class Resolver(asyncio.DatagramProtocol):
    """Knows one name; remembers which it was asked for."""

    known = b"\4cart\4shop\3svc\0"

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.asked.append(data[12:-4])
        found = self.asked[-1] == self.known
        header = struct.pack(">2sHHHHH", data[:2], 0x8180 if found else 0x8183, 1, found, 0, 0)
        answer = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 60, 4) + bytes([10, 96, 0, 7])
        self.transport.sendto(header + data[12:] + answer * found, addr)


def test_a_service_of_several_ports_searches_suffixes_for_dns(tmp_path: Path) -> None:
    async def body(node: Node) -> None:
        resolver = Resolver()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: resolver, local_addr=(HOST, 0))
        dns = Endpoint(HOST, transport.get_extra_info("sockname")[1])
        async with endpoint(answering(b"1"), HOST) as one, endpoint(answering(b"2"), HOST) as two:
            ports = [
                {"name": "dns", "port": 53, "protocol": "UDP"},
                {"name": "dns-tcp", "port": 53},
                {"name": "metrics", "port": 9153},
            ]
            manifests(
                node.folder / "manifests",
                kube.service("dns", VIP, ports=ports),
                *slices("dns", "dns", dns, protocol="UDP"),
                *slices("dns", "dns-tcp", one),
                *slices("dns", "metrics", two),
            )
            async with node.steersman("--dns-search=svc,shop.svc") as process:
                await process.said("kernel objects")
                assert await ask(53, b"!", VIP) == b"1!"
                assert await ask(9153, b"!", VIP) == b"2!"
                question = b"\4cart\0" + struct.pack(">HH", 1, 1)
                said = await udp(VIP, 53, struct.pack(">HHHHHH", 7, 0x0100, 1, 0, 0, 0) + question)
                assert resolver.asked == [b"\4cart\0", b"\4cart\3svc\0", Resolver.known]
                assert said[12 : 12 + len(question)] == question, "the client's own question"
                assert said.endswith(bytes([10, 96, 0, 7]))
        transport.close()

    on_a_node(tmp_path, body)
