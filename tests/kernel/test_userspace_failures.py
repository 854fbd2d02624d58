"""Diffs that fail half-way in the userspace modes: who was served is served still."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Sequence

import msgspec
import pytest

from steersman.host.exec import Result, SubprocessExec
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family, PlanKey
from steersman.model.plan import (
    Endpoint,
    FamilySettings,
    NodeSettings,
)
from steersman.model.ruleset import diff
from steersman.modes.base import release
from steersman.modes.specs import ModeOptions
from steersman.modes.userspace.linux_addresses import DEFAULT_INTERFACE, LinuxAddresses
from tests.support.lab.namespace import sh
from tests.support.lab.userspace import userspace_mode
from tests.support.lab.userspace_node import (
    NODE_PORT,
    PORT,
    SETTINGS,
    VARIANTS,
    VIP,
    become,
    datagrams,
    on_a_node,
    rendered,
    served,
)
from tests.support.modes.userspace_proxy import ask, client, owner, server
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.kernel
OTHER_HOST = "192.168.77.3"
Fails = Callable[[Sequence[str], bytes], bool]


class Failing(SubprocessExec):
    """Programs that find the kernel busy, for as long as `fails` says so."""

    def __init__(self, fails: Fails) -> None:
        super().__init__()
        self.fails: Fails | None = fails

    def run_tool(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0) -> Result:
        if self.fails is not None and self.fails(argv, stdin):
            return Result(4, b"", b"Resource temporarily unavailable")
        return super().run_tool(argv, stdin, timeout=timeout)


def writes(argv: Sequence[str], stdin: bytes) -> bool:
    """Whether rules are written."""
    return bool(stdin)


def writes_ipv6(argv: Sequence[str], stdin: bytes) -> bool:
    """Whether rules of IPv6 are written."""
    return ("ip6tables" in argv[0] and bool(stdin)) or b"ip6 kube-portals" in stdin


@VARIANTS
def test_ipv4_is_served_if_ipv6_cannot_be_written(variant: str) -> None:
    async def body(one: Endpoint) -> None:
        execute = Failing(writes_ipv6)
        mode = userspace_mode(execute, variant)
        await mode.worker.do(mode.probe)
        for _ in range(2):
            with pytest.raises((ApplyError, BusyError)):
                await become(mode, served(one))
            assert await ask(PORT, b"!", VIP) == b"one!"
        execute.fails = None
        await become(mode, served(one))
        assert await mode.worker.do(mode.read) == rendered(mode, served(one))
        assert await ask(PORT, b"!", VIP) == b"one!"
        await release(mode)

    on_a_node(body)


@VARIANTS
def test_a_failed_write_changes_nothing(variant: str) -> None:
    """Though every listener had to move, as this node's address is another one."""

    async def body(one: Endpoint) -> None:
        execute = Failing(writes)
        mode = userspace_mode(execute, variant, ModeOptions(proxy_ports=(21000, 21009)))
        execute.fails = None
        await mode.worker.do(mode.probe)
        await become(mode, served(one))
        used = mode.proxy.budget.used
        sh(f"ip addr add {OTHER_HOST}/24 dev eth0")
        settings = NodeSettings(
            families=SETTINGS.families,
            ipv4=FamilySettings(node_ip=OTHER_HOST, local_addresses=("127.0.0.1", OTHER_HOST)),
        )
        wanted = {**mode.render_node(settings), **mode.render_service(served(one), settings)}
        before = await mode.worker.do(mode.read)
        execute.fails = writes
        for _ in range(4):
            with pytest.raises((ApplyError, BusyError)):
                await mode.worker.do(mode.apply, diff(before, wanted))
            assert mode.proxy.budget.used == used
            assert mode.proxy.listeners.items() <= before.items()
            assert await ask(PORT, b"!", VIP) == b"one!"
        execute.fails = None
        await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), wanted))
        assert await mode.worker.do(mode.read) == wanted
        assert await ask(PORT, b"!", VIP) == b"one!"
        await release(mode)

    on_a_node(body)


def test_a_cancelled_write_closes_every_new_socket() -> None:
    async def body(one: Endpoint) -> None:
        execute = Failing(lambda *_: False)
        mode = userspace_mode(execute, options=ModeOptions(proxy_ports=(21000, 21009)))
        await mode.worker.do(mode.probe)
        await become(mode, served(one))
        sh(f"ip addr add {OTHER_HOST}/24 dev eth0")
        family = FamilySettings(node_ip=OTHER_HOST, local_addresses=("127.0.0.1", OTHER_HOST))
        settings = msgspec.structs.replace(SETTINGS, ipv4=family)
        wanted = {**mode.render_node(settings), **mode.render_service(served(one), settings)}
        change = diff(await mode.worker.do(mode.read), wanted)
        loop, writing, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def is_cancelled(_argv: Sequence[str], stdin: bytes) -> bool:
            if stdin:
                loop.call_soon_threadsafe(writing.set)
                go_on.wait(PATIENCE)
            return False

        execute.fails = is_cancelled
        applying = asyncio.create_task(mode.worker.do(mode.apply, change))
        await writing.wait()
        applying.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await applying
        await release(mode)
        assert mode.proxy.budget.used == 0

    on_a_node(body)


def test_a_node_port_is_served_at_an_address_that_is_not_usable_yet() -> None:
    """The kernel looks for a second or two whether another machine has a new address of IPv6."""
    address = "fd00:77::2"

    async def body(one: Endpoint) -> None:
        sh("ip link add v0 up type veth peer name v1 && ip link set v1 up")
        sh(f"ip addr add {address}/64 dev v0")
        assert "tentative" in sh("ip addr show dev v0")
        family = FamilySettings(node_ip=address, local_addresses=("::1", address))
        settings = NodeSettings(families=tuple(Family), ipv4=SETTINGS.ipv4, ipv6=family)
        node_port = served(one).frontends[1]
        key = PlanKey(owner().name, Family.IPV6)
        each = msgspec.structs.replace(served(one), key=key, frontends=(node_port,))
        mode = userspace_mode(SubprocessExec())
        await mode.worker.do(mode.probe)
        wanted = {**mode.render_node(settings), **mode.render_service(each, settings)}
        await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), wanted))
        assert "tentative" in sh("ip addr show dev v0")
        await until(lambda: "tentative" not in sh("ip addr show dev v0"))
        assert await ask(NODE_PORT, b"!", address) == b"one!"
        await release(mode)

    on_a_node(body)


def test_inherited_sockets_are_served_if_rules_cannot_be_written_yet() -> None:
    async def body(one: Endpoint) -> None:
        name = f"sm-test-{os.getpid()}"
        execute = Failing(writes)
        old = userspace_mode(SubprocessExec(), handoff=name)
        new = userspace_mode(execute, handoff=name)
        async with server(b"1") as (two, _):
            plans = (served(one), datagrams(two))
            for mode in (old, new):
                await mode.worker.do(mode.probe)
            await become(old, *plans)
            with pytest.raises(BusyError):
                await become(new, *plans)
            async with client(PORT, VIP) as somebody:
                assert await somebody.ask(b"!") == b"1!"
                await release(old)
                assert await somebody.ask(b"!") == b"1!"
            assert await ask(PORT, b"!", VIP) == b"one!"
            execute.fails = None
            await become(new, *plans)
            assert await new.worker.do(new.read) == rendered(new, *plans)
            assert await ask(PORT, b"!", VIP) == b"one!"
            await release(new)

    on_a_node(body)


def test_our_interface_is_created_again_if_it_was_removed() -> None:
    async def body(one: Endpoint) -> None:
        mode = userspace_mode(SubprocessExec(), "direct")
        await mode.worker.do(mode.probe)
        await become(mode, served(one))
        sh(f"ip link del {DEFAULT_INTERFACE}")
        await become(mode, served(one))
        assert await mode.worker.do(mode.read) == rendered(mode, served(one))
        assert await ask(PORT, b"!", VIP) == b"one!"
        await release(mode)

    on_a_node(body)


def test_an_unwanted_listener_without_its_address_is_closed() -> None:
    async def body(one: Endpoint) -> None:
        mode = userspace_mode(SubprocessExec(), "direct")
        await mode.worker.do(mode.probe)
        await become(mode, served(one))
        sh(f"ip addr del {VIP}/32 dev {DEFAULT_INTERFACE}")
        await become(mode)
        assert mode.proxy.budget.used == 0
        assert VIP not in sh("ip addr")
        await release(mode)

    on_a_node(body)


def test_addresses_of_the_predecessor_stay_if_another_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused, add = "10.96.0.11", LinuxAddresses.add

    def add_others(self: LinuxAddresses, addresses: Collection[str]) -> None:
        add(self, [each for each in addresses if each != refused])
        if refused in addresses:
            raise ApplyError(f"address {refused}")

    monkeypatch.setattr(LinuxAddresses, "add", add_others)

    async def body(one: Endpoint) -> None:
        old, new = (userspace_mode(SubprocessExec(), "direct") for _ in "12")
        await old.worker.do(old.probe)
        await become(old, served(one))
        more = msgspec.structs.replace(
            served(one, name="more"),
            frontends=(msgspec.structs.replace(served().frontends[0], address=refused),),
        )
        with pytest.raises(ApplyError, match=refused):
            await become(new, served(one), more)
        assert await ask(PORT, b"!", VIP) == b"one!"
        await release(old)
        await release(new)

    on_a_node(body)
