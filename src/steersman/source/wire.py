"""The outlines of lists and of watch events, as far as following a kind needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from steersman.source.client import ApiError, Status

_INITIAL_END = "k8s.io/initial-events-end"


class RelistError(Exception):
    """What was watched cannot be resumed: only a fresh list helps. The message says why."""


class Resource(msgspec.Struct, frozen=True):
    """A kind and which of its objects are wanted (behaviour 2)."""

    kind: str
    path: str
    selectors: Mapping[str, str] = {}
    optional: bool = False
    """The others are served without it: where it is absent or forbidden, it counts as empty."""


class ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    """`metadata` of a list."""

    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class ObjectList(msgspec.Struct, frozen=True):
    """A list, or a page of one; the items are still JSON."""

    kind: str
    metadata: ListMeta
    items: msgspec.Raw = msgspec.Raw(b"[]")


class Event(msgspec.Struct, frozen=True):
    """A line of a watch; the object is still JSON."""

    type: str
    object: msgspec.Raw


class Outline(msgspec.Struct, frozen=True, rename="camel"):
    """`metadata` of any object, also of a malformed one."""

    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    annotations: Any = None
    """A dict, unless malformed: that must not hide the name."""


class _Outlined(msgspec.Struct, frozen=True):
    metadata: Outline = Outline()


_LIST = msgspec.json.Decoder(ObjectList)
_EVENT = msgspec.json.Decoder(Event)
_OUTLINED = msgspec.json.Decoder(_Outlined)
_STATUS = msgspec.json.Decoder(Status)


def decode_list(kind: str, body: bytes | bytearray) -> ObjectList:
    """Decode a page and see that it is one: taking `{}` for a list would empty the world.

    Raises:
        ApiError, msgspec.DecodeError: it is something else.
    """
    page = _LIST.decode(body)
    wanted = f"{kind}List"
    if page.kind != wanted:
        raise ApiError("malformed", f"asked for a {wanted}, was given a {page.kind!r}")
    if not page.metadata.resource_version:
        raise ApiError("malformed", f"the {wanted} has no resourceVersion")
    if bytes(memoryview(page.items)[:4]) == b"null":  # Go's empty list
        return msgspec.structs.replace(page, items=msgspec.Raw(b"[]"))
    return page


def decode_event(line: bytes) -> Event:
    """Decode a line of a watch.

    Raises:
        ApiError: it is an ERROR event.
        msgspec.DecodeError: it is something else.
    """
    event = _EVENT.decode(line)
    if event.type == "ERROR":
        raise _STATUS.decode(event.object).error()
    return event


def outline(raw: msgspec.Raw) -> Outline:
    """Name and resourceVersion, as far as they can be made out."""
    try:
        return _OUTLINED.decode(raw).metadata
    except (ValueError, RecursionError):
        return Outline()


def initial_end(event: Event) -> str:
    """Return the resourceVersion of the bookmark that ends the initial events.

    Raises:
        ApiError: it is another bookmark.
    """
    meta = outline(event.object)
    notes = meta.annotations
    if not isinstance(notes, dict) or notes.get(_INITIAL_END) != "true":
        raise ApiError("no_watch_list", "a bookmark before the end of the initial events")
    if not meta.resource_version:
        raise ApiError("malformed", "the bookmark has no resourceVersion")
    return meta.resource_version
