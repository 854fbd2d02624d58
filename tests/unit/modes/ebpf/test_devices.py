"""Devices of the node: their values in the map, and what notifications change."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.host import nlmsg
from steersman.host.nlmsg import Message
from steersman.host.rtnetlink import Interface
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.devices import Inventory, describe

ETHER, TUNNEL = 1, 65534
NEWLINK, DELLINK = 16, 17
DEVICES = (
    Interface(2, "eth0", ETHER, 0),
    Interface(3, "cni0", ETHER, 0),
    Interface(4, "veth1", ETHER, 3),
    Interface(5, "wg0", TUNNEL, 0),
)


def packed(*addresses: str) -> tuple[bytes, ...]:
    return tuple(map(layout.pack_address, addresses))


FOUND = Inventory(DEVICES, {2: packed("192.0.2.1", "192.0.2.2"), 3: packed("10.0.0.1", "fd00::1")})


def flags(interface: str, prefix: str) -> dict[int, int]:
    found = describe(FOUND, interface, prefix)
    return {index: layout.DEVICE.unpack(value)[2] for index, value in found.items()}


def test_masquerading_takes_an_address_of_the_device_or_the_first_there_is() -> None:
    found = {i: layout.DEVICE.unpack(v)[:2] for i, v in describe(FOUND, "", "").items()}
    assert found == {
        2: packed("192.0.2.1", "fd00::1"),
        3: packed("10.0.0.1", "fd00::1"),
        4: packed("192.0.2.1", "fd00::1"),
        5: packed("192.0.2.1", "fd00::1"),
    }


def test_a_veth_to_another_namespace_is_marked_for_the_fast_path() -> None:
    found = Inventory((DEVICES[0], DEVICES[2]._replace(peer_elsewhere=True)), {})
    values = describe(found, "", "").values()
    marked = [bool(layout.DEVICE.unpack(value)[2] & layout.DEVICE_PEER) for value in values]
    assert marked == [False, True]


def test_without_addresses_nothing_can_be_masqueraded() -> None:
    value = describe(Inventory(DEVICES[:1], {}), "", "")[2]
    assert layout.DEVICE.unpack(value)[:2] == (bytes(16), bytes(16))


@pytest.mark.parametrize(
    ("interface", "prefix", "pods"),
    [("", "", set()), ("cni0", "", {3, 4}), ("eth0", "", {2}), ("", "veth", {4})],
)
def test_pods_are_behind_the_detectors_devices(interface: str, prefix: str, pods: set[int]) -> None:
    found = flags(interface, prefix)
    assert {index for index, flag in found.items() if flag & layout.DEVICE_POD} == pods


def test_a_device_may_have_no_ethernet() -> None:
    bare = {index for index, flag in flags("", "").items() if flag & layout.DEVICE_NO_ETHERNET}
    assert bare == {5}


def link_news(device: Interface, kind: int = NEWLINK, family: int = socket.AF_UNSPEC) -> Message:
    """A notification of a device."""
    head = struct.pack("=BxHiII", family, device.kind, device.number, 0, 0)
    return Message(kind, 0, 0, head + nlmsg.text(3, device.name) + nlmsg.u32(10, device.master))


def address_news(index: int, scope: int) -> Message:
    """A notification of an address."""
    return Message(20, 0, 0, struct.pack("=BBBBI", socket.AF_INET6, 64, 0, scope, index))


def test_devices_come_go_and_are_renamed() -> None:
    new, renamed = Interface(9, "veth9", ETHER, 3), Interface(4, "pod4", ETHER, 0)
    found = FOUND.updated([link_news(new), link_news(renamed), link_news(DEVICES[3], DELLINK)])
    assert found
    assert set(found.devices) == {*DEVICES[:2], renamed, new}
    assert found.addresses == FOUND.addresses


def test_what_changes_nothing_leaves_the_list_as_it_is() -> None:
    loopback = Interface(1, "lo", 772, 0)
    port = link_news(DEVICES[2], DELLINK, socket.AF_BRIDGE)  # it has left its bridge
    news = [link_news(DEVICES[0]), link_news(loopback), port, address_news(4, scope=253)]
    assert FOUND.updated(news) == FOUND


@pytest.mark.parametrize("news", [address_news(2, scope=0), link_news(DEVICES[0], DELLINK)])
def test_global_addresses_are_listed_again(news: Message) -> None:
    assert FOUND.updated([news]) is None


@given(st.lists(st.tuples(st.sampled_from([NEWLINK, DELLINK]), st.integers(4, 7))))
def test_notifications_lead_to_what_there_is(changes: list[tuple[int, int]]) -> None:
    there = {device.number: device for device in DEVICES}
    news = []
    for serial, (kind, number) in enumerate(changes):
        device = Interface(number, f"veth{serial}", ETHER, 0)
        news.append(link_news(device, kind))
        if kind == NEWLINK:
            there[number] = device
        else:
            there.pop(number, None)
    found = FOUND.updated(news)
    assert found
    assert sorted(found.devices) == sorted(there.values())


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_one_device_is_described_as_with_all_others(number: int) -> None:
    every = describe(FOUND, "cni0", "", {5})
    assert describe(FOUND, "cni0", "", {5}, [number]) == {number: every[number]}
