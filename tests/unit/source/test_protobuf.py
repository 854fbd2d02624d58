"""Tables of protobuf: what each row is decoded to, and the extension in C beside its twin."""

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
from steersman.source.protobuf import (
    Entries,
    Field,
    Kind,
    LineTooLongError,
    ListReader,
    Memo,
    ProtobufError,
    Table,
)
from tests.support.apiserver.protobuf import body, field, varint

native = pytest.mark.skipif(not protobuf.NATIVE, reason="no compiler: there is no extension")


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
    raise ProtobufError("refused", "inner")


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

# A row, the bytes of its field, and the error.
ERRORS: list[tuple[Field, bytes, str]] = [
    (Field("text", Kind.TEXT), field(1, b"\xff"), "text that is not UTF-8 - at `$.text`"),
    (Field("text", Kind.TEXT), field(1, b"\xed\xa0\x80"), "text that is not UTF-8 - at `$.text`"),
    (Field("text", refuse), field(1, b""), "refused - at `$.text.inner`"),
    (Field("number", Kind.INT32), varint(3 << 3) + varint(1 << 31),
     "2147483648 does not fit into 32 bits - at `$.number`"),
    (Field("number", Kind.UINT64), varint(3 << 3) + b"\xff" * 9 + b"\x02",
     "a number above 64 bits - at `$.number`"),
    (Field("number", Kind.UINT64), varint(3 << 3) + b"\xff" * 11,
     "a number of more than ten bytes - at `$.number`"),
    (Field("text", Kind.TEXT), varint(9 << 3 | 1) + bytes(7), "it ends within a field"),
    (Field("text", Kind.TEXT), varint(9 << 3 | 3), "wire type 3, which is not used"),
    (Field("many_texts", Kind.TEXT, many=True), field(2, b"good") + field(2, b"\xff"),
     "text that is not UTF-8 - at `$.manyTexts`"),
    (Field("names", Entries(Names)), field(5, field(1, b"app") + b"\x12"),
     "it ends within a field - at `$.names`"),
    (Field("names", Entries(Names)), field(5, b"\x0a\x09app"),
     "a length beyond its end - at `$.names.key`"),
    (Field("names", Entries(Names)), field(5, field(1, b"app") + field(2, b"\xff")),
     "text that is not UTF-8 - at `$.names`"),
    (Field("part", PART), field(4, b"\x08\x01"),
     "wire type 0, which is another field's - at `$.part.text`"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "message", "wanted"), ROWS)
def test_a_row_is_decoded(row: Field, message: bytes, wanted: Whole) -> None:
    table = whole(**{row.name: row})
    assert table.decode(message) == wanted
    assert table.twin(message) == wanted


@pytest.mark.parametrize(("row", "message", "error"), ERRORS)
def test_an_error_names_the_field(row: Field, message: bytes, error: str) -> None:
    table = whole(**{row.name: row})
    for decode in (table.decode, table.twin):
        with pytest.raises(ProtobufError) as raised:
            decode(message)
        assert str(raised.value) == error


def test_equal_parts_of_a_row_with_a_memo_are_one_object() -> None:
    table = whole(part=Field("part", PART, many=True, memo=True))
    short, long = field(1, b"short"), field(1, b"long" * 100)
    for decode in (table.decode, table.twin):
        one, first, other, second = decode((field(4, short) + field(4, long)) * 2).part
        assert one is other
        assert first == second
        assert first is not second  # a long part is hardly ever equal to another, so not kept


def test_a_memo_is_bounded() -> None:
    table = whole(part=Field("part", PART, memo=True))
    first = field(4, field(1, b"first"))
    for decode in (table.decode, table.twin):
        known = decode(first).part
        assert decode(first).part is known
        for number in range(5000):
            decode(field(4, field(1, str(number).encode())))
        assert decode(first).part is not known
    memo = Memo(PART.twin)
    for number in range(5000):
        memo(field(1, str(number).encode()))
    assert len(memo.known) < 5000


def test_a_function_that_fails_otherwise_is_a_defect_of_the_program() -> None:
    nothing: dict[bytes, str] = {}
    table = whole(text=Field("text", nothing.__getitem__))
    for decode in (table.decode, table.twin):
        with pytest.raises(KeyError):
            decode(field(1, b"x"))


@native
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


@native
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
        type(PART.native)(Part, ("",), (row,), PART.twin)


@native
def test_the_extension_refuses_other_arguments() -> None:
    decoder: Any = type(PART.native)
    row = (1, 0, Kind.TEXT, None, False, False)
    with pytest.raises(ValueError, match="too many fields"):
        decoder(Part, ("",) * 17, (), PART.twin)
    with pytest.raises(ValueError, match="beyond the limits"):
        decoder(Part, ("",), (row, row), PART.twin)
    for message in (bytearray(b""), "", None):
        with pytest.raises(TypeError):
            decoder(Part, ("",), (), PART.twin).decode(message)


def test_without_the_extension_the_twin_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert table.decode(field(1, b"cart")) == Part("cart")
    assert not hasattr(table, "native")


@pytest.mark.parametrize("compiler", ["clang", "gcc"])
def test_the_extension_compiles_without_a_warning(compiler: str) -> None:
    include = Path(sysconfig.get_path("include"))
    if shutil.which(compiler) is None or not (include / "Python.h").exists():
        pytest.skip(f"{compiler} and Python.h are not both installed")
    path = Path(hatch_build.__file__).parent / hatch_build.DECODER
    argv = [compiler, *hatch_build.EXTENSION_FLAGS, "-Werror", f"-I{include}", "-o", "/dev/null"]
    subprocess.run([*argv, path], check=True)


# -- Bodies, lists and watches ---------------------------------------------------------------------


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
    with pytest.raises(ProtobufError, match="253402300800 seconds is no time"):
        decode(field(1, field(9, varint(1 << 3) + varint(253402300800))))


def test_an_event_has_a_type_and_an_object() -> None:
    event = field(1, b"ADDED") + field(2, field(1, body("Service", "v1", b"message")))
    assert protobuf.event_parts(event) == ("ADDED", b"message")


def test_a_body_has_a_kind_and_a_message() -> None:
    assert protobuf.unwrap(body("Service", "v1", b"message")) == ("Service", b"message")
    with pytest.raises(ProtobufError, match="does not begin with k8s"):
        protobuf.unwrap(b'{"kind": "Service"}')


def test_a_watch_is_split_into_its_events() -> None:
    splitter = protobuf.FrameSplitter(10)
    assert splitter.feed(b"\0\0\0\x02ab\0\0\0\0\0\0") == [b"ab", b""]
    assert splitter.rest == b"\0\0"
    assert splitter.feed(b"\0\x03c") == []
    assert splitter.feed(b"de\0\0\0\x0a") == [b"cde"]
    with pytest.raises(LineTooLongError, match="longer than 10 bytes"):
        protobuf.FrameSplitter(10).feed(b"\0\0\0\x0b")


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
