from __future__ import annotations

import socket
import struct
import sys
from functools import partial
from ipaddress import ip_address

import pytest

from steersman.host.nlmsg import Message, Request, attr, attributes, message, messages, text, u32
from steersman.host.rtnetlink import (
    RTM_NEWLINK,
    Address,
    Interface,
    VethEnd,
    bring_up,
    delete_address,
    delete_link,
    get_link,
    get_route,
    is_bridge_port,
    is_local_route,
    new_address,
    new_link,
    new_neighbour,
    new_route,
    new_veth,
    parse_address,
    parse_link,
    parse_route,
    parse_rule,
)


def received(request: Request) -> Message:
    """The request as the kernel sends the same message back."""
    (reply,) = messages(message(request.kind, request.flags, 1, request.payload))
    return reply


@pytest.mark.parametrize(
    ("ip", "family", "length"),
    [("192.0.2.1", socket.AF_INET, 32), ("2001:db8::1", socket.AF_INET6, 128)],
)
def test_an_added_address_is_the_one_read_back(ip: str, family: int, length: int) -> None:
    expected = Address(7, family, socket.inet_pton(family, ip), length, 0, 0)
    assert parse_address(received(new_address(7, ip))) == expected
    assert parse_address(received(delete_address(7, ip))) == expected


def test_only_ipv6_addresses_are_deprecated() -> None:
    cache_info = {
        ip: attributes(new_address(1, ip).payload, 8).get(6) for ip in ("::2", "10.1.1.1")
    }
    assert cache_info == {"::2": bytes(4) + b"\xff" * 4 + bytes(8), "10.1.1.1": None}


def test_the_local_address_of_a_point_to_point_link_is_preferred() -> None:
    head = bytes((socket.AF_INET, 32, 0, 0)) + (3).to_bytes(4, "little")
    peer, local = attr(1, b"\x0a\0\0\x09"), attr(2, b"\x0a\0\0\x01")
    assert parse_address(Message(20, 0, 0, head + peer)).packed == b"\x0a\0\0\x09"
    assert parse_address(Message(20, 0, 0, head + peer + local)).packed == b"\x0a\0\0\x01"


@pytest.mark.parametrize(
    ("ip", "expected"),
    [("fe80::1", True), ("febf::1", True), ("fec0::1", False), ("254.128.0.1", False)],
)
def test_link_local_is_ipv6_only(ip: str, expected: bool) -> None:
    assert parse_address(received(new_address(1, ip))).is_link_local is expected


def test_a_link_has_its_name_type_and_master() -> None:
    head = bytes((0, 0, 1, 0)) + (9).to_bytes(4, "little") + bytes(8)
    found = Message(RTM_NEWLINK, 0, 0, head + text(3, "veth9") + u32(10, 4))
    assert parse_link(found) == Interface(9, "veth9", 1, 4)
    assert not is_bridge_port(found)
    assert is_bridge_port(found._replace(payload=bytes((socket.AF_BRIDGE,)) + head[1:]))
    assert parse_link(found._replace(payload=head)) == Interface(9, "", 1, 0)


@pytest.mark.parametrize(
    ("kind", "elsewhere", "expected"),
    [("veth", True, True), ("veth", False, False), ("macvlan", True, False)],
)
def test_the_other_end_of_a_veth_may_be_in_another_namespace(
    kind: str, elsewhere: bool, expected: bool
) -> None:
    head = bytes((0, 0, 1, 0)) + (9).to_bytes(4, "little") + bytes(8)
    payload = head + attr(18, text(1, kind)) + (u32(37, 0) if elsewhere else b"")
    assert parse_link(Message(RTM_NEWLINK, 0, 0, payload)).peer_elsewhere is expected


@pytest.mark.parametrize("make", [get_link, partial(new_link, kind="dummy"), delete_link])
def test_links_are_named_in_requests(make: object) -> None:
    assert callable(make)
    assert parse_link(received(make("kube-ipvs0"))).name == "kube-ipvs0"


def test_routes_to_this_machine_are_local() -> None:
    request = get_route(bytes((192, 0, 2, 1)))
    assert request.payload[:8] == bytes((socket.AF_INET, 32)) + bytes(6)
    assert get_route(bytes(16)).payload[:2] == bytes((socket.AF_INET6, 128))
    reply = received(request)
    assert not is_local_route(reply)
    assert is_local_route(reply._replace(payload=bytes(7) + b"\x02" + bytes(4)))


def test_a_new_veth_has_both_ends() -> None:
    request = new_veth(VethEnd("near", b"\x02" * 6), VethEnd("far", b"\x06" * 6, 9))
    assert parse_link(received(request)).name == "near"
    info = attributes(attributes(request.payload, 16)[18])
    assert info[1] == b"veth\0"
    far = attributes(attributes(info[2])[1], 16)
    assert far == {3: b"far\0", 1: b"\x06" * 6, 28: (9).to_bytes(4, sys.byteorder)}
    assert parse_link(received(bring_up(5))).number == 5


@pytest.mark.parametrize("address", ["10.1.1.1", "fd00::1"])
def test_routes_lead_to_an_address_or_to_a_gateway(address: str) -> None:
    direct = received(new_route(7, address))
    assert (parse_route(direct).device, parse_route(direct).gateway) == (7, "")
    default = received(new_route(7, gateway=address))
    assert (parse_route(default).device, parse_route(default).gateway) == (7, address)
    assert default.payload[1] == 0
    neighbour = attributes(new_neighbour(7, address, b"\x02" * 6).payload, 12)
    assert neighbour == {1: ip_address(address).packed, 2: b"\x02" * 6}


def test_the_route_of_a_packet_with_source_device_and_mark() -> None:
    packed, source = bytes((192, 0, 2, 1)), bytes((192, 0, 2, 9))
    values = attributes(get_route(packed, source=source, device=7, mark=0x4000).payload, 12)
    assert values[2] == source
    assert [int.from_bytes(values[kind], sys.byteorder) for kind in (3, 16)] == [7, 0x4000]


@pytest.mark.parametrize(
    ("head", "values", "text", "table"),
    [
        ((2, 0, 0, 0, 254, 1, 0), (u32(6, 32766),), "32766: from all lookup main", 254),
        (
            (2, 0, 32, 0, 0, 1, 0),
            (u32(6, 100), attr(2, bytes((10, 0, 0, 9))), u32(15, 778)),
            "100: from 10.0.0.9/32 lookup 778",
            778,
        ),
        (
            (2, 24, 0, 0, 9, 1, 2),
            (attr(1, bytes((10, 1, 0, 0))), u32(10, 0x77), u32(16, 0xFF), text(3, "eth0")),
            "0: not from all to 10.1.0.0/24 fwmark 0x77/0xff iif eth0 lookup 9",
            9,
        ),
        (
            (10, 0, 0, 0, 0, 6, 0),
            (u32(10, 1), u32(16, 0xFFFFFFFF), text(17, "eth1")),
            "0: from all fwmark 0x1 oif eth1 blackhole",
            0,
        ),
    ],
)
def test_policy_rules(
    head: tuple[int, ...], values: tuple[bytes, ...], text: str, table: int
) -> None:
    payload = struct.pack("=BBBBBxxBI", *head) + b"".join(values)
    found = parse_rule(received(Request(32, payload)))
    assert (found.text, found.table) == (text, table)
