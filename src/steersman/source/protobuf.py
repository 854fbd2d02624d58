"""Decode protobuf by tables, in C: a row for each field that is read. No I/O.

    field   tag (number << 3 | wire type), value
            wire type 0: a varint, 1: 8 bytes, 2: a length and that many bytes, 5: 4 bytes

Other fields are skipped by their length. The tables of all kinds are in messages.py. Decoding
takes as long as msgspec takes for JSON. Where the extension could not be compiled, the API server
is asked for JSON, which is five times as fast as protobuf in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from types import NoneType
from typing import Annotated, Any, Generic, NamedTuple, TypeAlias, TypeVar, get_args, get_origin

import msgspec

from steersman.model.kube import ObjectMeta

try:
    from steersman.source import _protobuf
except ImportError:  # there is no wheel with it for this platform, and no compiler
    _protobuf = None  # type: ignore[assignment]

NATIVE = _protobuf is not None
"""Whether the extension is there."""

T = TypeVar("T", bound=msgspec.Struct)


class ProtobufError(ValueError):
    """Bytes are not the message that they should be."""


class Kind(IntEnum):
    """What a field is decoded to; _protobuf.c has the same numbers."""

    TEXT = 0
    TEXT_OR_NONE = 1
    """None if it is empty."""
    BYTES = 2
    MESSAGE = 3
    """Field.read is a Table."""
    ENTRIES = 4
    """Field.read is an Entries."""
    CALL = 5
    """Field.read is a function that converts the bytes."""
    BOOL = 6  # this and the next ones are varints
    INT32 = 7
    INT32_OR_NONE = 8
    """None if it is 0."""
    UINT64 = 9


Read: TypeAlias = "Kind | Table[Any] | Entries | Callable[[bytes], Any]"


class Field(NamedTuple):
    """A row of a Table."""

    name: str
    """Of the struct."""
    read: Read
    many: bool = False
    memo: bool = False
    """Whether equal bytes become one object: for messages of which there are few different ones."""

    @property
    def kind(self) -> Kind:
        """What it is decoded to."""
        match self.read:
            case Kind():
                return self.read
            case Table():
                return Kind.MESSAGE
            case Entries():
                return Kind.ENTRIES
            case _:
                return Kind.CALL


class Table(Generic[T]):
    """Decodes one kind of message to a struct."""

    def __init__(self, struct: type[T], fields: Mapping[int, Field]) -> None:
        """Make a table of fields by number."""
        self.decode: Callable[[bytes], T] = _refuse
        """Decodes a message; raises a ProtobufError if it is malformed."""
        if _protobuf is None:
            return
        names = struct.__struct_fields__
        # Missing fields have the struct's defaults; required ones (metadata) that of their type.
        blank: tuple[Any, ...] = tuple(
            ObjectMeta() if each.required else each.default
            for each in msgspec.structs.fields(struct)
        )
        rows = tuple(
            (number, names.index(field.name), field.kind, _native(field.read), *field[2:])
            for number, field in fields.items()
        )
        self.native = _protobuf.Decoder(struct, blank, rows, ProtobufError)
        self.decode = self.native.decode


def _refuse(_: bytes) -> Any:
    raise ProtobufError("protobuf cannot be read here: the extension in C is missing")


class Entries:
    """Decodes a map of texts, such as labels, to a struct of those that are read."""

    def __init__(self, struct: type[msgspec.Struct]) -> None:
        self.struct = struct
        self.keys = tuple(name.encode() for name in struct.__struct_encode_fields__)


def _native(read: Any) -> object:
    """Return what a row of a Decoder has for a MESSAGE, ENTRIES or CALL."""
    match read:
        case Table():
            return read.native
        case Entries():
            return read.struct, read.keys
        case _:
            return read


_READS: dict[Any, Read] = {
    str: Kind.TEXT,
    bytes: Kind.BYTES,
    bool: Kind.BOOL,
    Annotated: Kind.INT32,  # kube.Int32, the only one with a range
    int: Kind.UINT64,
    float: Kind.UINT64,
}
"""How fields of a type are read; `table` and `texts` add structs."""
_IF_NOT_ZERO = {Kind.TEXT: Kind.TEXT_OR_NONE, Kind.INT32: Kind.INT32_OR_NONE}


def texts(struct: type[msgspec.Struct]) -> None:
    """Have fields of this type read from a map of texts."""
    _READS[struct] = Entries(struct)


def table(
    struct: type[T],
    *,
    reads: Mapping[str, Read] | None = None,
    pointers: str = "",
    memo: str = "",
    **numbers: int,
) -> Table[T]:
    """Return the Table of a message, and have fields of this type read by it.

    The types of the struct's fields say how they are read. Go leaves a number or text out of JSON
    if it is 0 or empty, but not out of protobuf: such a field that may be None is None then.

    Args:
        struct: has the fields.
        reads: how those are read whose type does not tell.
        pointers: names of numbers and texts that Go has as pointers: 0 and "" are values.
        memo: names of those with a memo, see `Field`.
        numbers: the number of each field that is read.
    """
    types = {each.name: each.type for each in msgspec.structs.fields(struct)}
    fields: dict[int, Field] = {}
    for name, number in numbers.items():
        parts = get_args(types[name]) if NoneType in get_args(types[name]) else (types[name],)
        kind = parts[0]
        if many := get_origin(kind) is list:
            (kind,) = get_args(kind)
        read = (reads or {}).get(name) or _READS[get_origin(kind) or kind]
        if isinstance(read, Kind) and len(parts) > 1 and not many and name not in pointers.split():
            read = _IF_NOT_ZERO.get(read, read)
        fields[number] = Field(name, read, many, name in memo.split())
    made = _READS[struct] = Table(struct, fields)
    return made
