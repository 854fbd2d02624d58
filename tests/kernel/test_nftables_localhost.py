"""Node ports on loopback in the nftables mode, by real packets of both families and protocols."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from steersman.failover.watch import Failure
from steersman.host.exec import SubprocessExec
from steersman.model.failover import Backend, Observation
from steersman.model.names import Family, Protocol
from steersman.model.plan import Endpoint, NodeSettings, ServicePlan
from steersman.model.ruleset import diff
from steersman.modes.base import release
from steersman.modes.nftables.mode import NftablesMode
from steersman.modes.nftables.relay import Relay
from tests.support.builders import nftables_plans as make
from tests.support.builders.nftables_plans import ON
from tests.support.builders.plans import PLAIN, cluster_ip, key, node_port, plan
from tests.support.lab.namespace import in_namespace, sh

pytestmark = pytest.mark.kernel
PODS = {Family.IPV4: "10.244.0.1", Family.IPV6: "fd00:244::1"}
LOOPBACK = {Family.IPV4: "127.0.0.1", Family.IPV6: "::1"}
EVERY = [(family, protocol) for family in Family for protocol in (Protocol.TCP, Protocol.UDP)]
PORT = 30080


def kind(protocol: Protocol) -> socket.SocketKind:
    return socket.SOCK_STREAM if protocol is Protocol.TCP else socket.SOCK_DGRAM


def number(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def web(family: Family, protocol: Protocol, endpoint_port: int) -> ServicePlan:
    of = key(f"shop/web:{protocol.lower()}", protocol, family)
    ends = [Endpoint(PODS[family], endpoint_port, True)]
    address = "10.96.0.10" if family is Family.IPV4 else "fd00:96::10"
    return plan(of, cluster_ip(address), node_port(PORT, PLAIN), cluster=ends, local=ends)


async def follow(mode: NftablesMode, *plans: ServicePlan, settings: NodeSettings = ON) -> None:
    want = dict(mode.render_node(settings))
    for each in plans:
        want.update(mode.render_service(each, settings))
    await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), want))


@contextmanager
def server(protocol: Protocol, address: str, word: bytes) -> Iterator[int]:
    """Says a word to whoever comes; the port."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(number(address), kind(protocol))
    sock.setblocking(False)
    sock.bind((address, 0))

    def answer() -> None:
        if protocol is Protocol.UDP:
            sock.sendto(word, sock.recvfrom(99)[1])
            return
        client, _ = sock.accept()
        client.sendall(word)
        client.close()

    if protocol is Protocol.TCP:
        sock.listen()
    loop.add_reader(sock, answer)
    try:
        yield sock.getsockname()[1]
    finally:
        loop.remove_reader(sock)
        sock.close()


async def ask(protocol: Protocol, address: str, port: int = PORT) -> bytes:
    """The answer; b"" if the connection is refused."""
    loop = asyncio.get_running_loop()
    with socket.socket(number(address), kind(protocol)) as sock:
        sock.setblocking(False)
        try:
            async with asyncio.timeout(60):
                await loop.sock_connect(sock, (address, port))
                if protocol is Protocol.UDP:
                    await loop.sock_sendall(sock, b"?")
                return await loop.sock_recv(sock, 99)
        except ConnectionRefusedError:
            return b""


def in_node(body: Callable[[NftablesMode], Awaitable[None]]) -> None:
    """Run a test's coroutine in a namespace that has the pods' addresses, with a mode."""

    async def run() -> None:
        for address in PODS.values():
            sh(f"ip address add {address} dev lo" + (" nodad" if ":" in address else ""))
        mode = NftablesMode(SubprocessExec(), relay=Relay())
        assert (await mode.worker.do(mode.probe)).usable
        try:
            await body(mode)
        finally:
            await release(mode)

    in_namespace(run)


@pytest.mark.parametrize(("family", "protocol"), EVERY)
def test_a_node_port_answers_on_loopback_while_it_is_there(
    family: Family, protocol: Protocol
) -> None:
    async def body(mode: NftablesMode) -> None:
        address = LOOPBACK[family]
        assert await ask(protocol, address) == b""
        with (
            server(protocol, PODS[family], b"one") as one,
            server(protocol, PODS[family], b"two") as two,
        ):
            first = web(family, protocol, one)
            await follow(mode, first)
            assert await ask(protocol, address) == b"one"
            made = await mode.worker.do_slowly(mode.stats([first]))
            assert made.frontends[first.key.name, f"nodePort:{PORT}"] == 1
            assert list(made.endpoints.values()) == [1]
            await follow(mode, web(family, protocol, two))
            assert await ask(protocol, address) == b"two"
            await follow(mode)
            assert await ask(protocol, address) == b""

    in_node(body)


@pytest.mark.parametrize("family", Family)
def test_a_silent_endpoint_is_seen_by_its_clients_on_loopback(family: Family) -> None:
    async def body(mode: NftablesMode) -> None:
        sh("nft 'table inet fault { chain in { type filter hook input priority 0; }; }'")
        sh("nft add rule inet fault in tcp dport 9 drop")
        watch = await mode.worker.do(mode.watch_failures)
        await follow(mode, web(family, Protocol.TCP, 9))
        asking = asyncio.create_task(ask(Protocol.TCP, LOOPBACK[family]))
        backend = Backend(PODS[family], 9, Protocol.TCP)
        async with asyncio.timeout(60):
            assert await watch.receive() == [Failure(backend, Observation.SILENT, LOOPBACK[family])]
        await watch.aclose()
        asking.cancel()

    in_node(body)


def test_families_and_protocols_share_a_number() -> None:
    async def body(mode: NftablesMode) -> None:
        plans = [web(*each, 9) for each in EVERY]
        await follow(mode, *plans)
        assert sorted(sh("ss -Hnltu sport = :30080 | awk '{print $1, $5}'").split("\n")[:-1]) == [
            *("tcp 127.0.0.1:30080", "tcp [::1]:30080"),
            *("udp 127.0.0.1:30080", "udp [::1]:30080"),
        ]
        want = dict(mode.render_node(ON))
        for each in plans:
            want.update(mode.render_service(each, ON))
        assert await mode.worker.do(mode.read) == want

    in_node(body)


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP])
def test_a_port_in_use_is_logged_and_the_rules_go_in(
    protocol: Protocol, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(mode: NftablesMode) -> None:
        wanted = web(Family.IPV4, protocol, 9)
        with socket.socket(socket.AF_INET, kind(protocol)) as other:
            other.bind(("127.0.0.1", PORT))
            with caplog.at_level(logging.WARNING):
                await follow(mode, wanted)
            assert "shop/web:" in caplog.text
            assert f"127.0.0.1 port {PORT}" in caplog.text
            assert "30080" in sh("nft list map ip kube-proxy service-nodeports")
        with server(protocol, PODS[Family.IPV4], b"mine") as port:
            await follow(mode, web(Family.IPV4, protocol, port))
            assert await ask(protocol, "127.0.0.1") == b"mine"

    in_node(body)


def test_nothing_listens_if_it_is_turned_off() -> None:
    async def body(mode: NftablesMode) -> None:
        await follow(mode, web(Family.IPV4, Protocol.TCP, 9), settings=make.SETTINGS)
        assert await ask(Protocol.TCP, "127.0.0.1") == b""
        assert sh("ss -Hnltu") == ""

    in_node(body)
