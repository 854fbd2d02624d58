from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from steersman.host import nlmsg

_values = st.lists(st.tuples(st.integers(0, 0x3FFF), st.binary(max_size=40)))


@given(_values)
def test_attributes_are_read_as_they_were_written(values: list[tuple[int, bytes]]) -> None:
    data = b"".join(nlmsg.attr(kind, value) for kind, value in values)
    assert len(data) % 4 == 0
    assert list(nlmsg.iter_attributes(data)) == values


@given(st.lists(st.tuples(st.integers(0, 0xFFFF), st.binary(max_size=40))))
def test_messages_are_read_as_they_were_written(sent: list[tuple[int, bytes]]) -> None:
    data = b"".join(nlmsg.message(kind, 5, i, body) for i, (kind, body) in enumerate(sent))
    assert [(m.kind, m.flags, m.sequence, m.payload) for m in nlmsg.messages(data)] == [
        (kind, 5, i, body) for i, (kind, body) in enumerate(sent)
    ]


@given(st.binary(max_size=200))
def test_junk_is_no_exception(data: bytes) -> None:
    for reply in nlmsg.messages(data):
        nlmsg.parse_ack(reply)
    assert isinstance(nlmsg.attributes(data), dict)


def test_scalars_have_their_byte_order() -> None:
    data = nlmsg.nested(
        7, nlmsg.u8(1, 9), nlmsg.u32(2, 1), nlmsg.be16(3, 1), nlmsg.be32(4, 1), nlmsg.text(5, "ab")
    )
    kind, value = next(nlmsg.iter_attributes(data))
    assert kind == 7
    assert nlmsg.attributes(value) == {
        1: b"\x09",
        2: struct.pack("=I", 1),
        3: b"\0\1",
        4: b"\0\0\0\1",
        5: b"ab\0",
    }
    assert nlmsg.string(b"ab\0\0") == "ab"


def _error(code: int, flags: int, tail: bytes) -> nlmsg.Message:
    return nlmsg.Message(nlmsg.NLMSG_ERROR, flags, 1, struct.pack("=i", -code) + tail)


def test_an_answer_is_a_number_and_an_explanation() -> None:
    header = nlmsg.HEADER.pack(20, 1, 0, 1, 0)
    reason = nlmsg.text(nlmsg.NLMSGERR_ATTR_MSG, "no such thing")
    assert nlmsg.parse_ack(_error(0, 0, header)) == (0, "")
    assert nlmsg.parse_ack(_error(2, 0, header + bytes(4))) == (2, "")
    flags = nlmsg.NLM_F_ACK_TLVS
    assert nlmsg.parse_ack(_error(2, flags, header + bytes(4) + reason)) == (2, "no such thing")
    capped = flags | nlmsg.NLM_F_CAPPED
    assert nlmsg.parse_ack(_error(2, capped, header + reason)) == (2, "no such thing")
    done = nlmsg.Message(nlmsg.NLMSG_DONE, flags, 1, struct.pack("=i", -5) + reason)
    assert nlmsg.parse_ack(done) == (5, "no such thing")
    assert nlmsg.parse_ack(nlmsg.Message(nlmsg.NLMSG_DONE, 0, 1, b"")) == (0, "")


def test_an_answer_says_what_is_to_blame() -> None:
    header = nlmsg.HEADER.pack(20, 1, 0, 1, 0)
    where = nlmsg.u32(nlmsg.NLMSGERR_ATTR_OFFS, 44)
    flags = nlmsg.NLM_F_ACK_TLVS | nlmsg.NLM_F_CAPPED
    assert nlmsg.blamed_offset(_error(2, flags, header + where)) == 44
    assert nlmsg.blamed_offset(_error(2, flags, header)) == 0
    assert nlmsg.blamed_offset(_error(2, 0, header + where)) == 0
