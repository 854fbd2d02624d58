"""How the API server frames protobuf: bodies, events of a watch, items of a list. No I/O.

body    "k8s\\0", then Unknown {1: typeMeta, 2: raw}; raw is an object or a list
watch   for each event: 4 bytes of length, then WatchEvent {1: type, 2: {1: raw}};
        this raw is a body as above
"""

from __future__ import annotations

import msgspec

from steersman.source.protobuf import ProtobufError, table

CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
MAGIC = b"k8s\0"


class LineTooLongError(ValueError):
    """A part of a list or watch is longer than any object can be."""


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


_TYPE_META = table(_TypeMeta, kind=2)
_UNKNOWN = table(_Unknown, memo="type", type=1, raw=2)


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


table(_RawExtension, raw=1)
_EVENT = table(_Event, type=1, object=2)


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
