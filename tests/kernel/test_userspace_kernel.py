"""The userspace modes on a real kernel, in a network namespace of each test's own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

import pytest

from steersman.host.exec import Result, SubprocessExec
from steersman.model.errors import ApplyError
from steersman.model.names import Family
from steersman.model.plan import (
    Action,
    Endpoint,
    FamilySettings,
    Frontend,
    FrontendKind,
    NodeSettings,
    ServicePlan,
    Verdict,
)
from steersman.model.ruleset import Ruleset, diff
from steersman.modes.registry import MODES, ModeOptions
from steersman.modes.userspace.addresses import DEFAULT_INTERFACE, LinuxAddresses
from steersman.modes.userspace.direct import DirectMode
from steersman.modes.userspace.mode import UserspaceMode, UserspaceOptions
from tests.support.lab.namespace import in_namespace, sh
from tests.support.modes.userspace_proxy import answering, ask, endpoint, owner

pytestmark = pytest.mark.kernel
VARIANTS = pytest.mark.parametrize("variant", ["nft", "legacy", "nftables"])
HOST, VIP, PORT, NODE_PORT = "192.168.77.2", "10.96.0.10", 80, 30080
SETTINGS = NodeSettings(
    families=tuple(Family),
    ipv4=FamilySettings(
        node_ip=HOST, local_addresses=("127.0.0.1", HOST), localhost_node_ports=True
    ),
)


def plan(
    *endpoints: Endpoint, verdict: Verdict = Verdict.FORWARD, name: str = "cart"
) -> ServicePlan:
    action = Action(verdict)
    kinds = ((FrontendKind.CLUSTER_IP, VIP, PORT), (FrontendKind.NODE_PORT, "", NODE_PORT))
    frontends = tuple(Frontend(*where, action, action, action) for where in kinds)
    return ServicePlan(owner(name=name), frontends, endpoints, (), endpoints)


def rendered(mode: UserspaceMode | DirectMode, *plans: ServicePlan) -> Ruleset:
    want = dict(mode.render_node(SETTINGS))
    for each in plans:
        want.update(mode.render_service(each, SETTINGS))
    return want


async def become(mode: UserspaceMode | DirectMode, *plans: ServicePlan) -> None:
    await mode.apply(diff(await mode.read(), rendered(mode, *plans)))


def on_a_node(body: Callable[[Endpoint], Awaitable[None]]) -> None:
    """Run a test where there is a node with an address, and an endpoint on it."""

    async def inside() -> None:
        sh(f"ip link add eth0 type bridge && ip link set eth0 up && ip addr add {HOST}/24 dev eth0")
        sh("ip route add default dev eth0")
        async with endpoint(answering(b"one")) as one:
            await body(one)

    in_namespace(inside)


def rules(variant: str) -> str:
    if variant == "nftables":
        return sh("nft list ruleset")
    return sh(f"iptables-{variant}-save; ip6tables-{variant}-save")


def options(variant: str) -> UserspaceOptions:
    if variant == "nftables":
        return UserspaceOptions(portals=variant)
    return UserspaceOptions(iptables_variant=variant)


def damages(variant: str) -> tuple[str, ...]:
    if variant == "nftables":
        return (
            "nft flush chain ip kube-portals host",
            "nft delete table ip kube-portals",
            "nft add rule ip kube-portals firewall tcp dport 1 drop",
            "nft flush ruleset",
        )
    return (
        f"iptables-{variant} -t nat -F KUBE-PORTALS-HOST",
        f"iptables-{variant} -t nat -F OUTPUT; iptables-{variant} -t nat -X KUBE-PORTALS-HOST",
        f"iptables-{variant} -t nat -F; iptables-{variant} -t nat -X",
        f"iptables-{variant} -A KUBE-PORTALS-FIREWALL -p tcp --dport 1 -j DROP",
    )


@VARIANTS
def test_rules_that_others_flushed_are_repaired(variant: str) -> None:
    async def body(one: Endpoint) -> None:
        mode = UserspaceMode(SubprocessExec(), options(variant))
        assert (await mode.probe()).usable
        await become(mode, plan(one))
        assert await mode.read() == rendered(mode, plan(one))
        for damage in damages(variant):
            sh(f"{damage} || true")
            assert await mode.read() != rendered(mode, plan(one)), damage
            await become(mode, plan(one))
            assert await mode.read() == rendered(mode, plan(one)), damage
            assert await ask(PORT, b"!", VIP) == b"one!"
            assert await ask(NODE_PORT, b"!") == b"one!"
        await mode.apply(diff(await mode.read(), {}))
        assert "KUBE" not in rules(variant).upper()
        assert not await mode.read()
        await mode.close()

    on_a_node(body)


@VARIANTS
def test_the_next_process_takes_over_and_old_connections_go_on(variant: str) -> None:
    async def body(one: Endpoint) -> None:
        old, new = (UserspaceMode(SubprocessExec(), options(variant)) for _ in range(2))
        await old.probe()
        await become(old, plan(one))
        held = []
        for address, port in ((VIP, PORT), (HOST, NODE_PORT)):
            reader, writer = await asyncio.open_connection(address, port)
            assert await reader.readexactly(3) == b"one"
            held.append((reader, writer))
        await new.probe()
        await become(new, plan(one))
        assert await new.read() == rendered(new, plan(one))
        draining = asyncio.create_task(old.close(10))
        await asyncio.sleep(0)
        assert await ask(PORT, b"new", VIP) == b"onenew"
        assert await ask(NODE_PORT, b"new", HOST) == b"onenew"
        for reader, writer in held:
            writer.write(b"old")
            assert await reader.readexactly(3) == b"old"
            writer.close()
        assert await draining == 0
        await new.apply(diff(await new.read(), {}))
        await new.close()

    on_a_node(body)


def test_the_proxy_port_itself_is_closed_to_everybody() -> None:
    async def body(one: Endpoint) -> None:
        mode = UserspaceMode(SubprocessExec(), UserspaceOptions(ports=(21000, 21001)))
        await mode.probe()
        await become(mode, plan(one))
        assert await ask(PORT, b"!", VIP) == b"one!"
        ports = {v.port for v in mode.proxy._listeners.values()}
        (hidden,) = ports & {21000, 21001}
        with socket.socket() as sock:
            sock.settimeout(0.3)
            with pytest.raises((TimeoutError, PermissionError)):
                sock.connect((HOST, hidden))
        await mode.close()

    on_a_node(body)


def test_nft_is_used_where_there_is_no_iptables() -> None:
    class NoIptables(SubprocessExec):
        async def run(
            self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
        ) -> Result:
            if "tables" in argv[0]:
                raise FileNotFoundError(argv[0])
            return await super().run(argv, stdin, timeout=timeout)

    async def body(one: Endpoint) -> None:
        mode = UserspaceMode(NoIptables())
        assert (await mode.probe()).usable
        await become(mode, plan(one))
        assert await ask(PORT, b"!", VIP) == b"one!"
        assert "table ip kube-portals" in sh("nft list tables")
        await mode.close()

    on_a_node(body)


def test_a_refused_service_port_leaves_others_alone() -> None:
    async def body(one: Endpoint) -> None:
        mode = UserspaceMode(SubprocessExec())
        await mode.probe()
        await become(mode)
        with socket.socket() as taken:
            taken.bind((HOST, NODE_PORT))
            taken.listen()
            with pytest.raises(ApplyError, match=f"shop/cart.*port {NODE_PORT}/TCP"):
                await become(mode, plan(one))
            assert await mode.read() == rendered(mode)
        await become(mode, plan(one))
        assert await ask(NODE_PORT, b"!", HOST) == b"one!"
        await mode.close()

    on_a_node(body)


@pytest.mark.parametrize(("verdict", "error"), [(Verdict.REJECT, "refused"), (Verdict.DROP, "")])
def test_without_endpoints_the_kernel_answers(verdict: Verdict, error: str) -> None:
    async def body(_: Endpoint) -> None:
        mode = UserspaceMode(SubprocessExec())
        await mode.probe()
        await become(mode, plan(verdict=verdict))
        for address, port in ((VIP, PORT), (HOST, NODE_PORT)):
            with socket.socket() as sock:
                sock.settimeout(0.3)
                expected = ConnectionRefusedError if error else (TimeoutError, PermissionError)
                with pytest.raises(expected):
                    sock.connect((address, port))
        await mode.close()

    on_a_node(body)


def test_direct_portals_on_an_interface_of_our_own() -> None:
    async def body(one: Endpoint) -> None:
        mode = DirectMode("userspace", LinuxAddresses(SubprocessExec()))
        assert (await mode.probe()).usable
        await become(mode, plan(one))
        assert await mode.read() == rendered(mode, plan(one))
        assert await ask(PORT, b"!", VIP) == b"one!"
        assert await ask(NODE_PORT, b"!", HOST) == b"one!"
        sh(f"ip addr del {VIP}/32 dev {DEFAULT_INTERFACE}")
        sh(f"ip addr add 10.96.0.99/32 dev {DEFAULT_INTERFACE}")
        await become(mode, plan(one))
        assert await ask(PORT, b"!", VIP) == b"one!"
        assert "10.96.0.99" not in sh(f"ip addr show dev {DEFAULT_INTERFACE}")
        await become(mode, plan(verdict=Verdict.REJECT))
        with pytest.raises(ConnectionRefusedError):
            await ask(PORT, b"!", VIP)
        await mode.apply(diff(await mode.read(), {}))
        assert VIP not in sh(f"ip addr show dev {DEFAULT_INTERFACE}")
        await mode.close()

    on_a_node(body)


def test_rootless_needs_no_rules_and_no_addresses() -> None:
    async def body(one: Endpoint) -> None:
        before = rules("nft") + sh("ip addr")
        mode = MODES["userspace"](SubprocessExec(), ModeOptions(portals="none"))
        assert isinstance(mode, DirectMode)
        await become(mode, plan(one))
        assert await ask(NODE_PORT, b"!", HOST) == b"one!"
        assert len(await mode.read()) == 1
        assert rules("nft") + sh("ip addr") == before
        await mode.close()

    on_a_node(body)
