"""Protobuf as Kubernetes uses it: decode messages by tables, take lists and watches apart. No I/O.

    body    "k8s\\0", then Unknown {1: typeMeta, 2: raw}; raw is an object or a list
    watch   for each event: 4 bytes of length, then WatchEvent {1: type, 2: {1: raw}};
            this raw is a body as above
    field   tag (number << 3 | wire type), value
            wire type 0: a varint, 1: 8 bytes, 2: a length and that many bytes, 5: 4 bytes

A `Table` has a row for each field that is read; the others are skipped by their length. The tables
of all kinds are in messages.py.

Tables are decoded twice: by _protobuf.c, which takes as long as msgspec takes for JSON, or by
`Table.twin`, in Python, in five times as long. The twin runs where the extension could not be
compiled, and decodes what the extension cannot, to name its error. Both accept the same
messages and make the same objects (tests/properties/test_protobuf.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from steersman.model.kube import ObjectMeta

try:
    from steersman.source import _protobuf
except ImportError:  # there is no wheel with it for this platform, and no compiler
    _protobuf = None  # type: ignore[assignment]

NATIVE = _protobuf is not None
"""Whether the extension is there."""

T = TypeVar("T", bound=msgspec.Struct)

CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
MAGIC = b"k8s\0"
_TOGETHER = 256  # bytes; a longer message is hardly ever equal to another one
_MOST = 4096  # entries of a memo


class ProtobufError(ValueError):
    """Bytes are not the message that they should be."""

    def __init__(self, reason: str, path: str = "") -> None:
        """Make an error; `path` is the field, spelled as in JSON."""
        super().__init__(f"{reason} - at `$.{path}`" if path else reason)
        self.reason = reason
        self.path = path


class LineTooLongError(ValueError):
    """A part of a list or watch is longer than any object can be."""


# -- The wire --------------------------------------------------------------------------------------


def varint(data: bytes | bytearray, at: int) -> tuple[int, int]:
    """Return the number at an index, and the index behind it.

    Raises:
        IndexError: the data end within it.
        ProtobufError: it is above 64 bits.
    """
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
        if shift > 63:
            raise ProtobufError("a number of more than ten bytes")
    if value >> 64:
        raise ProtobufError("a number above 64 bits")
    return value, at


class Kind(IntEnum):
    """What a field is decoded to; the numbers are known to _protobuf.c."""

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


class Field(NamedTuple):
    """A row of a Table."""

    name: str
    """Of the struct."""
    read: Kind | Table[Any] | Entries | Callable[[bytes], Any]
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
    """Decodes one kind of message to a struct, in C if that is there."""

    def __init__(self, struct: type[T], fields: Mapping[int, Field]) -> None:
        """Make a table of fields by number."""
        names = struct.__struct_fields__
        self._struct = struct
        self._paths = dict(zip(names, struct.__struct_encode_fields__, strict=True))
        # Missing fields have the struct's defaults; required ones (metadata) that of their type.
        self._blank: list[Any] = [
            ObjectMeta() if each.required else each.default
            for each in msgspec.structs.fields(struct)
        ]
        self._numbers = frozenset(fields)
        self._rows = {
            number << 3 | (2 if field.kind < Kind.BOOL else 0): (
                names.index(field.name),
                _read(field),
                field.many or field.kind == Kind.ENTRIES,
            )
            for number, field in fields.items()
        }
        self._entries = [
            (names.index(field.name), field.read)
            for field in fields.values()
            if isinstance(field.read, Entries)
        ]
        self._names = {number: field.name for number, field in fields.items()}
        self.decode: Callable[[bytes], T] = self.twin
        """Decodes a message; raises the same as `twin`."""
        if _protobuf is not None:
            rows = tuple(
                (number, names.index(field.name), field.kind, _native(field.read), *field[2:])
                for number, field in fields.items()
            )
            self.native = _protobuf.Decoder(struct, tuple(self._blank), rows, self.twin)
            self.decode = self.native.decode

    def twin(self, data: bytes) -> T:  # noqa: PLR0912 - wire types
        """Decode a message in Python.

        Raises:
            ProtobufError: it is malformed; `path` says where.
        """
        rows, values, at, end, tag = self._rows, self._blank.copy(), 0, len(data), 0
        try:
            while at < end:
                tag = data[at]
                at += 1
                if tag > 127:
                    tag, at = varint(data, at - 1)
                row = rows.get(tag)
                if tag & 7 == 2:
                    length = data[at]
                    at += 1
                    if length > 127:
                        length, at = varint(data, at - 1)
                    start = at
                    at += length
                    if at > end:
                        raise ProtobufError("a length beyond its end")
                    if row is not None:
                        index, read, many = row
                        value = read(data[start:at])
                        if not many:
                            values[index] = value
                        elif (known := values[index]) is None:
                            values[index] = [value]
                        else:
                            known.append(value)
                        continue
                elif tag & 7 == 0:
                    number, at = varint(data, at)
                    if row is not None:
                        values[row[0]] = row[1](number)
                        continue
                else:
                    at += _fixed(tag)
                # A field that is not read, or one that is read of another wire type.
                if tag >> 3 in self._numbers:
                    raise ProtobufError(f"wire type {tag & 7}, which is another field's")
                if at > end:
                    raise ProtobufError("it ends within a field")
            for index, entries in self._entries:
                if values[index] is not None:
                    values[index] = entries.made(values[index])
            return self._struct(*values)
        except IndexError:
            raise ProtobufError("it ends within a field") from None
        except UnicodeDecodeError:
            raise ProtobufError("text that is not UTF-8", self._path(tag)) from None
        except ProtobufError as error:
            inner = self._path(tag)
            path = f"{inner}.{error.path}" if inner and error.path else inner or error.path
            raise ProtobufError(error.reason, path) from None

    def _path(self, tag: int) -> str:
        name = self._names.get(tag >> 3, "")
        return self._paths.get(name, name)


class Entries:
    """Decodes a map of texts, such as labels, to a struct of those that are read."""

    def __init__(self, struct: type[msgspec.Struct]) -> None:
        self.struct = struct
        self.keys = tuple(name.encode() for name in struct.__struct_encode_fields__)
        self._indices = {key: index for index, key in enumerate(self.keys)}

    def read(self, data: bytes) -> tuple[int, str] | None:
        """Return the index of the struct's field and the value; None if it is not read."""
        # The key comes first, so most entries need not be decoded.
        if data[:1] == b"\x0a":
            length, start = varint(data, 1)
            if start + length <= len(data) and data[start : start + length] not in self._indices:
                return None
        entry = _ENTRY.twin(data)
        index = self._indices.get(entry.key)
        return None if index is None else (index, entry.value.decode())

    def made(self, entries: Iterable[tuple[int, str] | None]) -> Any:
        """Return the struct of these entries."""
        values: list[str | None] = [None] * len(self.keys)
        for entry in entries:
            if entry is not None:
                values[entry[0]] = entry[1]
        return self.struct(*values)


def _read(field: Field) -> Callable[[Any], Any]:
    """Return what converts the bytes or the number of a field in Python."""
    read: Any = field.read
    match field.kind:
        case Kind.MESSAGE:
            read = read.twin
        case Kind.ENTRIES:
            read = read.read
        case Kind.CALL:
            pass
        case kind:
            read = _CONVERT[kind]
    return Memo(read) if field.memo else read


def _native(read: Any) -> object:
    """Return what a row of a Decoder has for a MESSAGE, ENTRIES or CALL."""
    match read:
        case Table():
            return read.native
        case Entries():
            return read.struct, read.keys
        case _:
            return read


class Memo:
    """What short messages decoded to, by their bytes; bounded, so that no tenant can fill it."""

    def __init__(self, read: Callable[[bytes], Any]) -> None:
        self._read = read
        self.known: dict[bytes, Any] = {}

    def __call__(self, data: bytes) -> Any:
        """Decode a message, or return what it was decoded to before."""
        value = self.known.get(data)
        if value is None:
            value = self._read(data)
            if len(data) <= _TOGETHER:
                if len(self.known) >= _MOST:
                    self.known.clear()
                self.known[data] = value
        return value


def _text_or_none(data: bytes) -> str | None:
    return data.decode() or None


def _int32(number: int) -> int:
    if number >> 63:
        number -= 1 << 64
    if not -(1 << 31) <= number < 1 << 31:
        raise ProtobufError(f"{number} does not fit into 32 bits")
    return number


_CONVERT: Mapping[Kind, Callable[[Any], Any]] = {
    Kind.TEXT: bytes.decode,
    Kind.TEXT_OR_NONE: _text_or_none,
    Kind.BYTES: bytes,
    Kind.BOOL: bool,
    Kind.INT32: _int32,
    Kind.INT32_OR_NONE: lambda number: _int32(number) or None,
    Kind.UINT64: int,
}


def _fixed(tag: int) -> int:
    """Return the bytes of a value of fixed size."""
    if tag & 7 == 1:
        return 8
    if tag & 7 == 5:
        return 4
    raise ProtobufError(f"wire type {tag & 7}, which is not used")


class _Entry(msgspec.Struct, frozen=True):
    key: bytes = b""
    value: bytes = b""


_ENTRY = Table(_Entry, {1: Field("key", Kind.BYTES), 2: Field("value", Kind.BYTES)})


# -- Bodies ----------------------------------------------------------------------------------------


class Message(bytes):
    """An object or event in protobuf, to tell it from JSON."""

    __slots__ = ()


def unwrap(body: bytes) -> tuple[str, bytes]:
    """Return the kind and the message of a body.

    Raises:
        ProtobufError: it is something else.
    """
    if not body.startswith(MAGIC):
        raise ProtobufError("it does not begin with k8s and a zero byte")
    unknown = _UNKNOWN.decode(body[len(MAGIC) :])
    return unknown.type.kind, unknown.raw


class _TypeMeta(msgspec.Struct, frozen=True):
    kind: str = ""


class _Unknown(msgspec.Struct, frozen=True):
    type: _TypeMeta = _TypeMeta()
    raw: bytes = b""


_TYPE_META = Table(_TypeMeta, {2: Field("kind", Kind.TEXT)})
_UNKNOWN = Table(_Unknown, {1: Field("type", _TYPE_META, memo=True), 2: Field("raw", Kind.BYTES)})


def event_parts(data: bytes) -> tuple[str, Message]:
    """Return the type of a WatchEvent and the message of its object.

    Raises:
        ProtobufError: it is malformed.
    """
    event = _EVENT.decode(data)
    return event.type, Message(unwrap(event.object.raw)[1])


class _RawExtension(msgspec.Struct, frozen=True):
    raw: bytes = b""


class _Event(msgspec.Struct, frozen=True):
    type: str = ""
    object: _RawExtension = _RawExtension()


_RAW = Table(_RawExtension, {1: Field("raw", Kind.BYTES)})
_EVENT = Table(_Event, {1: Field("type", Kind.TEXT), 2: Field("object", _RAW)})


class FrameSplitter:
    """Splits the stream of a watch into its events; the same interface as LineSplitter."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._open = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the events that end in this chunk, each a Message.

        Raises:
            LineTooLongError: an event is longer than allowed.
        """
        self._open += chunk
        found: list[bytes] = []
        at = 0
        while len(self._open) - at >= 4:
            length = int.from_bytes(self._open[at : at + 4])
            if length > self._longest:
                raise LineTooLongError(f"an event is longer than {self._longest} bytes")
            if len(self._open) - at - 4 < length:
                break
            found.append(Message(self._open[at + 4 : at + 4 + length]))
            at += 4 + length
        del self._open[:at]
        return found

    @property
    def rest(self) -> bytes:
        """The beginning of an event that has not ended yet."""
        return bytes(self._open)


class ListReader:
    """Takes a list apart while it arrives, so that it is never in memory as a whole."""

    def __init__(self, longest: int) -> None:
        """Make a reader; no field may have more bytes than `longest`."""
        self._longest = longest
        self._open = bytearray()
        self._begun = False
        self._left = -1  # bytes of the list's message that are still to come; -1: not begun
        self.kind = ""
        """Of the list, such as `ServiceList`."""
        self.metadata = b""
        """The ListMeta."""

    def feed(self, chunk: bytes) -> list[Message]:  # noqa: PLR0912 - the format
        """Return the items that end in this chunk.

        Raises:
            ProtobufError: it is not a list.
            LineTooLongError: a field is longer than allowed.
        """
        self._open += chunk
        found: list[Message] = []
        at = 0
        if not self._begun and len(self._open) >= len(MAGIC):
            if self._open[: len(MAGIC)] != MAGIC:
                raise ProtobufError("it does not begin with k8s and a zero byte")
            self._begun, at = True, len(MAGIC)
        while self._begun:
            try:
                tag, start = varint(self._open, at)
                length, start = varint(self._open, start) if tag & 7 == 2 else (0, start)
            except IndexError:
                break
            if tag & 7 != 2:
                raise ProtobufError(f"wire type {tag & 7} in a list")
            outside = self._left <= 0
            if outside and tag >> 3 == 2 and self._left < 0:  # Unknown.raw begins
                self._left = length
                at = start
                continue
            end = start + length
            if length > self._longest:
                raise LineTooLongError(f"an object is longer than {self._longest} bytes")
            if len(self._open) < end:
                break
            if not outside:
                self._left -= end - at
                if self._left < 0:
                    raise ProtobufError("a length beyond the end of the list")
                if tag >> 3 == 2:
                    found.append(Message(self._open[start:end]))
                elif tag >> 3 == 1:
                    self.metadata = bytes(self._open[start:end])
            elif tag >> 3 == 1:
                self.kind = _TYPE_META.decode(bytes(self._open[start:end])).kind
            at = end
        del self._open[:at]
        return found

    @property
    def complete(self) -> bool:
        """Whether the list has ended."""
        return self._left == 0 and not self._open
