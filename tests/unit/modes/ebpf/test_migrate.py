"""Records of one shape become those of another, and old pins go."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from steersman.modes.ebpf.bpf import remove_pins
from steersman.modes.ebpf.loader import Shape
from steersman.modes.ebpf.migration import converter

FIELDS = {"address": (0, 16), "last": (16, 8), "port": (24, 2), "kind": (26, 1)}
TURNED = {"kind": (0, 1), "port": (2, 2), "last": (8, 8), "address": (16, 16)}
records = st.binary(min_size=27, max_size=27)


@given(records)
def test_there_and_back_is_the_same(record: bytes) -> None:
    there, back = converter(FIELDS, TURNED, 32), converter(TURNED, FIELDS, 27)
    assert back(there(record)) == record


@given(records)
def test_without_a_change_nothing_changes(record: bytes) -> None:
    assert converter(FIELDS, FIELDS, 27)(record) == record


def test_what_is_new_is_zero_and_what_is_gone_is_gone() -> None:
    convert = converter({"a": (0, 1), "b": (1, 1)}, {"b": (0, 1), "c": (1, 4)}, 5)
    assert convert(b"\1\2") == b"\2\0\0\0\0"


@given(st.integers(0, 65535))
def test_a_number_keeps_its_value(number: int) -> None:
    convert = converter({"n": (0, 2)}, {"n": (0, 4)}, 4)
    assert convert(struct.pack("=H", number)) == struct.pack("=I", number)
    convert = converter({"n": (0, 4)}, {"n": (0, 1)}, 1)
    assert convert(number.to_bytes(4, sys.byteorder)) == bytes((number % 256,))


def test_of_a_text_the_start_stays() -> None:
    assert converter({"t": (0, 16)}, {"t": (0, 12)}, 12)(b"0123456789abcdef") == b"0123456789ab"
    assert converter({"t": (0, 12)}, {"t": (0, 16)}, 16)(b"0123456789ab") == b"0123456789ab\0\0\0\0"


def test_what_btf_does_not_say_is_no_difference() -> None:
    shape = Shape(1, 4, 8, 10, 0, {"": (0, 4)}, {"a": (0, 8)})
    assert shape.serves_as(shape._replace(value={}))
    assert not shape.serves_as(shape._replace(value={"b": (0, 8)}))
    assert not shape.serves_as(shape._replace(capacity=11))


def test_pins_are_removed_with_all_directories_below(tmp_path: Path) -> None:
    pins = tmp_path / "pins"
    (pins / "maps" / "old").mkdir(parents=True)
    for place in (pins, pins / "maps", pins / "maps" / "old"):
        (place / "pin").touch()
    (tmp_path / "other").touch()
    remove_pins(pins)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    remove_pins(pins)  # there is nothing any more
