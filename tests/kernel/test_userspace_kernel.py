"""The userspace modes on a real kernel, in a network namespace of each test's own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from steersman.failover.watch import Failure
from steersman.host.exec import Result, SubprocessExec
from steersman.model.errors import ApplyError
from steersman.model.failover import Backend, Observation
from steersman.model.names import Protocol
from steersman.model.plan import (
    Endpoint,
    Verdict,
)
from steersman.model.ruleset import diff
from steersman.modes.base import release
from steersman.modes.registry import create
from steersman.modes.specs import ModeOptions
from steersman.modes.userspace.core import UserspaceMode
from steersman.modes.userspace.linux_addresses import DEFAULT_INTERFACE, LinuxAddresses
from tests.support.lab.namespace import sh
from tests.support.lab.userspace import userspace_mode
from tests.support.lab.userspace_node import (
    HOST,
    NODE_PORT,
    PORT,
    VARIANTS,
    VIP,
    become,
    damages,
    on_a_node,
    rendered,
    rules,
    served,
)
from tests.support.modes.userspace_proxy import ask

pytestmark = pytest.mark.kernel


@VARIANTS
def test_rules_that_others_flushed_are_repaired(variant: str) -> None:
    async def body(one: Endpoint) -> None:
        mode = userspace_mode(SubprocessExec(), variant)
        assert (await mode.worker.do(mode.probe)).usable
        await become(mode, served(one))
        assert await mode.worker.do(mode.read) == rendered(mode, served(one))
        for damage in damages(variant):
            sh(f"{damage} || true")
            assert await mode.worker.do(mode.read) != rendered(mode, served(one)), damage
            await become(mode, served(one))
            assert await mode.worker.do(mode.read) == rendered(mode, served(one)), damage
            assert await ask(PORT, b"!", VIP) == b"one!"
            assert await ask(NODE_PORT, b"!") == b"one!"
        await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), {}))
        assert "KUBE" not in rules(variant).upper()
        assert not await mode.worker.do(mode.read)
        await release(mode)

    on_a_node(body)


@VARIANTS
def test_dials_that_fail_are_seen(variant: str) -> None:
    async def body(one: Endpoint) -> None:
        refused, silent = Endpoint(HOST, 1), Endpoint(HOST, 2)
        unreachable = Endpoint("192.168.78.9", 80)
        sh("ip route add unreachable 192.168.78.9")
        sh("nft 'table inet fault { chain in { type filter hook input priority 0; }; }'")
        sh("nft add rule inet fault in tcp dport 2 drop")
        mode = userspace_mode(SubprocessExec(), variant)
        await mode.worker.do(mode.probe)
        await become(mode, served(refused, silent, unreachable, one))
        watch, found = await mode.worker.do(mode.watch_failures), set[Failure]()
        while await ask(PORT, b"!", VIP) == b"one!" and len(found) < 3:
            async with asyncio.timeout(60):
                found |= {each for each in await watch.receive() if each.backend.ip != one.ip}
                found = {each for each in found if each.observation is not Observation.ANSWERED}
        await watch.aclose()
        assert found == {
            Failure(Backend(end.ip, end.port, Protocol.TCP), observation, HOST)
            for end, observation in (
                (refused, Observation.REFUSED),
                (silent, Observation.SILENT),
                (unreachable, Observation.UNREACHABLE),
            )
        }
        await release(mode)

    on_a_node(body)


@VARIANTS
def test_the_next_process_takes_over_and_old_connections_go_on(variant: str) -> None:
    async def body(one: Endpoint) -> None:
        old, new = (userspace_mode(SubprocessExec(), variant) for _ in range(2))
        await old.worker.do(old.probe)
        await become(old, served(one))
        held = []
        for address, port in ((VIP, PORT), (HOST, NODE_PORT)):
            reader, writer = await asyncio.open_connection(address, port)
            assert await reader.readexactly(3) == b"one"
            held.append((reader, writer))
        await new.worker.do(new.probe)
        await become(new, served(one))
        assert await new.worker.do(new.read) == rendered(new, served(one))
        draining = asyncio.create_task(release(old, 10))
        await asyncio.sleep(0)
        assert await ask(PORT, b"new", VIP) == b"onenew"
        assert await ask(NODE_PORT, b"new", HOST) == b"onenew"
        for reader, writer in held:
            writer.write(b"old")
            assert await reader.readexactly(3) == b"old"
            writer.close()
        assert await draining == 0
        await new.worker.do(new.apply, diff(await new.worker.do(new.read), {}))
        await release(new)

    on_a_node(body)


@VARIANTS
@pytest.mark.parametrize("ranges", [(), (f"{HOST}/32",)], ids=["all", "range"])
def test_clients_cannot_use_a_proxy_port_directly(ranges: tuple[str, ...], variant: str) -> None:
    async def body(one: Endpoint) -> None:
        options = ModeOptions(proxy_ports=(21000, 21001))
        mode = userspace_mode(SubprocessExec(), variant, options=options)
        await mode.worker.do(mode.probe)
        plan = served(one)
        frontends = tuple(replace(each, source_ranges=ranges) for each in plan.frontends)
        await become(mode, replace(plan, frontends=frontends))
        assert await ask(PORT, b"!", VIP) == b"one!"
        ports = {v.port for v in mode.proxy._listeners.values()}
        (hidden,) = ports & {21000, 21001}
        with socket.socket() as sock:
            sock.settimeout(0.3)
            with pytest.raises((TimeoutError, PermissionError)):
                sock.connect((HOST, hidden))
        await release(mode)

    on_a_node(body)


def test_nft_is_used_without_iptables() -> None:
    class NoIptables(SubprocessExec):
        def run_tool(
            self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
        ) -> Result:
            if "tables" in argv[0]:
                raise FileNotFoundError(argv[0])
            return super().run_tool(argv, stdin, timeout=timeout)

    async def body(one: Endpoint) -> None:
        mode = userspace_mode(NoIptables())
        assert (await mode.worker.do(mode.probe)).usable
        await become(mode, served(one))
        assert await ask(PORT, b"!", VIP) == b"one!"
        assert "table ip kube-portals" in sh("nft list tables")
        await release(mode)

    on_a_node(body)


def test_a_refused_service_port_leaves_others_alone() -> None:
    async def body(one: Endpoint) -> None:
        mode = userspace_mode(SubprocessExec())
        await mode.worker.do(mode.probe)
        await become(mode)
        with socket.socket() as taken:
            taken.bind((HOST, NODE_PORT))
            taken.listen()
            with pytest.raises(ApplyError, match=f"shop/cart.*port {NODE_PORT}/TCP"):
                await become(mode, served(one))
            assert await mode.worker.do(mode.read) == rendered(mode)
        await become(mode, served(one))
        assert await ask(NODE_PORT, b"!", HOST) == b"one!"
        await release(mode)

    on_a_node(body)


@pytest.mark.parametrize(("verdict", "error"), [(Verdict.REJECT, "refused"), (Verdict.DROP, "")])
def test_without_endpoints_the_kernel_answers(verdict: Verdict, error: str) -> None:
    async def body(_: Endpoint) -> None:
        mode = userspace_mode(SubprocessExec())
        await mode.worker.do(mode.probe)
        await become(mode, served(verdict=verdict))
        for address, port in ((VIP, PORT), (HOST, NODE_PORT)):
            with socket.socket() as sock:
                sock.settimeout(60 if error else 0.3)
                expected = ConnectionRefusedError if error else (TimeoutError, PermissionError)
                with pytest.raises(expected):
                    sock.connect((address, port))
        await release(mode)

    on_a_node(body)


def test_direct_portals_on_an_interface_of_our_own() -> None:
    async def body(one: Endpoint) -> None:
        mode = userspace_mode(SubprocessExec(), "direct")
        assert (await mode.worker.do(mode.probe)).usable
        await become(mode, served(one))
        assert await mode.worker.do(mode.read) == rendered(mode, served(one))
        assert await ask(PORT, b"!", VIP) == b"one!"
        assert await ask(NODE_PORT, b"!", HOST) == b"one!"
        sh(f"ip addr del {VIP}/32 dev {DEFAULT_INTERFACE}")
        sh(f"ip addr add 10.96.0.99/32 dev {DEFAULT_INTERFACE}")
        await become(mode, served(one))
        assert await ask(PORT, b"!", VIP) == b"one!"
        assert "10.96.0.99" not in sh(f"ip addr show dev {DEFAULT_INTERFACE}")
        await become(mode, served(verdict=Verdict.REJECT))
        with pytest.raises(ConnectionRefusedError):
            await ask(PORT, b"!", VIP)
        await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), {}))
        assert VIP not in sh(f"ip addr show dev {DEFAULT_INTERFACE}")
        await release(mode)

    on_a_node(body)


def test_many_addresses_are_added_and_removed() -> None:
    async def body(_: Endpoint) -> None:
        device = LinuxAddresses()
        some = [f"10.97.{n // 250}.{n % 250}" for n in range(500)] + ["fd00:97::1"]
        for _again in range(2):  # again does no harm
            device.add(some)
            assert device.present() == frozenset(some)
        with pytest.raises(ApplyError, match="address ff02::1 on kube-portals: "):
            device.add(["10.98.0.1", "ff02::1"])
        device.remove([*some, "10.98.0.1", "10.98.0.2"])
        assert device.present() == frozenset()

    on_a_node(body)


def test_rootless_needs_no_rules_and_no_addresses() -> None:
    async def body(one: Endpoint) -> None:
        before = rules("nft") + sh("ip addr")
        mode = create("userspace", SubprocessExec(), ModeOptions(portals="none"))
        assert isinstance(mode, UserspaceMode)
        await become(mode, served(one))
        assert await ask(NODE_PORT, b"!", HOST) == b"one!"
        assert len(await mode.worker.do(mode.read)) == 1
        assert rules("nft") + sh("ip addr") == before
        await release(mode)

    on_a_node(body)
