"""Switching to and from the ipvs mode under live connections."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from steersman.modes.base import Mode, release
from steersman.modes.ipvs.mode import IpvsMode
from steersman.modes.registry import may_have_left
from steersman.modes.specs import ModeOptions
from steersman.run.process.mode_transition import remove_leftovers_once
from tests.support.lab import switches
from tests.support.lab.cluster import Lab, Layout, Pod
from tests.support.lab.inside import Inside
from tests.support.modes.ipvs import mode_behind
from tests.vm.guest.ipvs import only_with_all


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    pods = tuple(Pod(address) for address in (*switches.ENDS, switches.CLIENT))
    node = {"eth0": (f"{switches.NODE}/24",)}
    with Lab(Layout(node, (switches.OUTSIDE,), pods)) as lab:
        echo = switches.Echo(lab)
        yield lab
        echo.close()


@pytest.fixture
def ipvs(lab: Lab) -> Iterator[IpvsMode]:
    """The mode; what it told the node is removed at the end."""
    mode = mode_behind(Inside(lab.node.path))
    yield mode
    assert may_have_left("ipvs", ModeOptions())
    asyncio.run(remove_leftovers_once([("ipvs", mode)]))
    asyncio.run(release(mode))


@contextmanager
def connected(lab: Lab, mode: Mode) -> Iterator[switches.Clients]:
    """Program a mode and open connections by way of it."""
    asyncio.run(switches.program(mode))
    clients = switches.Clients(lab)
    try:
        clients.check()
        yield clients
    finally:
        clients.close()


@pytest.fixture(params=["iptables", pytest.param("nftables", marks=only_with_all)])
def other(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Mode]:
    """Another mode, in the same way."""
    mode = switches.mode_of(lab, request.param, "nft")
    yield mode
    asyncio.run(remove_leftovers_once([(request.param, mode)]))


def goes_on(clients: switches.Clients, *, live: bool = True) -> None:
    """Connections are opened, and the live ones carry data."""
    before = clients.opened
    while clients.opened < before + 10:
        if live:
            clients.check()


def virtual_servers(lab: Lab) -> str:
    return lab.run("cat", "/proc/net/ip_vs").partition("RemoteAddress")[2]


def test_coming_to_ipvs_nothing_is_lost(lab: Lab, ipvs: IpvsMode, other: Mode) -> None:
    with connected(lab, other) as clients:
        asyncio.run(switches.program(ipvs))
        clients.check()
        (said,) = asyncio.run(remove_leftovers_once([("other", other)])).messages
        assert "removed" in said
        goes_on(clients)
    assert clients.failed == []
    assert "->" in virtual_servers(lab)


def test_leaving_ipvs_with_patience_nothing_is_lost(lab: Lab, ipvs: IpvsMode, other: Mode) -> None:
    with connected(lab, ipvs) as clients:

        async def leave() -> list[str]:
            await switches.program(other)
            leaving = asyncio.create_task(remove_leftovers_once([("ipvs", ipvs)], 600.0))
            async with asyncio.timeout(300):
                while "KUBE-IPVS" in lab.run("iptables-save"):  # noqa: ASYNC110 - it is another's
                    await asyncio.sleep(0.1)
            await asyncio.to_thread(goes_on, clients)
            assert not leaving.done()
            assert "->" in virtual_servers(lab)
            for sock in clients.live:
                sock.close()
            return (await leaving).messages

        (said,) = asyncio.run(leave())
        goes_on(clients, live=False)
    assert "removed" in said
    assert "cut" not in said
    assert clients.failed == []
    assert "->" not in virtual_servers(lab)


@only_with_all
def test_leaving_ipvs_at_once_cuts_what_it_carries(lab: Lab, ipvs: IpvsMode) -> None:
    iptables = switches.mode_of(lab, "iptables", "nft")
    with connected(lab, ipvs) as clients:
        asyncio.run(switches.program(iptables))
        clients.check()
        (said,) = asyncio.run(remove_leftovers_once([("ipvs", ipvs)])).messages
        goes_on(clients, live=False)
    assert f"{len(switches.WAYS)} connections were cut" in said
    assert clients.failed == []
    asyncio.run(remove_leftovers_once([("iptables", iptables)]))
