"""Protobuf decodes to the same objects as JSON, and any bytes to an object or a clear error."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from steersman.model.findings import Finding
from steersman.model.kube import KINDS as STRUCTS
from steersman.source.framing import LineTooLongError, ListReader, Message
from steersman.source.objects import decode_object
from steersman.source.protobuf import ProtobufError
from steersman.source.wire import ApiError, decode_event, splitter_for
from tests.support.apiserver import protobuf
from tests.support.apiserver.protobuf import CONTENT_TYPE, encoded, field, varint
from tests.support.apiserver.world import Object
from tests.support.generated import objects, slices


@given(objects)
def test_protobuf_and_json_decode_to_the_same(drawn: tuple[str, Object]) -> None:
    kind, value = drawn
    wanted = decode_object(kind, json.dumps(value).encode())
    assert not isinstance(wanted, Finding)
    message = encoded(kind, value)
    assert decode_object(kind, Message(message)) == wanted
    # Once more: parts that are looked up by their bytes are the same, too.
    assert decode_object(kind, Message(message)) == wanted
    # Fields of a later version are skipped.
    later = field(500, b"x") + varint(501 << 3) + varint(7) + varint(502 << 3 | 5) + b"1234"
    assert decode_object(kind, Message(message + later)) == wanted


@given(slices, st.randoms(use_true_random=False))
def test_the_order_of_fields_does_not_matter(value: Object, dice: Any) -> None:
    """Except for that of the items of one list."""

    def shuffled(message: bytes, inner: bool) -> bytes:
        parts = [
            varint(number << 3) + varint(item)
            if isinstance(item, int)
            else field(number, shuffled(item, inner=False) if inner and number < 3 else item)
            for number, item in protobuf.fields_of(message)
        ]
        keys = [number for number, _ in protobuf.fields_of(message)]
        order = {number: dice.random() for number in set(keys)}
        indices = sorted(range(len(parts)), key=lambda at: (order[keys[at]], at))
        return b"".join(parts[at] for at in indices)

    message = encoded("EndpointSlice", value)
    wanted = decode_object("EndpointSlice", Message(message))
    assert decode_object("EndpointSlice", Message(shuffled(message, inner=True))) == wanted


def finish(kind: str, message: bytes) -> None:
    """An object of the kind, or a Finding that describes the error."""
    found = decode_object(kind, Message(message))
    if isinstance(found, Finding):
        assert found.object.startswith(f"{kind} ")
        assert found.reason
    else:
        assert isinstance(found, STRUCTS[kind])


@given(st.sampled_from(sorted(STRUCTS)), st.binary(max_size=300))
def test_any_bytes_are_an_object_or_a_finding(kind: str, message: bytes) -> None:
    finish(kind, message)


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


@given(st.sampled_from(sorted(STRUCTS)), st.recursive(leaves, fields, max_leaves=12))
def test_any_known_fields_are_an_object_or_a_finding(kind: str, message: bytes) -> None:
    finish(kind, message)
    finish(kind, field(2, message))
    finish(kind, field(1, field(12, message)))


@given(objects, st.data())
def test_damaged_objects_are_an_object_or_a_finding(
    drawn: tuple[str, Object], data: st.DataObject
) -> None:
    kind, value = drawn
    message = bytearray(encoded(kind, value))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    finish(kind, bytes(message))
    finish(kind, bytes(message[: data.draw(st.integers(0, len(message)))]))


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_bytes_are_a_list_or_an_error(chunks: list[bytes]) -> None:
    for start in (b"", b"k8s\0", b"k8s\0\x12\xff\x01"):
        reader = ListReader(1000)
        with suppress(ProtobufError, LineTooLongError):
            for chunk in (start, *chunks):
                assert all(isinstance(item, Message) for item in reader.feed(chunk))


@given(st.binary(max_size=300))
def test_any_bytes_are_events_or_an_error(data: bytes) -> None:
    splitter = splitter_for(CONTENT_TYPE)
    with suppress(ProtobufError, LineTooLongError, ApiError):
        for each in splitter.feed(len(data).to_bytes(4) + data):
            assert isinstance(decode_event(each).type, str)


NAME = field(1, b"cart") + field(3, b"shop")
GOOD = field(1, NAME)


def test_a_finding_says_where_the_error_lies() -> None:
    message = GOOD + field(2, field(8, field(1, field(1, b"\xff"))))
    found = decode_object("EndpointSlice", Message(message))
    assert isinstance(found, Finding)
    assert found.reason.startswith(f"malformed at byte {message.index(0xFF) - 2};")


def test_a_finding_names_the_object_if_its_name_is_well_formed() -> None:
    found = decode_object("EndpointSlice", Message(GOOD + field(4, b"\xff")))
    assert isinstance(found, Finding)
    assert found.object == "EndpointSlice shop/cart"
    found = decode_object("EndpointSlice", Message(field(4, b"IPv4")))
    assert isinstance(found, Finding)
    assert (found.object, found.field) == ("EndpointSlice ", "metadata.name")
