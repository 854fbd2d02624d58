"""Events of nftrace and lines of TRACE, as the kernel sends them."""

from __future__ import annotations

import struct

import pytest

from steersman.host.nlmsg import Message, attr, be32, nested, text
from steersman.netfilter import nflog
from steersman.netfilter.trace.events import (
    TRACE_MESSAGE,
    Headers,
    parse_headers,
    parse_legacy,
    parse_nftrace,
)

IPV4 = bytes.fromhex("4500003ca3344000400699857f0000017f000001")
TCP_SYN = bytes.fromhex("b8de0062e236330e00000000a002ffd7fe300000")
IPV6 = struct.pack("!IHBB", 6 << 28, 20, 17, 64) + bytes(15) + b"\1" + bytes(15) + b"\2"
SYN = Headers("127.0.0.1", 47326, "127.0.0.1", 98, 6, "SYN")


def nftrace(kind: int, *parts: bytes, family: int = 2, message: int = TRACE_MESSAGE) -> Message:
    values = text(1, "nat"), text(2, "OUTPUT"), be32(4, kind), be32(6, 77)
    return Message(message, 0, 0, bytes((family, 0, 0, 0)) + b"".join((*values, *parts)))


def verdict(code: int, chain: str = "") -> bytes:
    return nested(5, attr(1, struct.pack("!i", code)), text(2, chain) if chain else b"")


def log(prefix: str, hook: int, payload: bytes, family: int = 2) -> Message:
    header = attr(1, struct.pack("!HBx", 0x800, hook))
    body = header + attr(9, payload) + text(10, prefix)
    return Message(nflog.PACKET, 0, 0, bytes((family, 0, 0, 0)) + body)


@pytest.mark.parametrize(
    ("code", "chain", "expected"),
    [
        (1, "", "accept"),
        (0, "", "drop"),
        (0 | 13 << 16, "", "drop"),  # NF_DROP_ERR
        (-1, "", "continue"),
        (-3, "services", "jump services"),
        (-4, "services", "goto services"),
        (-5, "", "return"),
        (3 | 7 << 16, "", "queue"),
        (99, "", "drop"),
    ],
)
def test_a_rule_has_a_handle_and_a_verdict(code: int, chain: str, expected: str) -> None:
    handle = attr(3, (23).to_bytes(8, "big"))
    event = parse_nftrace(nftrace(3, handle, verdict(code, chain)))
    assert event is not None
    assert (event.family, event.table, event.chain) == ("ip", "nat", "OUTPUT")
    assert (event.kind, event.number, event.verdict, event.packet) == ("rule", 23, expected, 77)
    assert event.headers is None


def test_the_first_event_of_a_hook_has_the_headers() -> None:
    event = parse_nftrace(nftrace(3, attr(8, IPV4), attr(9, TCP_SYN), verdict(1)))
    assert event is not None
    assert event.headers == SYN


def test_a_policy_is_a_verdict() -> None:
    event = parse_nftrace(nftrace(1, be32(16, 0), family=1))
    assert event is not None
    assert (event.family, event.kind, event.verdict) == ("inet", "policy", "drop")


@pytest.mark.parametrize(
    "message", [nftrace(9), nftrace(3, message=10 << 8 | 16), Message(TRACE_MESSAGE, 0, 0, b"")]
)
def test_other_messages_are_no_events(message: Message) -> None:
    assert parse_nftrace(message) is None


def test_families_without_a_name_have_a_number() -> None:
    event = parse_nftrace(nftrace(2, verdict(-5), family=42))
    assert event is not None
    assert (event.family, event.kind) == ("42", "return")


@pytest.mark.parametrize(("kind", "number"), [("rule", 3), ("return", 0), ("policy", 0)])
def test_lines_of_legacy_name_the_place_of_the_rule(kind: str, number: int) -> None:
    event = parse_legacy(log(f"TRACE: nat:KUBE-SERVICES:{kind}:3 ", 3, IPV4 + TCP_SYN))
    assert event is not None
    assert (event.backend, event.family, event.hook) == ("legacy", "ip", "output")
    assert (event.table, event.chain) == ("nat", "KUBE-SERVICES")
    assert (event.kind, event.number, event.verdict) == (kind, number, "")
    assert event.headers == SYN


def test_lines_of_legacy_for_ipv6() -> None:
    event = parse_legacy(log("TRACE: filter:INPUT:policy:1 ", 1, IPV6 + b"\0\1\0\2", family=10))
    assert event is not None
    assert (event.family, event.hook, event.headers) == (
        "ip6",
        "input",
        Headers("::1", 1, "::2", 2, 17),
    )


def test_a_line_without_a_packet_has_no_headers() -> None:
    event = parse_legacy(log("TRACE: filter:INPUT:policy:1 ", 9, b"", family=77))
    assert event is not None
    assert (event.family, event.hook, event.headers) == ("", "", None)


def test_other_logged_packets_are_no_events() -> None:
    assert parse_legacy(log("firewall: ", 1, IPV4)) is None
    trace = log("TRACE: filter:INPUT:policy:1 ", 1, IPV4)
    assert parse_legacy(trace._replace(kind=nflog.PACKET + 1)) is None


@pytest.mark.parametrize(
    ("flags", "name"), [(0x12, "SYN-ACK"), (0x14, "RST"), (0x02, "SYN"), (0x10, "")]
)
def test_tcp_packets_are_named_by_their_flags(flags: int, name: str) -> None:
    found = parse_headers(IPV4, TCP_SYN[:13] + bytes((flags,)))
    assert found is not None
    assert found.what == name


def test_truncated_packets() -> None:
    assert parse_headers(b"", b"") is None
    assert parse_headers(IPV4, b"") == Headers("127.0.0.1", 0, "127.0.0.1", 0, 6)
    assert parse_headers(IPV4, b"\0\1\0\2") == Headers("127.0.0.1", 1, "127.0.0.1", 2, 6)


def test_icmp_has_no_ports() -> None:
    icmp = IPV4[:9] + b"\x01" + IPV4[10:]
    assert parse_headers(icmp, b"\x03\x03\0\0") == Headers(
        "127.0.0.1", 0, "127.0.0.1", 0, 1, "ICMP type 3 code 3"
    )
    assert parse_headers(icmp, b"") == Headers("127.0.0.1", 0, "127.0.0.1", 0, 1)
