"""The decoder in C and its twin in Python accept the same messages and make the same objects."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from steersman.source import protobuf
from steersman.source.messages import OBJECTS
from steersman.source.protobuf import ProtobufError, Table
from tests.support.apiserver.protobuf import encoded, field, varint
from tests.support.apiserver.world import Object
from tests.support.generated import objects

pytestmark = pytest.mark.skipif(not protobuf.NATIVE, reason="no compiler: there is no extension")

kinds = st.sampled_from(sorted(OBJECTS))


@contextmanager
def twin_calls(table: Table[Any]) -> Iterator[list[Table[Any]]]:
    """Collects the calls of a table's twin."""
    calls: list[Table[Any]] = []

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is Table.twin.__code__:
            calls.extend([table] if frame.f_locals["self"] is table else [])

    sys.setprofile(called)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def attempt(decode: Callable[[bytes], Any], message: bytes) -> tuple[Any, tuple[str, ...]]:
    """The object, or reason and path of the error."""
    try:
        return decode(message), ()
    except ProtobufError as error:
        return None, (error.reason, error.path)


def check(kind: str, message: bytes) -> None:
    """Both decode it to the same, the extension by itself; or both raise the same."""
    table = OBJECTS[kind]
    wanted, error = attempt(table.twin, message)
    with twin_calls(table) as calls:
        assert attempt(table.decode, message) == (wanted, error)
    assert bool(calls) == bool(error)


@given(objects)
def test_well_formed_messages(drawn: tuple[str, Object]) -> None:
    kind, value = drawn
    check(kind, encoded(kind, value))


@given(objects, st.data())
def test_damaged_messages(drawn: tuple[str, Object], data: st.DataObject) -> None:
    kind, value = drawn
    message = bytearray(encoded(kind, value))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(message) - 1))
        match data.draw(st.sampled_from(["bit", "byte", "cut", "insert"])):
            case "bit":
                message[at] ^= 1 << data.draw(st.integers(0, 7))
            case "byte":
                message[at] = data.draw(st.integers(0, 255))
            case "cut":
                del message[at : at + data.draw(st.integers(0, 20))]
                message += b"\0"
            case "insert":
                message[at:at] = data.draw(st.binary(max_size=20))
    check(kind, bytes(message))
    check(kind, bytes(message[: data.draw(st.integers(0, len(message)))]))


# Messages of fields that the tables know, of any wire type, in any order, one in another.
numbers = st.one_of(st.integers(0, 24), st.sampled_from([31, 32, 500, 1 << 29, (1 << 61) - 1]))
values = st.one_of(
    st.integers(0, 200), st.integers(0, (1 << 64) - 1),
    st.sampled_from([(1 << 31) - 1, 1 << 31, (1 << 64) - (1 << 31), (1 << 64) - (1 << 31) - 1]),
)  # fmt: skip
keys = st.sampled_from([
    b"kubernetes.io/service-name", b"steersman/weight", b"app", b"", b"\xff", b"k" * 200,
])  # fmt: skip
entries = st.builds(lambda key, value: field(1, key) + field(2, value), keys, st.binary())


def fields(inner: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.lists(
        st.one_of(
            st.builds(lambda number, data: field(number & 63, data), numbers, inner),
            st.builds(lambda number, value: varint(number << 3) + varint(value), numbers, values),
            st.builds(
                lambda number, wire, data: varint(number << 3 | wire) + data,
                numbers, st.sampled_from([1, 3, 4, 5, 6, 7]), st.binary(min_size=4, max_size=8),
            ),
        ),
        max_size=5,
    ).map(b"".join)  # fmt: skip


leaves = st.one_of(st.text(max_size=20).map(str.encode), st.binary(max_size=300), entries)
messages = st.recursive(leaves, fields, max_leaves=12)


@given(kinds, messages)
@example("Service", varint(2 << 3) + b"\xff" * 9 + b"\x01")  # 64 bits, of a field of bytes
@example("Service", varint(500 << 3) + b"\xff" * 9 + b"\x01")
@example("Service", varint(500 << 3) + b"\xff" * 9 + b"\x02")
@example("Service", b"\x8a\x00\x00")  # a tag of more bytes than needed
@example("Service", field(1, field(11, field(1, b"app") + b"\xff")))
@example("Service", field(1, field(11, b"\x8a\x00\x03app\xff")))
@example("Service", field(1, field(11, field(2, b"late") + field(1, b"steersman/weight"))))
@example("Service", field(1, field(12, field(1, b"steersman/weight"))))
@example("Service", field(1, field(12, b"\x0a\x08app")))
def test_messages_of_known_fields(kind: str, message: bytes) -> None:
    check(kind, message)
    check(kind, field(2, message))
    check(kind, field(1, field(12, message)))


@given(kinds, st.binary(max_size=300))
def test_any_bytes(kind: str, message: bytes) -> None:
    check(kind, message)
