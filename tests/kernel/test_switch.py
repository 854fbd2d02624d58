"""Switching modes under live connections: none breaks, and every new one gets through."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from steersman.host.exec import SubprocessExec
from steersman.host.netlink import Netlink
from steersman.host.worker import KernelWorker
from steersman.model.plan import NodePlan
from steersman.model.ruleset import diff
from steersman.modes.base import Mode
from steersman.modes.capabilities import Carrier
from steersman.modes.ebpf import clsact, pins
from steersman.modes.ebpf.nat_hooks import TABLE, NatHookGuard
from steersman.modes.specs import IpvsOptions, ModeOptions
from steersman.run.process.mode_transition import other_modes, remove_leftovers_once
from tests.support.builders import nftables_plans as make
from tests.support.lab.cluster import Lab
from tests.support.lab.switches import (
    FRONTENDS,
    NODE,
    ONLY_V4,
    OUTSIDE,
    WAYS,
    Clients,
    Stalls,
    ask,
    connected,
    lab,
    mode_of,
    program,
)
from tests.support.modes.registry import MODES
from tests.support.waiting import until

__all__ = ["lab"]  # a fixture

pytestmark = pytest.mark.kernel
UPSTREAM = """
add table ip kube-proxy
add map ip kube-proxy service-ips { type ipv4_addr . inet_proto . inet_service : verdict ; }
add map ip kube-proxy service-nodeports { type inet_proto . inet_service : verdict ; }
add chain ip kube-proxy mark-it
add rule ip kube-proxy mark-it mark set mark or 0x4000
add chain ip kube-proxy service-ULMVA6XW-shop/web/tcp/http
add rule ip kube-proxy service-ULMVA6XW-shop/web/tcp/http jump mark-it
add rule ip kube-proxy service-ULMVA6XW-shop/web/tcp/http meta l4proto tcp dnat ip to \
numgen random mod 2 map { 0 : 10.244.0.0 . 8080, 1 : 10.244.0.2 . 8080 }
add chain ip kube-proxy services
add rule ip kube-proxy services ip daddr . meta l4proto . th dport vmap @service-ips
add rule ip kube-proxy services ip daddr 192.0.2.1 meta l4proto . th dport vmap @service-nodeports
add chain ip kube-proxy nat-prerouting { type nat hook prerouting priority -100 ; }
add rule ip kube-proxy nat-prerouting jump services
add chain ip kube-proxy nat-output { type nat hook output priority -100 ; }
add rule ip kube-proxy nat-output jump services
add chain ip kube-proxy nat-postrouting { type nat hook postrouting priority 100 ; }
add rule ip kube-proxy nat-postrouting mark and 0x4000 != 0 masquerade
add element ip kube-proxy service-ips { 10.96.0.10 . tcp . 80 : \
goto service-ULMVA6XW-shop/web/tcp/http, \
198.51.100.1 . tcp . 80 : goto service-ULMVA6XW-shop/web/tcp/http }
add element ip kube-proxy service-nodeports { tcp . 30080 : \
goto service-ULMVA6XW-shop/web/tcp/http }
"""


def carrier_of(mode: Mode) -> Carrier:
    """What tells of the connections that a mode carries."""
    assert mode.carrier is not None
    return mode.carrier


def serves(lab: Lab, name: str, variant: str) -> bool:
    """Whether a mode's rules for the Service are in the kernel."""
    if name == "iptables":
        return "KUBE-SERVICES" in lab.run(f"iptables-{variant}-save")
    if name == "ebpf":
        mode = mode_of(lab, name, variant)
        return bool(asyncio.run(mode.worker.do(mode.read)))
    return "table ip kube-proxy" in lab.run("nft", "list", "tables")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("iptables", "nft"), ("nftables", "nft")),
        (("iptables", "legacy"), ("nftables", "nft")),
        (("nftables", "nft"), ("iptables", "nft")),
        (("nftables", "nft"), ("iptables", "legacy")),
        (("upstream", ""), ("nftables", "nft")),
        (("iptables", "nft"), ("ebpf", "tcx")),
        (("nftables", "nft"), ("ebpf", "tcx")),
    ],
)
def test_connections_live_through_a_switch(
    lab: Lab, old: tuple[str, str], new: tuple[str, str]
) -> None:
    async def switch() -> None:
        mode = mode_of(lab, *new)
        await program(mode)
        clients.check()
        left = [(name, mode_of(lab, *old)) for name in (old[0],) if name in MODES]
        said = (await remove_leftovers_once(left, current=mode)).messages
        assert [s for s in said if "removed" in s] == said
        assert len(said) == len(left)

    mode_of(lab, *new)  # so that sockets are in its cgroup, if it has one
    if old[0] in MODES:
        asyncio.run(program(mode_of(lab, *old)))
    else:
        lab.run("nft", "-f", "-", stdin=UPSTREAM)
    clients = Clients(lab)
    try:
        clients.check()
        asyncio.run(switch())
        clients.check()
        before = clients.opened
        while clients.opened < before + 20:
            clients.check()
    finally:
        clients.close()
    assert clients.failed == []
    assert serves(lab, *new)
    if old[0] in MODES:
        assert not serves(lab, *old)
    assert "ULMVA6XW" not in lab.run("nft", "list", "ruleset")


HOOKS = (
    (SubprocessExec, "run"),
    (SubprocessExec, "run_tool"),
    (Netlink, "batch"),
    (pins.Pins, "attach"),
    (pins.Pins, "detach"),
    (clsact, "_put_filter"),
    (clsact.Filters, "remove"),
)
"""What changes something in the kernel, and may not be all that a switch does."""
ENOUGH = 60
"""Sockets for all steps: none can be made in a namespace while something is done there."""
PAIRS = itertools.permutations(
    [("iptables", "nft"), ("iptables", "legacy"), ("nftables", "nft"), ("ebpf", "tcx")], 2
)


def followed(function: Callable[..., Any], after: Callable[[str], None]) -> Callable[..., Any]:
    """A function with something to do after it, be it a coroutine or not."""

    async def wait(made: Awaitable[Any]) -> Any:
        result = await made
        after(function.__name__)
        return result

    def follow(*args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        if inspect.isawaitable(result):
            return wait(result)
        after(function.__name__)
        return result

    return follow


@pytest.mark.parametrize(("old", "new"), [*PAIRS, (("nftables", "nft"), ("ebpf", "tc"))])
def test_connections_begin_between_any_two_steps_of_a_switch(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, old: tuple[str, str], new: tuple[str, str]
) -> None:
    """Devices get programs one by one, and a mode may need several commands."""
    steps: list[str] = []
    wrong: list[str] = []

    turn, over = threading.Lock(), threading.Event()

    def after(name: str) -> None:
        with turn:
            steps.append(name)
            for way in WAYS if not over.is_set() else ():
                began = time.monotonic()
                if wrong or not (why := ask(sockets[way].pop(), way)):
                    continue
                if not stalls.excuse(why, began):
                    wrong.append(f"after {steps}: {why}")

    async def switch() -> None:
        serving = mode_of(lab, *new)
        await program(serving)
        removal = await remove_leftovers_once([(old[0], mode_of(lab, *old))], current=serving)
        assert removal.messages

    mode_of(lab, *new)  # so that sockets are in its cgroup, if it has one
    asyncio.run(program(mode_of(lab, *old)))
    sockets = {way: [lab.socket(way[0], "TCP") for _ in range(ENOUGH)] for way in WAYS}
    for where, name in HOOKS:
        monkeypatch.setattr(where, name, followed(getattr(where, name), after))
    stalls = Stalls()
    with contextlib.ExitStack() as stack:
        stack.callback(stalls.close)
        for sock in itertools.chain.from_iterable(sockets.values()):
            stack.enter_context(sock)
        after("start")
        asyncio.run(switch())
        with turn:  # the mode goes on in its thread
            over.set()
    assert wrong == []
    assert len(steps) > 3


@pytest.mark.parametrize("new", [("iptables", "nft"), ("nftables", "nft")])
def test_the_ebpf_mode_is_left_when_its_connections_have_ended(
    lab: Lab, new: tuple[str, str]
) -> None:
    old = ("ebpf", "tcx")

    async def switch() -> list[str]:
        # The new rules make conntrack track, and drop INVALID packets. A FIN is INVALID if it is
        # the first packet that conntrack sees of its connection, so none may be on its way.
        ebpf = mode_of(lab, *old)

        async def none_closes() -> bool:
            return await ebpf.worker.do(carrier_of(ebpf).connections) <= len(clients.live)

        with clients.opening:
            await until(none_closes)
            await program(mode_of(lab, *new))
        await asyncio.to_thread(clients.check)
        left = asyncio.create_task(remove_leftovers_once([("ebpf", ebpf)], 60))
        before = clients.opened
        while clients.opened < before + 20:
            await asyncio.to_thread(clients.check)
        assert not left.done(), "the old mode carries what it has made"
        for sock in clients.live:
            sock.close()
        return (await left).messages

    asyncio.run(program(mode_of(lab, *old)))
    clients = Clients(lab)
    try:
        clients.check()
        (said,) = asyncio.run(switch())
        before = clients.opened
        while clients.opened < before + 20:
            clients.pause()
    finally:
        clients.close()
    assert clients.failed == []
    assert "removed" in said
    assert "cut" not in said
    assert serves(lab, *new)
    assert not serves(lab, *old)


OWN_PORT = 20000
"""Of the client; programs keep it for a masqueraded connection, as no socket gets it by itself."""


def from_own_port(lab: Lab, address: str, port: int) -> socket.socket:
    """A connection to the Service from OWN_PORT of the client outside."""
    sock = lab.socket(OUTSIDE, "TCP")
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.settimeout(60)
        sock.bind((OUTSIDE, OWN_PORT))
        sock.connect((address, port))
    except OSError:
        sock.close()
        raise
    return sock


def masquerade_from(lab: Lab, address: str, ports: str) -> None:
    """Let netfilter use some ports only for connections to an address, that of the client first."""
    lab.run(
        *("nft", "-f", "-"),
        stdin="table ip sm-test { chain post { type nat hook postrouting priority 90;\n"
        f"ct original ip daddr {address} tcp dport 8080 snat to {NODE}:{ports}\n}}\n}}\n",
    )


@pytest.mark.parametrize("name", ["iptables", "nftables"])
@pytest.mark.parametrize("ebpf_comes", [True, False], ids=["to-ebpf", "from-ebpf"])
def test_both_modes_masquerade_and_choose_different_ports(
    lab: Lab, name: str, ebpf_comes: bool
) -> None:
    """A port that both chose for the same endpoint would belong to two connections."""
    one_endpoint = make.port([2], frontends=FRONTENDS)
    plan = NodePlan(ONLY_V4, {one_endpoint.key: one_endpoint})

    def echo(sock: socket.socket) -> None:
        sock.sendall(b"mine")
        assert sock.recv(9) == b"mine"

    async def switch() -> None:
        ebpf, other = mode_of(lab, "ebpf", "tcx"), mode_of(lab, name, "nft")
        old, new = (other, ebpf) if ebpf_comes else (ebpf, other)
        await program(old, plan)
        if ebpf_comes:
            masquerade_from(lab, NODE, f"{OWN_PORT}")
        with from_own_port(lab, NODE, 30080) as before:
            echo(before)
            await program(new, plan)
            if ebpf_comes:
                lab.run("nft", "delete", "table", "ip", "sm-test")
            else:
                have = await ebpf.worker.do(ebpf.read)
                await ebpf.worker.do(
                    ebpf.apply, diff(have, carrier_of(ebpf).without_new_connections(have))
                )
                await ebpf.worker.do(carrier_of(ebpf).hold_ports)
                masquerade_from(lab, "198.51.100.1", f"{OWN_PORT}-{OWN_PORT + 1}")
            with from_own_port(lab, "198.51.100.1", 80) as after:
                for sock in (after, before, after):
                    echo(sock)

    asyncio.run(switch())


def test_what_is_held_is_let_go_when_nothing_is_translated(lab: Lab) -> None:
    async def scenario() -> None:
        worker = KernelWorker(Path(lab.node.path))
        guard = NatHookGuard(SubprocessExec())
        await worker.do(guard.create)
        assert TABLE not in lab.run("nft", "list", "tables"), "nothing to hold"
        await program(mode_of(lab, "nftables", "nft"))
        with connected(lab.socket(OUTSIDE, "TCP"), OUTSIDE, NODE, 30080):
            await worker.do(guard.create)
            assert f"table ip {TABLE}" in lab.run("nft", "list", "tables")
            again = NatHookGuard(SubprocessExec())
            await worker.do(again.remove)
            assert f"table ip6 {TABLE}" in lab.run("nft", "list", "tables"), "still translated"
        lab.run("conntrack", "-F")
        await worker.do(again.remove)
        assert TABLE not in lab.run("nft", "list", "tables")
        await worker.close()

    asyncio.run(scenario())


def test_each_mode_leaves_the_other_behind() -> None:
    names = [name for name, _ in other_modes("nftables", SubprocessExec())]
    assert {"iptables (nft)", "iptables (legacy)"} <= set(names)
    assert "nftables" in [name for name, _ in other_modes("iptables", SubprocessExec())]
    assert [name for name, _ in other_modes("elsewhere", SubprocessExec())] == []


def test_what_others_balance_by_ipvs_stays_theirs() -> None:
    options = ModeOptions(ipvs=IpvsOptions(exclude_cidrs=("192.0.2.0/24",)))
    left: dict[str, Any] = dict(other_modes("iptables", SubprocessExec(), "nft", options))
    assert left["ipvs"]._options.exclude_cidrs == ("192.0.2.0/24",)
    assert not left["ipvs"]._loads
