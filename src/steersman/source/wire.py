"""The API server's lists and watches as values: pages, lines, events and errors. No I/O.

    list    {"kind": "ServiceList", "metadata": {"resourceVersion", "continue"}, "items": [...]}
    watch   {"type": "ADDED" | "MODIFIED" | "DELETED" | "BOOKMARK" | "ERROR", "object": {...}}
            one per line

or the same in protobuf (framing.py); the content type of an answer tells which. Objects stay
encoded here (objects.py). All failures become an `ApiError` with a short reason; when to try again
is decided in reflector.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from steersman.model.addresses import without_password
from steersman.source.framing import (
    CONTENT_TYPE,
    FrameSplitter,
    LineTooLongError,
    Message,
    event_parts,
)
from steersman.source.protobuf import Entries, table

MAX_LINE = 8 << 20
"""Maximum bytes of a line; etcd refuses objects above 1.5 MiB, so no event is as long."""
_MAX_SHOWN = 400  # characters of a server's text that are shown
_INITIAL_END = "k8s.io/initial-events-end"


class ApiError(Exception):
    """A request failed, or was answered by something other than requested."""

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        status: int = 0,
        retry_after: float = 0.0,
        causes: Sequence[str] = (),
    ) -> None:
        """Make an error.

        Args:
            reason: a short word for metrics, such as `http_403`.
            status: HTTP status (or code of an ERROR event); 0 if there is none.
            causes: reasons in the details of a Status, such as `ResourceVersionTooLarge`.
        """
        super().__init__(message)
        self.reason = reason
        self.status = status
        self.retry_after = retry_after
        self.causes = tuple(causes)

    @property
    def other_history(self) -> bool:
        """Whether the server has not reached the resourceVersion that was asked for."""
        return "ResourceVersionTooLarge" in self.causes


class RelistError(Exception):
    """The watch cannot be resumed: a new list is needed. The message says why."""


def shown(text: str) -> str:
    """Return a server's text as one line, shortened and without passwords."""
    words = without_password(" ".join(text.split()))
    return words if len(words) <= _MAX_SHOWN else f"{words[:_MAX_SHOWN]}..."


class _Cause(msgspec.Struct, frozen=True):
    reason: str | None = None


class _Details(msgspec.Struct, frozen=True, rename="camel"):
    retry_after_seconds: float | None = None
    causes: list[_Cause] | None = None


class Status(msgspec.Struct, frozen=True):
    """A Kubernetes `Status` object, as far as it is read."""

    message: str | None = None
    reason: str | None = None
    code: int | None = None
    details: _Details | None = None

    def error(self, retry_after: float = 0.0, status: int = 0) -> ApiError:
        """Convert it to an ApiError; the HTTP status and header, if given, take precedence."""
        code = status or self.code or 0
        details = self.details or _Details()
        return ApiError(
            # A label of metrics, so the server must not be able to invent any number of them.
            f"http_{code}" if 100 <= code <= 599 else "http_other",
            f"{code}: {shown(self.message or self.reason or 'no reason given')}",
            status=code,
            retry_after=retry_after or details.retry_after_seconds or 0.0,
            causes=[cause.reason for cause in details.causes or () if cause.reason],
        )


class Resource(msgspec.Struct, frozen=True):
    """A kind of object to list and watch (behaviour 2)."""

    kind: str
    path: str
    selectors: Mapping[str, str] = {}
    """`labelSelector` and `fieldSelector`."""
    optional: bool = False
    """Whether it counts as empty if the server does not have it or forbids it."""


class ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    """`metadata` of a list."""

    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class ObjectList(msgspec.Struct, frozen=True):
    """A list, or a page of one; the items are still JSON."""

    kind: str
    metadata: ListMeta
    items: msgspec.Raw = msgspec.Raw(b"[]")


class WatchEvent(NamedTuple):
    """An event of a watch; the object is still JSON or protobuf."""

    type: str
    object: msgspec.Raw | Message


class PartialObjectMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """`metadata` of any object, also of a malformed one."""

    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    annotations: Any = None
    """A dict or a BookmarkAnnotations, unless malformed: a malformed one must not hide the name."""


class BookmarkAnnotations(msgspec.Struct, frozen=True):
    """Annotations from protobuf, as far as they are read."""

    initial_end: str | None = msgspec.field(name=_INITIAL_END, default=None)


class _PartialObject(msgspec.Struct, frozen=True):
    metadata: PartialObjectMetadata = PartialObjectMetadata()


class _JsonEvent(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


_LIST = msgspec.json.Decoder(ObjectList)
_EVENT = msgspec.json.Decoder(_JsonEvent)
_PARTIAL = msgspec.json.Decoder(_PartialObject)
_STATUS = msgspec.json.Decoder(Status)

# The same in protobuf.
table(_Cause, pointers="reason", reason=1)
table(_Details, causes=4, retry_after_seconds=5)
_STATUS_TABLE = table(Status, pointers="message reason", message=3, reason=4, details=5, code=6)
# Fields around a malformed one are skipped, so that the name is found if it is well formed itself.
table(PartialObjectMetadata, reads={"annotations": Entries(BookmarkAnnotations)},
      name=1, namespace=3, resource_version=6, annotations=12)  # fmt: skip
_PARTIAL_TABLE = table(_PartialObject, metadata=1)
_LIST_META_TABLE = table(ListMeta, resource_version=2, continue_=3)


def decode_list(kind: str, body: bytes | bytearray) -> ObjectList:
    """Decode a page and check that it is one: accepting `{}` as a list would delete everything.

    Raises:
        ApiError, msgspec.DecodeError: it is something else.
    """
    page = _LIST.decode(body)
    _check_list(kind, page.kind, page.metadata)
    if bytes(memoryview(page.items)[:4]) == b"null":  # Go's empty list
        return msgspec.structs.replace(page, items=msgspec.Raw(b"[]"))
    return page


def decode_list_meta(kind: str, found: str, metadata: bytes) -> ListMeta:
    """Decode the ListMeta of a page in protobuf, and check the page as `decode_list` does.

    Raises:
        ApiError, ProtobufError: it is something else.
    """
    decoded = _LIST_META_TABLE.decode(metadata)
    _check_list(kind, found, decoded)
    return decoded


def _check_list(kind: str, found: str, metadata: ListMeta) -> None:
    wanted = f"{kind}List"
    if found != wanted:
        raise ApiError("malformed", f"expected a {wanted}, got a {found!r}")
    if not metadata.resource_version:
        raise ApiError("malformed", f"the {wanted} has no resourceVersion")


def decode_event(event: bytes) -> WatchEvent:
    """Decode a line of a watch, or its Message.

    Raises:
        ApiError: it is an ERROR event.
        msgspec.DecodeError, ProtobufError: it is something else.
    """
    if isinstance(event, Message):
        decoded = WatchEvent(*event_parts(event))
    else:
        line = _EVENT.decode(event)
        decoded = WatchEvent(line.type, line.object)
    if decoded.type == "ERROR":
        raise decode_status(decoded.object).error()
    return decoded


def decode_status(raw: bytes | msgspec.Raw) -> Status:
    """Decode a Status, in JSON or a Message.

    Raises:
        msgspec.DecodeError, ProtobufError: it is something else.
    """
    if isinstance(raw, Message):
        return _STATUS_TABLE.decode(raw)
    return _STATUS.decode(raw)


def decode_metadata(raw: bytes | msgspec.Raw) -> PartialObjectMetadata:
    """Return the name and resourceVersion of an object, as far as they are well formed."""
    try:
        if isinstance(raw, Message):
            return _PARTIAL_TABLE.decode(raw).metadata
        return _PARTIAL.decode(raw).metadata
    except (ValueError, RecursionError):
        return PartialObjectMetadata()


def initial_end(event: WatchEvent) -> str:
    """Return the resourceVersion of the bookmark that ends the initial events (KEP-3157).

    Raises:
        ApiError: it is another bookmark.
    """
    meta = decode_metadata(event.object)
    annotations = meta.annotations
    if isinstance(annotations, BookmarkAnnotations):
        ended = annotations.initial_end
    else:
        ended = annotations.get(_INITIAL_END) if isinstance(annotations, dict) else None
    if ended != "true":
        raise ApiError("no_watch_list", "a bookmark before the end of the initial events")
    if not meta.resource_version:
        raise ApiError("malformed", "the bookmark has no resourceVersion")
    return meta.resource_version


def splitter_for(content_type: str) -> LineSplitter | FrameSplitter:
    """Return what splits a watch of this content type into events for `decode_event`."""
    return FrameSplitter(MAX_LINE) if content_type == CONTENT_TYPE else LineSplitter()


class LineSplitter:
    """Splits a stream of bytes into lines.

    A line may be long: one EndpointSlice of 1,000 endpoints has 260 kB.
    """

    def __init__(self, max_line: int = MAX_LINE) -> None:
        self._max = max_line
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines that end in this chunk, without newlines and without empty ones.

        Raises:
            LineTooLongError: a line is longer than allowed, whether it ended or not.
        """
        # All parts but the last one end a line. Parts of a line that spans chunks are joined once,
        # when it ends: appending to bytes would copy a long line again for each chunk.
        *lines, rest = chunk.split(b"\n")
        if lines and self._parts:
            lines[0] = b"".join((*self._parts, lines[0]))
            self._parts, self._size = [], 0
        if rest:
            self._parts.append(rest)
            self._size += len(rest)
        if self._size > self._max or any(len(line) > self._max for line in lines):
            raise LineTooLongError(f"a line is longer than {self._max} bytes")
        return [line for line in lines if line and not line.isspace()]

    @property
    def rest(self) -> bytes:
        """The beginning of a line that has not ended yet."""
        return b"".join(self._parts)
