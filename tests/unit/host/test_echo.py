"""Echo requests as bytes."""

from __future__ import annotations

import struct

import pytest

from steersman.host.echo import answers_echo, echo_request, is_echo_reply


def words(data: bytes) -> int:
    """The Internet checksum's sum: 0xffff for a packet whose checksum is right."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


@pytest.mark.parametrize(("identifier", "number"), [(0, 0), (0xFFFF, 1), (0xF7FF, 0xFFFF)])
def test_checksums_are_right(identifier: int, number: int) -> None:
    request = echo_request(4, identifier, number, 1372)
    assert len(request) == 1380
    assert words(request) == 0xFFFF


def test_answers_are_told_from_those_to_others() -> None:
    reply = bytes(2) + struct.pack("!HHH", 0, 77, 1)
    header = bytes((0x45,)) + bytes(19)
    assert is_echo_reply(4, header + reply, 77)
    assert not is_echo_reply(4, header + reply, 78)
    assert not is_echo_reply(4, header + echo_request(4, 77, 1, 0), 77)  # our own, over loopback
    assert not is_echo_reply(4, header, 77)
    assert is_echo_reply(6, bytes((129, 0)) + reply[2:], 77)


@pytest.mark.kernel
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_this_machine_answers(address: str) -> None:
    assert await answers_echo(address, 1000)
