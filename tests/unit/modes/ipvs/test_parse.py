"""What the kernel's tools print, taken apart."""

from __future__ import annotations

import struct

import pytest

from steersman.host.nlmsg import Message, attr, attributes, be16, nested, text, u32
from steersman.model.names import Protocol
from steersman.modes.ipvs.listings import (
    RealServer,
    digest_servers,
    has_drained,
    parse_connection,
    parse_rules,
    parse_servers,
    parse_sets,
)
from steersman.modes.ipvs.objects import MemberKey, Server, ServerKey, SetKey
from steersman.modes.ipvs.wire import (
    Command,
    ServerStats,
    destination,
    read_destination,
    read_service,
    read_stats,
    service,
    timeouts,
)

TABLE = """IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
TCP  0A600001:0050 rr persistent 10800 FFFFFFFF
  -> 0AF40002:1F90      Masq    1      3          4
  -> 0AF40001:1F90      Masq    0      0          0
UDP  [fd00:0000:0000:0000:0000:0000:0000:0001]:0035 wlc
  -> [fd00:0000:0000:0000:0000:0000:0000:0002]:0035 Masq 1 0 0
FWM  00000001 rr
  -> 0AF40009:1F90      Masq    1      0          0
SCTP 0A600002:0050 sh
"""
SETS = """create KUBE-IPVS-PORTS hash:ip,port family inet hashsize 1024 maxelem 65536
add KUBE-IPVS-PORTS 10.96.0.1,tcp:80
add KUBE-IPVS-ADDRESSES 10.96.0.1
create KUBE-6-IPVS-ALLOWED hash:ip,port,net family inet6 hashsize 1024 maxelem 65536
add KUBE-6-IPVS-ALLOWED fd00::1,sctp:80,fd00::/64
add KUBE-IPVS-PORTS 10.96.0.1,132:80
create KUBE-CLUSTER-IP hash:ip,port family inet
add KUBE-CLUSTER-IP 10.96.0.9,tcp:80
create KUBE-IPVS-PORTS
create KUBE-IPVS-IPS hash:ip family inet hashsize 1024 maxelem 65536
add KUBE-IPVS-IPS 10.96.0.9
flush KUBE-IPVS-PORTS now
"""


LIMITS = {("TCP", "ESTABLISHED"): 900}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData", None),
        (
            "TCP 0AF40102 B7E2 0A600001 0050 0AF40005 1F90 ESTABLISHED     893",
            ("10.244.0.5:8080", "10.244.1.2:47074", "10.96.0.1:80", "TCP", "open", 7.0),
        ),
        (
            "TCP 0AF40102 B7E2 0A600001 0050 0AF40005 1F90 TIME_WAIT        12",
            ("10.244.0.5:8080", "10.244.1.2:47074", "10.96.0.1:80", "TCP", "ended", None),
        ),
        ("TCP 0AF40102 0000 0A600001 0050 0AF40005 1F90 NONE          10000", None),
        (
            "UDP fd00:0000:0000:0000:0000:0000:0000:0009 B7E2 fd00:0000:0000:0000:0000:0000:0000:"
            "0001 0035 fd00:0000:0000:0000:0000:0000:0000:0002 0035 UDP           9",
            ("[fd00::2]:53", "[fd00::9]:47074", "[fd00::1]:53", "UDP", "open", None),
        ),
    ],
)
def test_connections(line: str, found: tuple[str | float | None, ...] | None) -> None:
    parsed = parse_connection(line, LIMITS)
    if found is None:
        assert parsed is None
    else:
        assert parsed is not None
        each = parsed.found
        fields = (each.endpoint, each.client, each.frontend, each.protocol, each.state, each.idle)
        assert fields == found
        assert parsed.destination[0] == Protocol(each.protocol).number


def test_servers() -> None:
    assert parse_servers(TABLE) == {
        ServerKey(Protocol.TCP, "10.96.0.1", 80): [
            RealServer(("10.244.0.2", 8080), 1, 3, 4),
            RealServer(("10.244.0.1", 8080), 0, 0, 0),
        ],
        ServerKey(Protocol.UDP, "fd00::1", 53): [RealServer(("fd00::2", 53), 1, 0, 0)],
        ServerKey(Protocol.SCTP, "10.96.0.2", 80): [],
    }


def test_sets() -> None:
    assert dict(parse_sets(SETS)) == {
        SetKey("KUBE-IPVS-PORTS"): "hash:ip,port family inet",
        MemberKey("KUBE-IPVS-PORTS", "10.96.0.1,6:80"): "",
        MemberKey("KUBE-IPVS-PORTS", "10.96.0.1,132:80"): "",
        MemberKey("KUBE-IPVS-ADDRESSES", "10.96.0.1"): "",
        SetKey("KUBE-6-IPVS-ALLOWED"): "hash:ip,port,net family inet6",
        MemberKey("KUBE-6-IPVS-ALLOWED", "fd00::1,132:80,fd00::/64"): "",
    }


def test_rules() -> None:
    save = """*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-IPVS-SERVICES - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -m comment --comment "kubernetes ipvs x" -j KUBE-IPVS-SERVICES
-A PREROUTING -j KUBE-SERVICES
-A OUTPUT -j KUBE-SERVICES
-A KUBE-SERVICES -j RETURN
-A KUBE-IPVS-SERVICES -m set --match-set A dst,dst -j RETURN
COMMIT
"""
    assert parse_rules(save, 4) == {
        (4, "nat", "KUBE-IPVS-SERVICES", ""): (
            "-A KUBE-IPVS-SERVICES -m set --match-set A dst,dst -j RETURN"
        ),
        (4, "nat", "PREROUTING", "jumps"): (
            '-A PREROUTING -m comment --comment "kubernetes ipvs x" -j KUBE-IPVS-SERVICES'
        ),
    }


KEYS = [ServerKey(Protocol.TCP, "10.96.0.1", 80), ServerKey(Protocol.SCTP, "fd00::1", 65535)]


@pytest.mark.parametrize("key", KEYS)
def test_what_is_asked_for_is_read_back(key: ServerKey) -> None:
    server = Server("wrr", 0x1, 600)
    request = service(99, Command.NEW_SERVICE, key, server)
    assert request.kind == 99
    assert request.payload[:4] == bytes((Command.NEW_SERVICE, 1, 0, 0))
    listed = read_service(Message(99, 0, 1, request.payload))
    assert listed is not None
    assert (listed.key, listed.scheduler, listed.flags, listed.timeout) == (key, "wrr", 0x1, 600)


def test_the_flag_that_the_kernel_adds_is_not_ours() -> None:
    request = service(99, Command.NEW_SERVICE, KEYS[0], Server("rr", 0x3))
    listed = read_service(Message(99, 0, 1, request.payload))
    assert listed is not None
    assert listed.flags == 0x1


def test_servers_by_fwmark_and_unknown_protocols_are_passed_over() -> None:
    marked = nested(1, attr(1, struct.pack("=H", 2)), u32(5, 1), text(6, "rr"))
    assert read_service(Message(99, 0, 1, bytes(4) + marked)) is None
    odd = nested(1, attr(1, b"\2\0"), attr(2, b"\x32\0"), attr(3, bytes(16)), be16(4, 1))
    assert read_service(Message(99, 0, 1, bytes(4) + odd)) is None


def test_a_real_server_is_masqueraded_to_and_a_deletion_names_it() -> None:
    for command, kinds in (
        (Command.SET_DEST, {1, 2, 3, 4, 5, 6, 11}),
        (Command.DEL_DEST, {1, 2, 11}),
    ):
        request = destination(99, command, KEYS[0], ("10.244.0.1", 8080), weight=0)
        values = attributes(attributes(request.payload, 4)[2])
        assert values.keys() == kinds
        assert values[1][:4] == bytes((10, 244, 0, 1))
        assert values[2] == (8080).to_bytes(2, "big")
        assert not any(values.get(kind, b"\0") != b"\0" * 4 for kind in (3, 4) if kind in values)


def test_an_endpoint_with_its_counters() -> None:
    stats = nested(12, *(attr(kind, struct.pack("=Q", kind)) for kind in range(1, 6)))
    values = nested(2, attr(1, bytes((10, 244, 0, 1)) + bytes(12)), be16(2, 8080), stats)
    found = read_destination(Message(99, 0, 1, bytes(4) + values), ipv6=False)
    assert found == (("10.244.0.1", 8080), ServerStats(1, 2, 3, 4, 5))
    values = nested(2, attr(1, bytes((0xFD, *bytes(14), 2))), be16(2, 53))
    found = read_destination(Message(99, 0, 1, bytes(4) + values), ipv6=True)
    assert found == (("fd00::2", 53), ServerStats(0, 0, 0, 0, 0))
    assert read_destination(Message(99, 0, 1, bytes(4)), ipv6=False) is None


def test_counters_of_either_width() -> None:
    wide = nested(12, *(attr(kind, struct.pack("=Q", kind << 40)) for kind in range(1, 6)))
    narrow = nested(10, *(u32(kind, kind) for kind in range(1, 6)))
    assert read_stats(attributes(wide + narrow)) == ServerStats(
        *(kind << 40 for kind in range(1, 6))
    )
    assert read_stats(attributes(narrow)) == ServerStats(1, 2, 3, 4, 5)
    assert read_stats({}) == ServerStats(0, 0, 0, 0, 0)


def test_timeouts() -> None:
    values = attributes(timeouts(99, 900, 0, 300).payload, 4)
    assert {kind: struct.unpack("=I", value)[0] for kind, value in values.items()} == {
        4: 900,
        5: 0,
        6: 300,
    }


# Fingerprints

LISTED = """IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
TCP  0A600001:0050 rr persistent 10800 FFFFFFFF
  -> 0AF40002:1F90      Masq    1      3          4
  -> 0AF40001:1F90      Masq    0      2          0
"""


def test_connections_are_no_change() -> None:
    busier = LISTED.replace("3          4", "30       400").replace("2          0", "1          7")
    assert digest_servers(busier) == digest_servers(LISTED)


@pytest.mark.parametrize(
    ("old", "new"), [("Masq    1", "Masq    2"), ("0AF40002", "0AF40003"), ("rr", "wrr")]
)
def test_servers_are(old: str, new: str) -> None:
    assert digest_servers(LISTED.replace(old, new)) != digest_servers(LISTED)


def test_what_is_drained_has_to_be_read_where_it_is_ours() -> None:
    drained = LISTED.replace("0      2          0", "0      0          0")
    assert has_drained(drained, lambda key: key.address == "10.96.0.1")
    assert not has_drained(drained, lambda key: key.address != "10.96.0.1")
    assert not has_drained(LISTED, lambda _key: True)
