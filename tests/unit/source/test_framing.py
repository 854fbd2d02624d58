"""Bodies, watches and lists in protobuf, taken apart."""

from __future__ import annotations

import pytest

from steersman.source.framing import (
    FrameSplitter,
    LineTooLongError,
    ListReader,
    event_parts,
    unwrap,
)
from steersman.source.protobuf import ProtobufError
from tests.support.apiserver.protobuf import body, field


def test_an_event_has_a_type_and_an_object() -> None:
    event = field(1, b"ADDED") + field(2, field(1, body("Service", "v1", b"message")))
    assert event_parts(event) == ("ADDED", b"message")


def test_a_body_has_a_kind_and_a_message() -> None:
    assert unwrap(body("Service", "v1", b"message")) == ("Service", b"message")
    with pytest.raises(ProtobufError, match="does not begin with k8s"):
        unwrap(b'{"kind": "Service"}')


def test_a_watch_is_split_into_its_events() -> None:
    splitter = FrameSplitter(10)
    assert splitter.feed(b"\0\0\0\x02ab\0\0\0\0\0\0") == [b"ab", b""]
    assert splitter.rest == b"\0\0"
    assert splitter.feed(b"\0\x03c") == []
    assert splitter.feed(b"de\0\0\0\x0a") == [b"cde"]
    with pytest.raises(LineTooLongError, match="longer than 10 bytes"):
        FrameSplitter(10).feed(b"\0\0\0\x0b")


ITEMS = field(1, b"meta") + field(2, b"one") + field(3, b"later") + field(2, b"two")


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_list_is_read_in_pieces(size: int) -> None:
    reader = ListReader(40)
    found, whole_list = [], body("NodeList", "v1", ITEMS)
    for at in range(0, len(whole_list), size):
        assert not reader.complete or at >= len(whole_list) - 4  # two empty texts end a body
        found += reader.feed(whole_list[at : at + size])
    assert (found, reader.kind, reader.metadata) == ([b"one", b"two"], "NodeList", b"meta")
    assert reader.complete


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b'{"kind": ', ProtobufError, "does not begin with k8s"),
        (b"k8s\0\x08\x01", ProtobufError, "wire type 0 in a list"),
        (b"k8s\0\x12\x04\x12\x08", ProtobufError, "beyond the end of the list"),
        (b"k8s\0\x12\x64\x12\x29", LineTooLongError, "longer than 40 bytes"),
    ],
)
def test_what_is_no_list_is_an_error(data: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ListReader(40).feed(data + bytes(20))
