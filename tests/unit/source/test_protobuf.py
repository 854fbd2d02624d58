"""Tables of protobuf: what each row is decoded to, and which messages are refused."""

from __future__ import annotations

import gc
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

import hatch_build
from steersman import source
from steersman.source import protobuf
from steersman.source.messages import OBJECTS
from steersman.source.protobuf import Entries, Field, Kind, ProtobufError, Table
from tests.support.apiserver.protobuf import field, varint

pytestmark = pytest.mark.skipif(not protobuf.NATIVE, reason="no compiler: there is no extension")


class Names(msgspec.Struct, frozen=True):
    app: str | None = None
    tier: str | None = msgspec.field(name="example.com/tier", default=None)


class Part(msgspec.Struct, frozen=True):
    text: str = "missing"


class Whole(msgspec.Struct, frozen=True, rename="camel"):
    text: Any = None
    many_texts: Any = None
    number: Any = None
    part: Any = None
    names: Any = None


PART = Table(Part, {1: Field("text", Kind.TEXT)})


def whole(**rows: Field) -> Table[Whole]:
    numbers = {"text": 1, "many_texts": 2, "number": 3, "part": 4, "names": 5}
    return Table(Whole, {numbers[name]: row for name, row in rows.items()})


def refuse(_: bytes) -> str:
    raise ProtobufError("refused")


# A row, the bytes of its field, and what it is decoded to.
ROWS: list[tuple[Field, bytes, Whole]] = [
    (Field("text", Kind.TEXT), field(1, "ß€😀".encode()), Whole("ß€😀")),
    (Field("text", Kind.TEXT), field(1, b""), Whole("")),
    (Field("text", Kind.TEXT), field(1, b"one") + field(1, b"two"), Whole("two")),
    (Field("text", Kind.TEXT_OR_NONE), field(1, b"text"), Whole("text")),
    (Field("text", Kind.TEXT_OR_NONE), field(1, b""), Whole()),
    (Field("text", Kind.BYTES), field(1, b"\xff\0"), Whole(b"\xff\0")),
    (Field("text", len), field(1, b"four"), Whole(4)),
    (Field("text", Kind.TEXT), field(9, b"later") + varint(10 << 3) + b"\x05", Whole()),
    (Field("text", Kind.TEXT), field(20, b"later") + varint(9 << 3 | 1) + bytes(8), Whole()),
    (Field("text", Kind.TEXT), varint(9 << 3 | 5) + bytes(4) + field(1, b"last"), Whole("last")),
    (Field("names", Entries(Names)), field(9, b"later"), Whole()),
    (Field("many_texts", Kind.TEXT, many=True), field(2, b"a") + field(2, b"b"),
     Whole(many_texts=["a", "b"])),
    (Field("number", Kind.BOOL), varint(3 << 3) + varint(2), Whole(number=True)),
    (Field("number", Kind.BOOL), varint(3 << 3) + varint(0), Whole(number=False)),
    (Field("number", Kind.INT32), varint(3 << 3) + varint(-1), Whole(number=-1)),
    (Field("number", Kind.INT32), varint(3 << 3) + varint(-(1 << 31)), Whole(number=-(1 << 31))),
    (Field("number", Kind.INT32_OR_NONE), varint(3 << 3) + varint(7), Whole(number=7)),
    (Field("number", Kind.INT32_OR_NONE), varint(3 << 3) + varint(0), Whole()),
    (Field("number", Kind.UINT64), varint(3 << 3) + varint(-1), Whole(number=(1 << 64) - 1)),
    (Field("part", PART), field(4, field(1, b"inner")), Whole(part=Part("inner"))),
    (Field("part", PART), field(4, b""), Whole(part=Part())),
    (Field("part", PART, many=True), field(4, b"") * 2, Whole(part=[Part(), Part()])),
    (Field("names", Entries(Names)), field(5, field(1, b"app") + field(2, b"cart")),
     Whole(names=Names(app="cart"))),
    (Field("names", Entries(Names)), field(5, field(2, b"late") + field(1, b"example.com/tier")),
     Whole(names=Names(tier="late"))),
    (Field("names", Entries(Names)), field(5, field(1, b"app") + field(2, b"old"))
     + field(5, field(1, b"app") + field(3, b"later") + field(2, b"new")),
     Whole(names=Names(app="new"))),
    (Field("names", Entries(Names)), field(5, field(1, b"other") + field(2, b"x")) + field(5, b""),
     Whole(names=Names())),
    (Field("names", Entries(Names)), field(5, field(1, b"a" * 200) + field(2, b"x")),
     Whole(names=Names())),
]  # fmt: skip

# A row, the bytes of its field, and where the first field begins that cannot be decoded.
ERRORS: list[tuple[Field, bytes, int]] = [
    (Field("text", Kind.TEXT), field(1, b"\xff"), 0),
    (Field("text", Kind.TEXT), field(9, b"four") + field(1, b"\xed\xa0\x80"), 6),
    (Field("text", refuse), field(1, b""), 0),
    (Field("number", Kind.INT32), varint(3 << 3) + varint(1 << 31), 0),
    (Field("number", Kind.UINT64), varint(3 << 3) + b"\xff" * 9 + b"\x02", 0),
    (Field("number", Kind.UINT64), varint(3 << 3) + b"\xff" * 11, 0),
    (Field("number", Kind.UINT64), varint(500 << 3) + b"\xff" * 9 + b"\x02", 0),
    (Field("text", Kind.TEXT), varint(9 << 3 | 1) + bytes(7), 0),
    (Field("text", Kind.TEXT), varint(9 << 3 | 3), 0),
    (Field("text", Kind.TEXT), field(1, b"x") + varint(1 << 3) + b"\x01", 3),
    (Field("text", Kind.TEXT), field(1, b"x") + b"\x0a", 3),
    (Field("text", Kind.TEXT), b"\x0a\x05abc", 0),
    (Field("many_texts", Kind.TEXT, many=True), field(2, b"good") + field(2, b"\xff"), 6),
    (Field("names", Entries(Names)), field(5, field(1, b"app") + b"\x12"), 0),
    (Field("names", Entries(Names)), field(9, b"") + field(5, b"\x0a\x09app"), 2),
    (Field("names", Entries(Names)), field(5, field(1, b"app") + field(2, b"\xff")), 0),
    (Field("names", Entries(Names)), field(5, field(1, b"app") + varint(2 << 3) + b"\0"), 0),
    (Field("part", PART), field(4, b"\x08\x01"), 2),
    (Field("part", PART, many=True), field(4, b"") + field(4, field(1, b"a") + b"\x0a\x01\xff"), 7),
    (Field("part", PART, memo=True), field(4, field(1, b"\xff")), 2),
]  # fmt: skip


@pytest.mark.parametrize(("row", "message", "wanted"), ROWS)
def test_a_row_is_decoded(row: Field, message: bytes, wanted: Whole) -> None:
    assert whole(**{row.name: row}).decode(message) == wanted


@pytest.mark.parametrize(("row", "message", "at"), ERRORS)
def test_an_error_says_where_it_lies(row: Field, message: bytes, at: int) -> None:
    with pytest.raises(ProtobufError, match=f"^malformed at byte {at}$"):
        whole(**{row.name: row}).decode(message)


def test_equal_parts_of_a_row_with_a_memo_are_one_object() -> None:
    table = whole(part=Field("part", PART, many=True, memo=True))
    short, long = field(1, b"short"), field(1, b"long" * 100)
    one, first, other, second = table.decode((field(4, short) + field(4, long)) * 2).part
    assert one is other
    assert first == second
    assert first is not second  # a long part is hardly ever equal to another, so not kept


def test_a_memo_is_bounded() -> None:
    table = whole(part=Field("part", PART, memo=True))
    first = field(4, field(1, b"first"))
    known = table.decode(first).part
    assert table.decode(first).part is known
    for number in range(5000):
        table.decode(field(4, field(1, str(number).encode())))
    assert table.decode(first).part is not known


def test_a_function_that_fails_otherwise_is_a_defect_of_the_program() -> None:
    nothing: dict[bytes, str] = {}
    table = whole(text=Field("text", nothing.__getitem__))
    with pytest.raises(KeyError):
        table.decode(field(1, b"x"))


def test_decoding_leaks_no_object() -> None:
    rows = {
        "text": Field("text", Kind.BYTES),
        "many_texts": Field("many_texts", Kind.TEXT, many=True),
        "number": Field("number", Kind.UINT64),
        "part": Field("part", PART, many=True, memo=True),
        "names": Field("names", Entries(Names)),
    }
    message = b"".join(data for row, data, _ in ROWS if row == rows.get(row.name))
    message += field(5, field(1, b"app") + field(2, b"cart")) + field(4, field(1, b"long" * 100))
    failing = [message[:end] for end in range(len(message))] + [
        message + data for row, data, _ in ERRORS if row.name in rows
    ]

    def work() -> None:
        table = whole(**rows)  # and its memo, which forgets some of these parts
        for number in range(1000):
            table.decode(message + field(4, field(1, str(number).encode())))
        for each in failing:
            with suppress(ProtobufError):
                table.decode(each)

    def blocks() -> tuple[int, int]:
        gc.collect()
        return sys.getallocatedblocks(), sys.getrefcount(None)

    work()
    before = blocks()
    for _ in range(10):
        work()
    after = blocks()
    assert after[0] - before[0] < 50, "a leak in each round is some hundred objects"
    assert after[1] - before[1] < 50


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ((0, 0, Kind.TEXT, None, False, False), ValueError),
        ((32, 0, Kind.TEXT, None, False, False), ValueError),
        ((1, -1, Kind.TEXT, None, False, False), ValueError),
        ((1, 1, Kind.TEXT, None, False, False), ValueError),
        ((1, 0, -1, None, False, False), ValueError),
        ((1, 0, 10, None, False, False), ValueError),
        ((1, 0, Kind.BOOL, None, True, False), ValueError),
        ((1, 0, Kind.BOOL, None, False, True), ValueError),
        ((1, 0, Kind.MESSAGE, PART, False, False), TypeError),
        ((1, 0, Kind.ENTRIES, Names, False, False), TypeError),
        ((1, 0, Kind.ENTRIES, (Names, ["app"]), False, False), TypeError),
        ((1, 0, Kind.ENTRIES, (Names, ("app",)), False, False), TypeError),
        ((1, 0, Kind.TEXT), TypeError),
        ("row", TypeError),
    ],
)
def test_the_extension_refuses_other_rows(row: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        type(PART.native)(Part, ("",), (row,), ProtobufError)


def test_the_extension_refuses_other_arguments() -> None:
    decoder: Any = type(PART.native)
    row = (1, 0, Kind.TEXT, None, False, False)
    with pytest.raises(ValueError, match="too many fields"):
        decoder(Part, ("",) * 17, (), ProtobufError)
    with pytest.raises(ValueError, match="beyond the limits"):
        decoder(Part, ("",), (row, row), ProtobufError)
    for message in (bytearray(b""), "", None):
        with pytest.raises(TypeError):
            decoder(Part, ("",), (), ProtobufError).decode(message)


def test_without_the_extension_nothing_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "steersman.source._protobuf", None)
    monkeypatch.delattr(source, "_protobuf", raising=False)
    spec = importlib.util.spec_from_file_location("protobuf_alone", protobuf.__file__)
    assert spec is not None
    assert spec.loader is not None
    alone = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "protobuf_alone", alone)
    spec.loader.exec_module(alone)
    assert not alone.NATIVE
    table = alone.Table(Part, {1: alone.Field("text", alone.Kind.TEXT)})
    with pytest.raises(alone.ProtobufError, match="the extension in C is missing"):
        table.decode(field(1, b"cart"))


@pytest.mark.parametrize("compiler", ["clang", "gcc"])
def test_the_extension_compiles_without_a_warning(compiler: str) -> None:
    include = Path(sysconfig.get_path("include"))
    if shutil.which(compiler) is None or not (include / "Python.h").exists():
        pytest.skip(f"{compiler} and Python.h are not both installed")
    path = Path(hatch_build.__file__).parent / hatch_build.DECODER
    argv = [compiler, *hatch_build.EXTENSION_FLAGS, "-Werror", f"-I{include}", "-o", "/dev/null"]
    subprocess.run([*argv, path], check=True)


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        (0, "1970-01-01T00:00:00Z"),
        (-1, "1969-12-31T23:59:59Z"),
        (-62135596800, None),  # Go's zero time
    ],
)
def test_a_time_is_written_as_in_json(seconds: int, wanted: str | None) -> None:
    moment = varint(1 << 3) + varint(seconds)
    deleted = OBJECTS["Service"].decode(field(1, field(9, moment))).metadata.deletion_timestamp
    assert deleted == wanted


def test_an_empty_time_is_none_and_a_year_has_four_digits() -> None:
    decode = OBJECTS["Service"].decode
    assert decode(field(1, field(9, b""))).metadata.deletion_timestamp is None
    with pytest.raises(ProtobufError, match="malformed at byte 2"):
        decode(field(1, field(9, varint(1 << 3) + varint(253402300800))))
