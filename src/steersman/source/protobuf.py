"""Protobuf as Kubernetes uses it: decode messages by tables, take lists and watches apart. No I/O.

    body    "k8s\\0", then Unknown {1: typeMeta, 2: raw}; raw is an object or a list
    watch   for each event: 4 bytes of length, then WatchEvent {1: type, 2: {1: raw}};
            this raw is a body as above
    field   tag (number << 3 | wire type), value
            wire type 0: a varint, 1: 8 bytes, 2: a length and that many bytes, 5: 4 bytes

A `Table` has a row for each field that is read; the others are skipped by their length. The tables
of all kinds are in messages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from steersman.model.kube import ObjectMeta

T = TypeVar("T", bound=msgspec.Struct)

CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\0"
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


class Field(NamedTuple):
    """A row of a Table."""

    name: str
    """Of the struct."""
    read: Callable[[Any], Any]
    """Converts the bytes, or the number of a varint."""
    wire: int = 2
    many: bool = False


class Table(Generic[T]):
    """Decodes one kind of message to a struct."""

    def __init__(
        self,
        struct: type[T],
        fields: Mapping[int, Field],
        make: Callable[..., T] | None = None,
    ) -> None:
        """Make a table of fields by number; `make` replaces the struct's constructor."""
        names = struct.__struct_fields__
        self._paths = dict(zip(names, struct.__struct_encode_fields__, strict=True))
        # Missing fields have the struct's defaults; required ones (metadata) that of their type.
        self._blank: list[Any] = [
            ObjectMeta() if each.required else each.default
            for each in msgspec.structs.fields(struct)
        ]
        self._make = make or struct
        self._numbers = frozenset(fields)
        self._rows = {
            number << 3 | field.wire: (names.index(field.name), field.read, field.many)
            for number, field in fields.items()
        }
        self._names = {number: field.name for number, field in fields.items()}

    def __call__(self, data: bytes) -> T:
        """Decode a message.

        Raises:
            ProtobufError: it is malformed; `path` says where.
        """
        return self.decode(data, 0, self._blank.copy())

    def decode(self, data: bytes, at: int, values: list[Any]) -> T:  # noqa: PLR0912 - wire types
        """Decode a message of which the fields before `at` are decoded: `values` of the struct.

        Raises:
            ProtobufError: it is malformed; `path` says where.
        """
        rows, end, tag = self._rows, len(data), 0
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
            return self._make(*values)
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


text: Callable[[bytes], str] = bytes.decode
"""Decodes UTF-8."""


class _Entry(msgspec.Struct, frozen=True):
    key: bytes = b""
    value: bytes = b""


_ENTRY = Table(_Entry, {1: Field("key", bytes), 2: Field("value", bytes)})


def map_entry(data: bytes) -> tuple[bytes, bytes]:
    """Decode an entry of a map of texts, such as a label."""
    entry = _ENTRY(data)
    return entry.key, entry.value


def _fixed(tag: int) -> int:
    """Return the bytes of a value of fixed size."""
    if tag & 7 == 1:
        return 8
    if tag & 7 == 5:
        return 4
    raise ProtobufError(f"wire type {tag & 7}, which is not used")


# -- Bodies ----------------------------------------------------------------------------------------


class Message(bytes):
    """An object or event in protobuf, to tell it from JSON."""

    __slots__ = ()


def unwrap(body: bytes) -> tuple[str, bytes]:
    """Return the kind and the message of a body.

    Raises:
        ProtobufError: it is something else.
    """
    if not body.startswith(_MAGIC):
        raise ProtobufError("it does not begin with k8s and a zero byte")
    unknown = _UNKNOWN(body[len(_MAGIC) :])
    return unknown.type.kind, unknown.raw


class _TypeMeta(msgspec.Struct, frozen=True):
    kind: str = ""


class _Unknown(msgspec.Struct, frozen=True):
    type: _TypeMeta = _TypeMeta()
    raw: bytes = b""


_TYPE_META = Table(_TypeMeta, {2: Field("kind", text)})
_UNKNOWN = Table(_Unknown, {1: Field("type", Memo(_TYPE_META)), 2: Field("raw", bytes)})


_TYPE = Memo(text)


def event_parts(data: bytes) -> tuple[str, Message]:
    """Return the type of a WatchEvent and the message of its object.

    Four messages are one within the other, so their heads are read here, in the order in which the
    API server writes them: a third of the time that tables take. Anything else is left to those.

    Raises:
        ProtobufError: it is malformed.
    """
    try:
        at = 2 + data[1]
        kind, end = data[2:at], len(data)
        wanted = data[0] == 0x0A and at < 128
        for tag in (0x12, 0x0A):  # the RawExtension, and its only field
            length, after = varint(data, at + 1)
            wanted &= data[at] == tag and after + length == end
            at = after
        wanted &= data.startswith(_MAGIC + b"\x0a", at)
        at += len(_MAGIC) + 1
        at += 1 + data[at]  # typeMeta
        length, after = varint(data, at + 1)
        wanted &= data[at] == 0x12 and after + length <= end
        # Unknown ends with two texts, which are empty.
        if wanted and data[after + length :] == b"\x1a\0\x22\0":
            return _TYPE(kind), Message(data[after : after + length])
    except (IndexError, UnicodeDecodeError):
        pass
    event = _EVENT(data)
    return event.type, Message(unwrap(event.object.raw)[1])


class _RawExtension(msgspec.Struct, frozen=True):
    raw: bytes = b""


class _Event(msgspec.Struct, frozen=True):
    type: str = ""
    object: _RawExtension = _RawExtension()


_EVENT = Table(
    _Event,
    {1: Field("type", text), 2: Field("object", Table(_RawExtension, {1: Field("raw", bytes)}))},
)


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
        if not self._begun and len(self._open) >= len(_MAGIC):
            if self._open[: len(_MAGIC)] != _MAGIC:
                raise ProtobufError("it does not begin with k8s and a zero byte")
            self._begun, at = True, len(_MAGIC)
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
                self.kind = _TYPE_META(bytes(self._open[start:end])).kind
            at = end
        del self._open[:at]
        return found

    @property
    def complete(self) -> bool:
        """Whether the list has ended."""
        return self._left == 0 and not self._open


# -- Encoding --------------------------------------------------------------------------------------


def encoded_varint(number: int) -> bytes:
    """Encode a number that is not negative."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def encoded(value: Mapping[str, Any], fields: Mapping[str, tuple[int, Any]]) -> bytes:
    """Encode a JSON object as a message.

    Args:
        value: texts, numbers and objects; fields that are absent are left out.
        fields: the number of each field, and for an object its own `fields`, or a function that
            encodes the value.

    Raises:
        KeyError: the value has a field that `fields` does not know.
    """
    out = b""
    for name, each in value.items():
        number, how = fields[name]
        if isinstance(each, int):
            out += encoded_varint(number << 3) + encoded_varint(each)
            continue
        data = encoded(each, how) if isinstance(how, dict) else how(each)
        out += encoded_varint(number << 3 | 2) + encoded_varint(len(data)) + data
    return out


def wrapped(api_version: str, kind: str, message: bytes) -> bytes:
    """Return the body of a message."""
    type_meta = {"apiVersion": api_version, "kind": kind}
    fields = {"apiVersion": (1, str.encode), "kind": (2, str.encode)}
    outer = {"type": encoded(type_meta, fields), "raw": message}
    return _MAGIC + encoded(outer, {"type": (1, bytes), "raw": (2, bytes)})
