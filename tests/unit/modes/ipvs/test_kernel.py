"""Which addresses and sets a Diff adds and removes, in which order. The backends are fake."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from steersman.model.errors import BusyError
from steersman.model.names import Family, Protocol
from steersman.model.ruleset import Diff, diff
from steersman.modes.ipvs.backends import Ipsets
from steersman.modes.ipvs.kernel import IpvsKernel
from steersman.modes.ipvs.mode import IpvsMode
from steersman.modes.ipvs.objects import DEVICE, DeviceKey, MemberKey, Server, ServerKey, SetKey
from tests.support.builders.plans import SETTINGS
from tests.support.modes.ipvs_fakes import FakeIpset, FakeNetlink, FakeServers

TCP = ServerKey(Protocol.TCP, "10.96.0.1", 80)
UDP = ServerKey(Protocol.UDP, "10.96.0.1", 53)
ONE, TWO = ("10.244.0.1", 8080), ("10.244.0.2", 8080)


class Device:
    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []

    def make(self) -> None:
        self.log.append(("make", ""))

    def remove(self) -> None:
        self.log.append(("remove", ""))

    def add(self, addresses: list[str]) -> None:
        self.log += [("add", address) for address in addresses]

    def drop(self, addresses: list[str]) -> None:
        self.log += [("drop", address) for address in addresses]


class Node:
    """A kernel whose interface and ipset record their commands."""

    def __init__(self) -> None:
        self.device, self.ipset = Device(), FakeIpset()
        parts: Any = {"device": self.device, "iptables": None, "netfilter": None}
        self.kernel = IpvsKernel(
            servers=FakeServers(FakeNetlink()),
            sets=Ipsets(self.ipset.run_tool),
            families=(Family.IPV4,),
            **parts,
        )

    def carry_out(self, change: Diff) -> tuple[list[Any], list[str]]:
        """Their commands."""
        self.device.log, self.ipset.lines = [], []
        self.kernel.write(change)
        return self.device.log, self.ipset.lines


SERVER = Server("rr", targets=(ONE,))
NODE_PORT = ServerKey(Protocol.TCP, "192.0.2.1", 30080)


def marked() -> Node:
    node = Node()
    node.carry_out(diff({}, {SetKey("KUBE-IPVS-ADDRESSES"): "hash:ip family inet"}))
    return node


def test_an_address_is_held_while_any_server_needs_it() -> None:
    node = marked()
    first = diff({}, {TCP: SERVER, NODE_PORT: Server("rr", assigned=False)})
    assert node.carry_out(first) == (
        [("add", "10.96.0.1")],
        ["add KUBE-IPVS-ADDRESSES 10.96.0.1"],
    )
    assert node.carry_out(diff({}, {UDP: SERVER})) == ([], [])
    assert node.carry_out(diff({TCP: SERVER}, {})) == ([], [])
    assert node.carry_out(diff({UDP: SERVER}, {})) == (
        [("drop", "10.96.0.1")],
        ["del KUBE-IPVS-ADDRESSES 10.96.0.1"],
    )


def test_an_address_that_was_lost_is_put_back() -> None:
    node = Node()
    lost = Server("rr", assigned=False, targets=(ONE,))
    log, _ = node.carry_out(diff({TCP: lost}, {TCP: SERVER}))
    assert log == [("add", "10.96.0.1")]


def test_a_server_in_an_excluded_range_stays_ours_until_it_is_deleted() -> None:
    """Where deleting fails it is tried again, and so after `read`."""
    node = Node()
    node.kernel._excluded = ("10.96.0.0/24",)
    node.carry_out(diff({}, {TCP: SERVER}))
    assert node.kernel.is_ours(TCP)
    node.kernel.servers = FakeServers(FakeNetlink(n0=errno.ENOMEM))
    with pytest.raises(BusyError):
        node.carry_out(diff({TCP: SERVER}, {}))
    assert node.kernel.is_ours(TCP)
    node.carry_out(diff({TCP: SERVER}, {}))
    assert not node.kernel.is_ours(TCP)


def test_sets_come_first_and_go_last() -> None:
    node = Node()
    objects = {SetKey("S"): "hash:ip", MemberKey("S", "10.0.0.1"): "", DeviceKey(DEVICE): "dummy"}
    log, lines = node.carry_out(diff({}, objects))
    assert (log, lines) == ([("make", "")], ["create S hash:ip maxelem 1048576", "add S 10.0.0.1"])
    log, lines = node.carry_out(diff(objects, {}))
    assert (log, lines) == ([("remove", "")], ["destroy S"])


def test_where_there_is_no_set_no_entry_of_it_goes() -> None:
    log, lines = Node().carry_out(diff({TCP: SERVER}, {}))
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
    kept = IpvsMode(FakeIpset()).carrier.without_new_connections(have)
    assert kept == {
        TCP: Server("wrr"),
        DeviceKey(DEVICE): "dummy",
        marks: "hash:ip family inet",
    }


def test_an_entry_that_goes() -> None:
    _, lines = Node().carry_out(Diff(removed={MemberKey("S", "10.0.0.1"): ""}))
    assert lines == ["del S 10.0.0.1"]


TABLE = """IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
TCP  0A600001:0050 rr
  -> 0AF40001:1F90      Masq    1      3          4
  -> 0AF40002:1F90      Masq    0      2          0
"""


def test_established_connections_are_counted() -> None:
    node = Node()
    node.kernel.servers = FakeServers(FakeNetlink(), TABLE)
    mode = IpvsMode(FakeIpset())
    mode._kernel = node.kernel
    assert mode.carrier.connections() == 5


def test_a_family_that_iptables_lacks_is_not_rendered() -> None:
    mode = IpvsMode(FakeIpset())
    mode._families = (Family.IPV4,)
    assert {key[0] for key in mode.render_node(SETTINGS) if type(key) is tuple} == {4}
