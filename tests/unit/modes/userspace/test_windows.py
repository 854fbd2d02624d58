"""The winuserspace mode on Linux: netsh is played by a script, the sockets are real.

What the fake netsh prints is written after Microsoft's description of the command, not recorded.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from steersman.host.exec import Result, SubprocessExec
from steersman.host.windows import SERVICE_INTERFACE, service_interface
from steersman.model.errors import ApplyError, BusyError
from steersman.model.failover import Backend, Observation
from steersman.model.names import Family, Protocol
from steersman.model.plan import (
    Endpoint,
    FamilySettings,
    NodeSettings,
    ProxyOptions,
    ServicePlan,
    Verdict,
)
from steersman.model.ruleset import diff
from steersman.modes.base import release
from steersman.modes.specs import ModeOptions
from steersman.modes.userspace.core import UserspaceMode
from steersman.modes.userspace.direct_portals import DirectPortals
from steersman.modes.userspace.render import StrayKey
from steersman.modes.userspace.windows import NetshAddresses, create
from steersman.proxy.listeners import ListenerPlan
from tests.support.modes.userspace_proxy import answering, ask, cart, endpoint, refusing
from tests.support.waiting import PATIENCE, until

SHOWN = """
Configuration for interface "{name}"
    DHCP enabled:                         No
{addresses}    InterfaceMetric:                      5000
"""
ADDRESS = """    IP Address:                           {address}
    Subnet Prefix:                        {address}/32 (mask 255.255.255.255)
"""


class Netsh:
    """Plays netsh: addresses appear when they have been looked for a few times."""

    def __init__(self, record: Path) -> None:
        self.record = record
        self.calls: list[Sequence[str]] = []
        self.scripts: list[list[str]] = []
        self.addresses: dict[str, int] = {"172.20.0.1": 0}
        self.delay = 1
        self.refuse = ""
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0) -> Result:
        self.calls.append(argv)
        assert self.go_on.wait(PATIENCE)
        if argv[1] == "-f":
            self.scripts.append(Path(argv[2]).read_text().splitlines())
            for line in self.scripts[-1]:
                before, name, after = line.split('"')
                *words, where = before.split()
                self._answer(["netsh", *words, where + name, *after.split()])
            return Result(0, b"", b"")
        return self._answer(argv)

    def _answer(self, argv: Sequence[str]) -> Result:
        verb = argv[3]
        address = argv[6].removeprefix("address=").partition("/")[0] if verb != "show" else ""
        if self.refuse == verb:
            return Result(1, b"\r\nThe object already exists.\r\n", b"")
        if verb == "add":
            self.addresses[address] = self.delay
        elif verb == "delete":
            self.addresses.pop(address, None)
        return Result(0, self._shown(argv[2]).encode(), b"")

    def _shown(self, place: str) -> str:
        there = [a for a, wait in self.addresses.items() if wait <= 0]
        self.addresses = {a: wait - 1 for a, wait in self.addresses.items()}
        of_family = [a for a in there if (":" in a) is (place == "ipv6")]
        text = "".join(ADDRESS.format(address=address) for address in of_family)
        return SHOWN.format(name=SERVICE_INTERFACE, addresses=text)


@pytest.fixture
def netsh(tmp_path: Path) -> Netsh:
    return Netsh(tmp_path / "folder" / "addresses")


def mode_of(netsh: Netsh) -> UserspaceMode:
    portals = DirectPortals(NetshAddresses(netsh, netsh.record, poll_seconds=0))
    return UserspaceMode("winuserspace", [portals])


VIP = "127.0.10.10"
"""Every address of 127.0.0.0/8 can be bound without being added."""


def served(
    *endpoints: Endpoint,
    port: int,
    verdict: Verdict = Verdict.FORWARD,
    kept: tuple[Endpoint, ...] | None = None,
) -> ServicePlan:
    options = ProxyOptions(kept=kept)
    return cart(*endpoints, at=(VIP, port), node_port=port + 1, verdict=verdict, proxy=options)


SETTINGS = NodeSettings(families=(Family.IPV4,), ipv4=FamilySettings())
PORT = 20_000 + os.getpid() % 6_000 * 2
"""Of a pair of ports, another one in each test process: node ports are bound to all addresses."""


async def test_a_service_address_is_added_served_and_removed(netsh: Netsh) -> None:
    mode = mode_of(netsh)
    assert (await mode.worker.do(mode.probe)).usable
    async with endpoint(answering(b"one")) as one:
        want = mode.render_service(served(one, port=PORT), SETTINGS)
        await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), want))
        assert VIP in netsh.addresses
        assert await mode.worker.do(mode.read) == want
        assert await ask(PORT, b"!", VIP) == b"one!"
        assert await ask(PORT + 1, b"!") == b"one!"
        await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), {}))
        with pytest.raises(ConnectionRefusedError):
            await ask(PORT, b"!", VIP)
        await until(lambda: mode.proxy.open_connections == 0)
    assert set(netsh.addresses) == {"172.20.0.1"}, "the interface's own address was touched"
    name = f"name={SERVICE_INTERFACE}"
    added = [
        "netsh",
        "interface",
        "ipv4",
        "add",
        "address",
        name,
        f"address={VIP}",
        "mask=255.255.255.255",
    ]
    assert added in netsh.calls
    await release(mode)


async def test_clients_are_served_while_netsh_runs(netsh: Netsh) -> None:
    mode = mode_of(netsh)
    async with endpoint(answering(b"one")) as one:
        want = mode.render_service(served(one, port=PORT), SETTINGS)
        await mode.worker.do(mode.apply, diff({}, want))
        netsh.go_on.clear()
        more = mode.render_service(served(one, port=PORT + 2), SETTINGS)
        applying = asyncio.create_task(mode.worker.do(mode.apply, diff({}, more)))
        calls = len(netsh.calls)
        await until(lambda: len(netsh.calls) > calls)
        assert await ask(PORT, b"!", VIP) == b"one!"
        applying.cancel()
        await asyncio.sleep(0)
        assert not applying.done(), "netsh runs still"
        netsh.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await applying
        assert await mode.worker.do(mode.read) == {**want, **more}
    await release(mode)


async def test_an_address_that_others_removed_is_added_again(netsh: Netsh) -> None:
    mode = mode_of(netsh)
    want = mode.render_service(served(Endpoint("127.0.0.1", 1), port=PORT), SETTINGS)
    await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), want))
    del netsh.addresses[VIP]
    change = diff(await mode.worker.do(mode.read), want)
    assert [key.address for key in change.changed] == [VIP]
    await mode.worker.do(mode.apply, change)
    assert VIP in netsh.addresses
    await release(mode)
    assert VIP not in netsh.addresses


async def test_a_rejected_address_has_no_socket(netsh: Netsh) -> None:
    mode = mode_of(netsh)
    want = mode.render_service(served(port=PORT, verdict=Verdict.REJECT), SETTINGS)
    await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), want))
    assert VIP in netsh.addresses
    assert await mode.worker.do(mode.read) == want
    with pytest.raises(ConnectionRefusedError):
        await ask(PORT, b"!", VIP)
    await mode.worker.do(mode.apply, diff(want, {}))
    assert VIP not in netsh.addresses
    await release(mode)


async def test_connections_are_reset_with_the_last_endpoint_if_the_plan_says_so(
    netsh: Netsh,
) -> None:
    mode = mode_of(netsh)
    async with endpoint(answering(b"one")) as one:
        for kept in ((one,), None):
            want = mode.render_service(served(one, port=PORT, kept=kept), SETTINGS)
            await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), want))
            ends = [await asyncio.open_connection(*at) for at in ((VIP, PORT), (VIP, PORT + 1))]
            for reader, _ in ends:
                assert await reader.readexactly(3) == b"one"
            left = None if kept is None else ()
            none = served(port=PORT, verdict=Verdict.REJECT, kept=left)
            want = mode.render_service(none, SETTINGS)
            await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), want))
            assert await mode.worker.do(mode.read) == want
            for reader, writer in ends:
                writer.write(b"?")
                if kept is None:
                    assert await reader.readexactly(1) == b"?"
                else:
                    with pytest.raises(ConnectionResetError):
                        await reader.readexactly(1)
                writer.close()
    await release(mode)


async def test_dials_are_seen_to_fail(netsh: Netsh) -> None:
    mode = mode_of(netsh)
    gone = await refusing()
    async with endpoint(answering(b"one")) as one, asyncio.timeout(PATIENCE):
        want = mode.render_service(served(gone, one, port=PORT), SETTINGS)
        await mode.worker.do(mode.apply, diff(await mode.worker.do(mode.read), want))
        failures = await mode.worker.do(mode.watch_failures)
        assert await ask(PORT, b"!", VIP) == b"one!"
        [first, *_] = await failures.receive()
        assert first.backend == Backend(gone.ip, gone.port, Protocol.TCP)
        assert first.observation is Observation.REFUSED
        await failures.aclose()
    await release(mode)


async def test_an_address_of_two_ports_stays_for_the_second(netsh: Netsh) -> None:
    mode = mode_of(netsh)
    one = mode.render_service(served(Endpoint("127.0.0.1", 1), port=PORT), SETTINGS)
    two = mode.render_service(served(Endpoint("127.0.0.1", 1), port=PORT + 2), SETTINGS)
    await mode.worker.do(mode.apply, diff({}, {**one, **two}))
    await mode.worker.do(mode.apply, diff(one, {}))
    assert VIP in netsh.addresses
    await release(mode)
    assert VIP not in netsh.addresses


async def test_addresses_that_a_killed_process_left_are_removed(netsh: Netsh) -> None:
    netsh.addresses["10.96.0.99"] = 0  # added by others: it stays
    killed = mode_of(netsh)
    old = killed.render_service(served(Endpoint("127.0.0.1", 1), port=PORT), SETTINGS)
    other = cart(Endpoint("127.0.0.1", 1), at=("127.0.10.11", PORT), node_port=0)
    new = killed.render_service(other, SETTINGS)
    await killed.worker.do(killed.apply, diff({}, {**old, **new}))
    await killed.proxy.drain(0)
    mode = mode_of(netsh)
    have = await mode.worker.do(mode.read)
    assert sorted(have) == [
        StrayKey("address", Family.IPV4, SERVICE_INTERFACE, "127.0.10.10"),
        StrayKey("address", Family.IPV4, SERVICE_INTERFACE, "127.0.10.11"),
    ]
    await mode.worker.do(mode.apply, diff(have, new))
    assert set(netsh.addresses) == {"172.20.0.1", "10.96.0.99", "127.0.10.11"}
    assert netsh.record.read_text() == f"127.0.10.11 {SERVICE_INTERFACE}\n"
    await release(mode)
    await release(killed)
    assert netsh.record.read_text() == ""


def test_an_address_that_netsh_keeps_stays_recorded(netsh: Netsh) -> None:
    addresses = NetshAddresses(netsh, netsh.record, poll_seconds=0)
    addresses.add([VIP])
    netsh.refuse = "delete"
    addresses.remove([VIP])
    assert addresses.ours(addresses.present()) == {VIP}


def test_many_addresses_are_looked_for_together(netsh: Netsh) -> None:
    wanted = [f"10.96.{number >> 8}.{number & 255}" for number in range(2000)]
    addresses = NetshAddresses(netsh, netsh.record, poll_seconds=0)
    addresses.add([*wanted, "fd00::1"])
    assert set(netsh.addresses) == {"172.20.0.1", *wanted, "fd00::1"}
    assert [len(lines) for lines in netsh.scripts] == [500, 500, 500, 500, 1]
    name = f'name="{SERVICE_INTERFACE}"'
    mask = "mask=255.255.255.255"
    assert netsh.scripts[0][0] == f"interface ipv4 add address {name} address=10.96.0.0 {mask}"
    addresses.remove([*wanted, "fd00::1"])
    assert set(netsh.addresses) == {"172.20.0.1"}
    assert netsh.record.read_text() == ""
    assert [path.name for path in netsh.record.parent.iterdir()] == ["addresses"]
    assert len(netsh.calls) < 20


def test_addresses_that_a_script_did_not_add_are_added_alone(netsh: Netsh) -> None:
    netsh.refuse = "add"
    with pytest.raises(ApplyError, match=r"10\.96\.0\.1 on .*already exists"):
        NetshAddresses(netsh, netsh.record, poll_seconds=0).add(["10.96.0.1", "10.96.0.2"])


@pytest.mark.parametrize("name", ["Réseau", SERVICE_INTERFACE])
def test_each_address_has_a_call_if_there_can_be_no_script(
    netsh: Netsh, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (netsh.record.parent / "netsh.txt").mkdir(parents=True)  # in its place
    addresses = NetshAddresses(netsh, netsh.record, name, poll_seconds=0)
    addresses.add(["10.96.0.1", "10.96.0.2"])
    assert [argv[3] for argv in netsh.calls].count("add") == 2
    addresses.remove(["10.96.0.1", "10.96.0.2"])
    assert set(netsh.addresses) == {"172.20.0.1"}
    assert ("cannot run netsh with a script" in caplog.text) == name.isascii()


def test_addresses_are_added_without_a_record(
    netsh: Netsh, caplog: pytest.LogCaptureFixture
) -> None:
    netsh.record.mkdir(parents=True)  # a folder is in its place
    addresses = NetshAddresses(netsh, netsh.record, poll_seconds=0)
    addresses.add([VIP])
    assert VIP in addresses.present()
    assert addresses.ours(addresses.present()) == frozenset()
    assert "cannot record which addresses are added" in caplog.text


def test_a_refusal_of_netsh_is_an_error_with_its_output(netsh: Netsh) -> None:
    netsh.refuse = "add"
    with pytest.raises(ApplyError, match="already exists"):
        NetshAddresses(netsh, netsh.record, poll_seconds=0).add([VIP])
    netsh.refuse = "show"
    support = NetshAddresses(netsh, netsh.record).probe()
    assert not support.usable
    assert "INTERFACE_TO_ADD_SERVICE_IP" in support.missing[0]


def test_an_address_that_never_appears_is_tried_again_later(netsh: Netsh) -> None:
    netsh.delay = 1000
    with pytest.raises(BusyError, match="does not appear"):
        NetshAddresses(netsh, netsh.record, poll_seconds=0).add([VIP])


def test_the_mode_cannot_run_without_netsh() -> None:
    class Nothing(SubprocessExec):
        def run_tool(
            self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
        ) -> Result:
            raise FileNotFoundError(argv[0])

    support = create(Nothing(), ModeOptions()).probe()
    assert not support.usable
    assert "for Windows" in support.missing[0]


def test_the_interface_can_be_named() -> None:
    assert service_interface({}) == SERVICE_INTERFACE
    assert service_interface({"INTERFACE_TO_ADD_SERVICE_IP": "Ethernet 2"}) == "Ethernet 2"


def test_ipv6_has_its_own_words(netsh: Netsh) -> None:
    NetshAddresses(netsh, netsh.record, "E", poll_seconds=0).add(["fd00::1"])
    assert [
        "netsh",
        "interface",
        "ipv6",
        "add",
        "address",
        "interface=E",
        "address=fd00::1/128",
    ] in (netsh.calls)


def test_a_listener_prints_where_it_is(netsh: Netsh) -> None:
    ruleset = mode_of(netsh).render_service(served(Endpoint("10.0.0.1", 80), port=80), SETTINGS)
    assert sorted(str(v) for v in ruleset.values() if isinstance(v, ListenerPlan)) == [
        "127.0.10.10 port 80: all to 10.0.0.1:80",
        "every address port 81: all to 10.0.0.1:80",
    ]
