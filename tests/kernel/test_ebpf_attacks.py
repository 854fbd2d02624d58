"""Malformed and forged frames: nothing that is not ours is dropped, changed or sent elsewhere."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.lab.ebpf import run_packet
from tests.support.lab.ebpf_node import MARKS
from tests.support.lab.ebpf_packets import (
    CLIENT,
    CLIENT6,
    LONELY,
    NEXT,
    NODE,
    NODE6,
    PLAIN,
    POD,
    POD6,
    REDIRECT,
    SHOT,
    VIP,
    VIP6,
    Programs,
)
from tests.support.lab.frames import (
    ACK,
    ETHERNET,
    SCTP,
    SYN,
    TCP,
    UDP,
    ip,
    packet,
    see,
    transport,
    with_checksum,
)
from tests.support.parts import examples

pytestmark = MARKS
XDP_PASS = 2
STRANGER, STRANGER6 = "203.0.113.200", "2001:db8:200::1"
EXAMPLES = settings(max_examples=examples(200), deadline=None)
OURS = (VIP, PLAIN, LONELY, VIP6, NODE, NODE6, POD, POD6, CLIENT, CLIENT6)
"""Addresses that Services, flows or answers of theirs have."""


@pytest.fixture(scope="module", params=[True, False], ids=["trusting", "looking"])
def programs(request: pytest.FixtureRequest) -> Iterator[Programs]:
    """With a connection of each kind that is known."""
    made = Programs(trusting=request.param)
    for client, vip, endpoint in ((CLIENT, VIP, POD), (CLIENT6, VIP6, POD6)):
        for protocol in (TCP, UDP, SCTP):
            seen = see(made.through(packet((client, 4000), (vip, 80), protocol)))[0]
            made.through(packet((endpoint, 8080), seen, protocol, SYN | ACK))
            made.through(packet((client, 4000), (vip, 80), protocol, ACK))
    yield made
    made.loaded.close()


def everywhere(programs: Programs, frame: bytes) -> list[tuple[str, int, bytes]]:
    """What each program answers, and the frame as it leaves it.

    Of frames without a whole IP header, test runs let only XDP have a look.
    """
    head = {b"\x08\x00": 34, b"\x86\xdd": 54}.get(frame[12:14], 15)
    names = ("sm_ingress", "sm_egress", "sm_xdp")[2 * (len(frame) < head) :]
    return [(name, *run_packet(programs.loaded.programs[name], frame)) for name in names]


def is_left_alone(programs: Programs, frame: bytes) -> bool:
    left = {"sm_ingress": NEXT, "sm_egress": NEXT, "sm_xdp": XDP_PASS}  # by program
    return all((left[n], frame) == (a, out) for n, a, out in everywhere(programs, frame))


ADDRESSES4 = st.integers(1, 2**32 - 2).map(lambda n: str(IPv4Address(n)))
ADDRESSES6 = st.integers(1, 2**128 - 2).map(lambda n: str(IPv6Address(n)))
STRANGERS4 = ADDRESSES4.filter(lambda a: a not in OURS and not a.startswith("127."))
STRANGERS6 = ADDRESSES6.filter(lambda a: a not in OURS and not a.startswith("::"))
PORTS = st.integers(0, 65535)
PROTOCOLS = st.sampled_from([TCP, UDP, SCTP, 1, 58, 0, 43, 44, 51, 59, 60, 255])
PAYLOADS = st.binary(max_size=120)


@st.composite
def between(draw: st.DrawFn, ours: bool) -> bytes:
    """A frame between two addresses, whose transport may be anything."""
    six = draw(st.booleans())
    some = [a for a in OURS if (":" in a) is six]
    addresses = st.sampled_from(some) if ours else (STRANGERS6 if six else STRANGERS4)
    source, destination = draw(addresses), draw(addresses)
    protocol = draw(PROTOCOLS)
    data = draw(PAYLOADS)
    if protocol in (TCP, UDP, SCTP) and draw(st.booleans()):
        ports = (draw(st.sampled_from([4000, 80, 8080])), draw(st.sampled_from([4000, 80, 8080])))
        data = transport(protocol, ports, draw(st.sampled_from([SYN, ACK, SYN | ACK, 4])), data)
    elif protocol in (0, 43, 44, 60) and six:
        data = draw(extensions()) + data
    if six:
        return ip(source, destination, protocol, data)
    options = draw(st.binary(max_size=40).map(lambda b: b[: len(b) // 4 * 4]))
    fragment = draw(st.sampled_from([0, 0, 0x2000, 0x2001, 1, 0x1FFF, 0x4000, 0x8000]))
    return ip(source, destination, protocol, data, fragment=fragment, options=options)


@st.composite
def extensions(draw: st.DrawFn) -> bytes:
    """Extension headers of IPv6, with any length they like to claim."""
    count = draw(st.integers(1, 6))
    kinds = [draw(st.sampled_from([0, 43, 44, 60, TCP, UDP, 59])) for _ in range(count)]
    out = b""
    for kind in kinds:
        length = draw(st.sampled_from([0, 0, 0, 1, 5, 255]))
        out += bytes((kind, length)) + draw(st.binary(min_size=6, max_size=6))
    return out


@st.composite
def broken(draw: st.DrawFn, frames: st.SearchStrategy[bytes]) -> bytes:
    """A frame that is cut short, or has other bytes behind the addresses' place."""
    frame = bytearray(draw(frames))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(14, len(frame) - 1))
        frame[place] = draw(st.integers(0, 255))
    return bytes(frame[: draw(st.integers(15, len(frame)))])


@EXAMPLES
@given(frame=between(ours=False))
def test_what_is_between_strangers_is_left_alone(programs: Programs, frame: bytes) -> None:
    assert is_left_alone(programs, frame)


@EXAMPLES
@given(
    data=st.binary(min_size=1, max_size=200),
    kind=st.sampled_from([0x0800, 0x86DD, 0x0806, 0x8100, 0]),
)
def test_noise_is_left_alone(programs: Programs, data: bytes, kind: int) -> None:
    """Of IP it would need the addresses of ours."""
    frame = ETHERNET + kind.to_bytes(2, "big") + data
    if not any(packed in frame for packed in PACKED) and b"\x7f" not in data:
        assert is_left_alone(programs, frame)


PACKED = [socket.inet_pton(socket.AF_INET6 if ":" in a else socket.AF_INET, a) for a in OURS]


@EXAMPLES
@given(frame=broken(between(ours=True)))
def test_whatever_is_for_us_gets_one_of_three_answers(programs: Programs, frame: bytes) -> None:
    """And only a refused packet changes its length: it becomes an error message."""
    for name, answer, out in everywhere(programs, frame):
        if name == "sm_xdp":
            assert answer != 0  # XDP_ABORTED: the program has failed
            assert len(out) == len(frame)
        else:
            assert answer in (NEXT, SHOT, REDIRECT)
            assert len(out) == len(frame) or answer == REDIRECT


ERRORS = [(CLIENT, VIP, POD, NODE, STRANGER, 1), (CLIENT6, VIP6, POD6, NODE6, STRANGER6, 58)]
HEADS = {1: b"\x03\x03\0\0\0\0\0\0", 58: b"\x01\x04\0\0\0\0\0\0"}


@pytest.mark.parametrize(("client", "vip", "pod", "node", "stranger", "icmp"), ERRORS)
def test_an_error_must_be_for_who_sent_what_it_quotes(
    programs: Programs, client: str, vip: str, pod: str, node: str, stranger: str, icmp: int
) -> None:
    """Otherwise anybody could have it sent to an endpoint, whomever it was for."""
    quotes = {
        vip: packet((vip, 80), (client, 4000), TCP, ACK),
        node: packet((node, 4000), (pod, 8080), TCP, ACK),
    }
    for sender, quoted in quotes.items():
        for target in (sender, stranger):
            error = with_checksum(stranger, target, icmp, HEADS[icmp] + quoted[14:])
            frame = ip(stranger, target, icmp, error)
            out = programs.ingress(frame)
            assert (out == (NEXT, frame)) is (target == stranger)


@EXAMPLES
@given(head=st.binary(min_size=8, max_size=8), quoted=broken(between(ours=True)))
def test_errors_with_any_quotation_for_strangers_are_left_alone(
    programs: Programs, head: bytes, quoted: bytes
) -> None:
    for source, target, icmp in ((CLIENT, STRANGER, 1), (CLIENT6, STRANGER6, 58)):
        for kind in (bytes((1, 4)), bytes((3, 4)), head[:2]):
            data = with_checksum(source, target, icmp, kind + b"\0\0" + head[4:] + quoted[14:])
            assert is_left_alone(programs, ip(source, target, icmp, data))


def test_lengths_that_lie_are_left_to_the_kernel(programs: Programs) -> None:
    """It drops such packets right after; what they say is not read beyond their end."""
    for field, place in (("total", 16), ("header", 14)):
        for value in (0, 1, 0x4F, 0x41, 0xFF):
            frame = bytearray(packet((CLIENT, 4000), (VIP, 80), TCP, ACK, b"x" * 40))
            if field == "total":
                struct.pack_into("!H", frame, place, value)
            else:
                frame[place] = value
            for name, answer, out in everywhere(programs, bytes(frame)):
                assert len(out) == len(frame), (name, field)
                assert answer in (NEXT, XDP_PASS), (name, field)


def fragments(data: bytes) -> list[bytes]:
    """The later part first, for then its ports are not known; the first one too short for flags."""
    late = ip(CLIENT, "127.0.0.1", TCP, data[8:], fragment=1)
    return [late, ip(CLIENT, "127.0.0.1", TCP, data[:8], fragment=0x2000)]


def test_nobody_reaches_loopback_in_pieces_or_by_other_protocols(programs: Programs) -> None:
    """The kernel would put fragments together, and deliver them with route_localnet."""
    syn = with_checksum(CLIENT, "127.0.0.1", TCP, transport(TCP, (4000, 22), SYN, b""))
    echo = with_checksum(CLIENT, "127.0.0.1", 1, b"\x08\0\0\0\0\1\0\1")
    quoted = packet(("127.0.0.1", 22), (CLIENT, 4000), TCP, ACK)[14:]
    error = with_checksum(CLIENT, "127.0.0.1", 1, HEADS[1] + quoted)
    frames = [
        *fragments(syn),
        *(ip(CLIENT, "127.0.0.1", 1, data) for data in (echo, error)),
        ip(CLIENT, "127.0.0.1", 47, b"\0" * 20),
        ip(CLIENT, "127.0.0.1", TCP, syn[:6]),
    ]
    assert [programs.ingress(frame)[0] for frame in frames] == [SHOT] * len(frames)
