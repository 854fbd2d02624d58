"""How the ipvs mode tells the kernel: refusals, draining, addresses. The kernel is a fake one."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from steersman.host.exec import Result
from steersman.host.netlink import NetlinkError, Request
from steersman.host.nlmsg import NLMSG_NOOP
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family, Protocol
from steersman.model.ruleset import Diff, diff
from steersman.modes.ipvs.apply import Servers, Sets, Step, send
from steersman.modes.ipvs.kernel import Doors
from steersman.modes.ipvs.kernel import Kernel as Whole
from steersman.modes.ipvs.mode import IpvsMode
from steersman.modes.ipvs.names import DEVICE, DeviceKey, MemberKey, Server, ServerKey, SetKey
from steersman.modes.ipvs.wire import Command
from tests.support.builders.plans import SETTINGS

TCP = ServerKey(Protocol.TCP, "10.96.0.1", 80)
UDP = ServerKey(Protocol.UDP, "10.96.0.1", 53)
ONE, TWO = ("10.244.0.1", 8080), ("10.244.0.2", 8080)


class Kernel:
    """Takes requests, and refuses the n-th of all with an errno."""

    def __init__(self, **refusals: int) -> None:
        self.refusals = {int(number[1:]): code for number, code in refusals.items()}
        self.seen: list[Request] = []

    def batch(self, requests: Sequence[Request]) -> dict[int, NetlinkError]:
        if len(requests) > 1:
            assert requests[0].kind == NLMSG_NOOP, "a refused first message ends the wait"
        refused = {}
        for index, request in enumerate(requests):
            if request.kind == NLMSG_NOOP:
                continue
            code = self.refusals.get(len(self.seen))
            if code:
                refused[index] = NetlinkError(code, "refused")
            self.seen.append(request)
        return refused

    @property
    def commands(self) -> list[Command]:
        return [Command(request.payload[0]) for request in self.seen]


def servers(kernel: Kernel, table: str = "") -> Servers:
    def inside(_function: Callable[[], str]) -> str:
        return table

    return Servers(kernel, 99, inside)  # type: ignore[arg-type]


def step(number: int, *harmless: int, instead: Request | None = None) -> Step:
    other = (errno.EEXIST, lambda: instead) if instead else None
    return Step(lambda: f"step {number}", Request(100 + number, b""), harmless, other)


def deliver(kernel: Kernel, *steps: Step) -> list[int]:
    send(kernel, steps)  # type: ignore[arg-type]
    return [request.kind - 100 for request in kernel.seen]


def test_what_is_so_already_is_no_failure() -> None:
    kernel = Kernel(n0=errno.ENOENT)
    assert deliver(kernel, step(1, errno.ENOENT), step(2)) == [1, 2]


def test_what_exists_is_changed_instead() -> None:
    kernel = Kernel(n1=errno.EEXIST)
    assert deliver(kernel, step(1), step(2, instead=Request(109, b"")), step(3)) == [1, 2, 3, 9]


def test_a_refusal_names_the_object() -> None:
    with pytest.raises(ApplyError, match="step 2: refused"):
        deliver(Kernel(n1=errno.EINVAL), step(1), step(2, errno.ENOENT))


def test_a_change_that_is_refused_as_well() -> None:
    with pytest.raises(ApplyError):
        deliver(Kernel(n0=errno.EEXIST, n1=errno.EINVAL), step(1, instead=Request(109, b"")))


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENOBUFS, errno.EINTR])
def test_what_the_kernel_has_no_memory_for_is_not_the_objects_fault(code: int) -> None:
    """A Service that is refused would not be tried again for a while, and named in a Finding."""
    with pytest.raises(BusyError, match="step 2: refused"):
        deliver(Kernel(n1=code), step(1), step(2))


@pytest.mark.parametrize("failing", range(6))
def test_a_change_that_was_cut_short_can_be_sent_again(failing: int) -> None:
    """From the first: what has been done by then is there already, or gone."""
    old, new = Server("rr", targets=(ONE,)), Server("wlc", targets=(TWO,))
    changes = [(TCP, old, new), (UDP, None, new)]
    whole = Kernel()
    servers(whole).write(changes)
    broken = Kernel(**{f"n{failing}": errno.ENOMEM})
    door = servers(broken)
    if failing < len(whole.seen):
        with pytest.raises(BusyError):
            door.write(changes)
    broken.seen.clear()
    broken.refusals.clear()
    door.write(changes)
    assert sorted(map(repr, broken.seen)) == sorted(map(repr, whole.seen))


def test_many_go_in_batches() -> None:
    assert deliver(Kernel(), *(step(number) for number in range(20, 270))) == list(range(20, 270))


# -- virtual servers -----------------------------------------------------------------------


def write(key: ServerKey, old: Server | None, new: Server) -> list[Command]:
    kernel = Kernel()
    servers(kernel).write([(key, old, new)])
    return kernel.commands


def test_a_new_server_comes_with_its_endpoints() -> None:
    wanted = [Command.NEW_SERVICE, Command.NEW_DEST, Command.NEW_DEST]
    assert write(TCP, None, Server("rr", targets=(ONE, TWO))) == wanted


def test_only_what_differs_is_sent() -> None:
    old = Server("rr", targets=(ONE,))
    assert write(TCP, old, Server("rr", targets=(ONE,), held=False)) == []
    assert write(TCP, old, Server("wlc", targets=(ONE,))) == [Command.SET_SERVICE]
    assert write(TCP, old, Server("rr", targets=(ONE, TWO))) == [Command.NEW_DEST]


@pytest.mark.parametrize(("key", "command"), [(TCP, Command.SET_DEST), (UDP, Command.DEL_DEST)])
def test_an_endpoint_drains_but_not_for_udp(key: ServerKey, command: Command) -> None:
    both = Server("rr", targets=(ONE, TWO))
    assert write(key, both, Server("rr", targets=(ONE,))) == [command]


def test_one_that_returns_while_it_drains_gets_its_weight_back() -> None:
    both, one = Server("rr", targets=(ONE, TWO)), Server("rr", targets=(ONE,))
    kernel = Kernel(n3=errno.ENOENT)
    door = servers(kernel)
    door.write([(TCP, both, one)])
    door.write([(TCP, one, both)])
    assert kernel.commands == [Command.SET_DEST] * 2
    door.write([(TCP, both, one)])
    door.write([(TCP, one, both)])  # somebody else deleted it
    assert kernel.commands[3:] == [Command.SET_DEST, Command.NEW_DEST]
    door.write([(UDP, both, one)])
    door.write([(UDP, one, both)])
    assert kernel.commands[5:] == [Command.DEL_DEST, Command.NEW_DEST]


def test_only_what_is_drained_and_ours_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "TCP  0A600001:0050 rr",
        "  -> 0AF40001:1F90 Masq 0 0 0",
        "  -> 0AF40002:1F90 Masq 0 1 0",
        "  -> 0AF40003:1F90 Masq 1 0 0",
        "TCP  C0000201:0050 rr",
        "  -> 0AF40009:1F90 Masq 0 0 0",
    ]
    kernel = Kernel()
    door = servers(kernel, "\n".join(["", "", "", *lines]))
    monkeypatch.setattr("steersman.modes.ipvs.apply.list_services", lambda *_: iter(()))
    door.read()
    door.end_drained([TCP])
    assert kernel.commands == [Command.DEL_DEST]
    door.end_drained([TCP])
    assert len(kernel.seen) == 1


# -- the mode ------------------------------------------------------------------------------


class Device:
    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.threads: set[int] = set()

    def make(self) -> None:
        self.log.append(("make", ""))

    def remove(self) -> None:
        self.log.append(("remove", ""))

    def add(self, addresses: list[str]) -> None:
        self.threads.add(threading.get_ident())
        self.log += [("add", address) for address in addresses]

    def drop(self, addresses: list[str]) -> None:
        self.log += [("drop", address) for address in addresses]


class Ipset:
    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.lines: list[str] = []

    async def run(self, argv: Sequence[str], stdin: bytes = b"", **_more: object) -> Result:
        self.lines += stdin.decode().splitlines()
        return Result(self.status, b"", b"no such set\n")


class Node:
    """A kernel whose interface and ipset write down what they are told."""

    def __init__(self) -> None:
        self.device, self.ipset = Device(), Ipset()
        doors = Doors(servers(Kernel()), self.device, Sets(self.ipset), None)  # type: ignore[arg-type]
        self.kernel = Whole(doors, (Family.IPV4,))

    async def carry_out(self, change: Diff) -> tuple[list[Any], list[str]]:
        """What they are told."""
        self.device.log, self.ipset.lines = [], []
        await self.kernel.write(change)
        return self.device.log, self.ipset.lines


SERVER = Server("rr", targets=(ONE,))
NODE_PORT = ServerKey(Protocol.TCP, "192.0.2.1", 30080)


async def marked() -> Node:
    node = Node()
    await node.carry_out(diff({}, {SetKey("KUBE-IPVS-ADDRESSES"): "hash:ip family inet"}))
    return node


async def test_an_address_is_held_while_any_server_needs_it() -> None:
    node = await marked()
    first = diff({}, {TCP: SERVER, NODE_PORT: Server("rr", held=False)})
    assert await node.carry_out(first) == (
        [("add", "10.96.0.1")],
        ["add KUBE-IPVS-ADDRESSES 10.96.0.1"],
    )
    assert await node.carry_out(diff({}, {UDP: SERVER})) == ([], [])
    assert await node.carry_out(diff({TCP: SERVER}, {})) == ([], [])
    assert await node.carry_out(diff({UDP: SERVER}, {})) == (
        [("drop", "10.96.0.1")],
        ["del KUBE-IPVS-ADDRESSES 10.96.0.1"],
    )


async def test_an_address_that_was_lost_is_put_back() -> None:
    node = Node()
    lost = Server("rr", held=False, targets=(ONE,))
    log, _ = await node.carry_out(diff({TCP: lost}, {TCP: SERVER}))
    assert log == [("add", "10.96.0.1")]


async def test_a_server_in_an_excluded_range_stays_ours_until_it_is_deleted() -> None:
    """Where deleting fails it is tried again, and so after `read`."""
    node = Node()
    node.kernel._excluded = ("10.96.0.0/24",)
    await node.carry_out(diff({}, {TCP: SERVER}))
    assert node.kernel.is_ours(TCP)
    node.kernel.servers = servers(Kernel(n0=errno.ENOMEM))
    with pytest.raises(BusyError):
        await node.carry_out(diff({TCP: SERVER}, {}))
    assert node.kernel.is_ours(TCP)
    await node.carry_out(diff({TCP: SERVER}, {}))
    assert not node.kernel.is_ours(TCP)


@pytest.mark.parametrize(("count", "on_the_loop"), [(10, True), (1000, False)])
async def test_many_addresses_do_not_hold_the_loop(count: int, on_the_loop: bool) -> None:
    node = await marked()
    addresses = [f"10.96.{number >> 8}.{number & 255}" for number in range(count)]
    made = {ServerKey(Protocol.TCP, address, 80): SERVER for address in addresses}
    log, _ = await node.carry_out(diff({}, made))
    assert len(log) == count
    assert (node.device.threads == {threading.get_ident()}) is on_the_loop


async def test_sets_come_first_and_go_last() -> None:
    node = Node()
    objects = {SetKey("S"): "hash:ip", MemberKey("S", "10.0.0.1"): "", DeviceKey(DEVICE): "dummy"}
    log, lines = await node.carry_out(diff({}, objects))
    assert (log, lines) == ([("make", "")], ["create S hash:ip maxelem 1048576", "add S 10.0.0.1"])
    log, lines = await node.carry_out(diff(objects, {}))
    assert (log, lines) == ([("remove", "")], ["destroy S"])


async def test_where_there_is_no_set_no_entry_of_it_goes() -> None:
    log, lines = await Node().carry_out(diff({TCP: SERVER}, {}))
    assert (log, lines) == ([("drop", "10.96.0.1")], [])


def test_what_carries_connections_is_kept_without_taking_new_ones() -> None:
    marks = SetKey("KUBE-IPVS-ADDRESSES")
    have = {
        TCP: Server("wrr", targets=(ONE, TWO), weights=(1, 2)),
        DeviceKey(DEVICE): "dummy",
        marks: "hash:ip family inet",
        SetKey("KUBE-IPVS-PORTS"): "hash:ip,port family inet",
        MemberKey("KUBE-IPVS-PORTS", "10.96.0.1,6:80"): "",
        (4, "nat", "KUBE-IPVS-SERVICES", ""): "-A KUBE-IPVS-SERVICES -j RETURN",
    }
    kept = IpvsMode(Ipset()).without_new_connections(have)
    assert kept == {
        TCP: Server("wrr"),
        DeviceKey(DEVICE): "dummy",
        marks: "hash:ip family inet",
    }


async def test_an_entry_that_goes() -> None:
    _, lines = await Node().carry_out(Diff(removed={MemberKey("S", "10.0.0.1"): ""}))
    assert lines == ["del S 10.0.0.1"]


async def test_ipset_that_refuses() -> None:
    with pytest.raises(ApplyError, match="no such set"):
        await Sets(Ipset(1)).restore(["add S 10.0.0.1"])
    with pytest.raises(BusyError, match="no such set"):
        await Sets(Ipset(1)).read()


def test_a_family_that_iptables_lacks_is_not_rendered() -> None:
    mode = IpvsMode(Ipset())
    mode._families = (Family.IPV4,)
    assert {key[0] for key in mode.render_node(SETTINGS) if type(key) is tuple} == {4}


def test_a_scheduler_that_is_missing_is_named() -> None:
    kernel = Kernel(n0=errno.ENOENT)
    with pytest.raises(ApplyError, match=r"10\.96\.0\.1 port 80 with the scheduler dice: "):
        servers(kernel).write([(TCP, None, Server("dice"))])
