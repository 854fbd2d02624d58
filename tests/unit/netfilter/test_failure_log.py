"""Packets that nfnetlink_log delivers, and the failures that they show."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.failover.watch import Failure
from steersman.host.nlmsg import attr, message, messages, text
from steersman.model.failover import Backend, Observation
from steersman.model.names import Protocol
from steersman.netfilter.failure_log import chains, failures, parse_packet

CLIENT4, END4 = bytes((10, 0, 9, 9)), bytes((10, 0, 0, 1))
CLIENT6, END6 = bytes(15) + b"\x09", bytes(15) + b"\x01"
TCP = Backend("10.0.0.1", 8080, Protocol.TCP)
TCP6 = Backend("::1", 8080, Protocol.TCP)


def ipv4(source: bytes, destination: bytes, protocol: int, body: bytes) -> bytes:
    return struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 0, 0, 64, protocol, 0) + (
        source + destination + body
    )


def ipv6(source: bytes, destination: bytes, protocol: int, body: bytes) -> bytes:
    return struct.pack("!IHBB", 6 << 28, len(body), protocol, 64) + source + destination + body


def ports(source: int, destination: int) -> bytes:
    return struct.pack("!HH", source, destination) + bytes(4)


TO_END4 = ipv4(CLIENT4, END4, 6, ports(40000, 8080))
TO_END6 = ipv6(CLIENT6, END6, 6, ports(40000, 8080))


@pytest.mark.parametrize(
    ("prefix", "packet", "failure"),
    [
        ("syn", TO_END4, Failure(TCP, Observation.SILENT, "10.0.9.9")),
        ("syn", TO_END6, Failure(TCP6, Observation.SILENT, "::9")),
        (
            "rst",
            ipv4(END4, CLIENT4, 6, ports(8080, 40000)),
            Failure(TCP, Observation.REFUSED, "10.0.9.9"),
        ),
        (
            "icmp",
            ipv4(END4, CLIENT4, 1, bytes((3, 3)) + bytes(6) + TO_END4),
            Failure(TCP, Observation.REFUSED, "10.0.9.9"),
        ),
        (
            "icmp",
            ipv4(END4, CLIENT4, 1, bytes((3, 1)) + bytes(6) + TO_END4),
            Failure(TCP, Observation.UNREACHABLE, "10.0.9.9"),
        ),
        (
            "icmp",
            ipv6(END6, CLIENT6, 58, bytes((1, 4)) + bytes(6) + TO_END6),
            Failure(TCP6, Observation.REFUSED, "::9"),
        ),
        (
            "icmp",
            ipv6(END6, CLIENT6, 58, bytes((1, 3)) + bytes(6) + TO_END6),
            Failure(TCP6, Observation.UNREACHABLE, "::9"),
        ),
        ("icmp", ipv4(END4, CLIENT4, 1, bytes((3, 3)) + bytes(6) + TO_END4[:21]), None),
        ("icmp", ipv4(END4, CLIENT4, 1, bytes((3, 4)) + bytes(6) + TO_END4), None),
        ("syn", TO_END4[:22], None),
        ("syn", b"", None),
        ("syn", b"\x75" + bytes(60), None),
        ("syn", ipv4(CLIENT4, END4, 47, ports(1, 2)), None),
    ],
)
def test_a_packet_shows_a_failure(prefix: str, packet: bytes, failure: Failure | None) -> None:
    assert parse_packet(prefix, packet) == failure


@given(st.sampled_from(["syn", "rst", "icmp"]), st.binary(max_size=128))
def test_no_packet_is_too_strange(prefix: str, packet: bytes) -> None:
    failure = parse_packet(prefix, packet)
    assert failure is None or 0 <= failure.backend.port <= 65535


def test_a_datagram_holds_several_packets_and_other_messages() -> None:
    head = bytes((2, 0, 0, 0))
    body = head + text(10, "syn") + attr(9, TO_END4)
    data = message(4 << 8, 0, 0, body) + message(2, 0, 0, bytes(4)) + message(4 << 8, 0, 0, head)
    assert list(failures(messages(data))) == [Failure(TCP, Observation.SILENT, "10.0.9.9")]


def test_ipvs_has_no_dnat_bit() -> None:
    with_bit, without = (chains(1, translated)[0].rules[0] for translated in (True, False))
    assert with_bit != without
    assert len(with_bit) == len(without)
