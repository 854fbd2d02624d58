"""Create Events at the API server, in protobuf or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from steersman.source.client import ApiClient, Connections
from steersman.source.framing import MAGIC
from steersman.source.pace import Timing
from steersman.source.stats import RequestStats, SourceStats


class ApiEventPoster:
    """Creates Events in events.k8s.io/v1; implements `run.events.EventPoster`."""

    def __init__(self, connections: Connections, requests: RequestStats | None = None) -> None:
        """Create it; its requests are counted in `requests`."""
        # A client of its own: a server that refuses Events is not left by the watches.
        stats = SourceStats(requests=requests or RequestStats())
        self._client = ApiClient(connections, stats, Timing())

    async def post_event(self, namespace: str, event: dict[str, Any]) -> None:
        """Create an Event.

        Raises:
            ApiError: no server accepts it.
        """
        path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        await self._client.post_message(path, encoded_event(event), event)


class NoEvents:
    """Discards Events, if there is no API server (manifests); the log has the same information."""

    async def post_event(self, namespace: str, event: dict[str, Any]) -> None:
        """Do nothing."""


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
    return MAGIC + encoded(outer, {"type": (1, bytes), "raw": (2, bytes)})


def _micro_time(moment: str) -> bytes:
    """Encode a MicroTime that is in RFC 3339."""
    when = datetime.fromisoformat(moment)
    fields = {"seconds": (1, None), "nanos": (2, None)}
    return encoded({"seconds": int(when.timestamp()), "nanos": when.microsecond * 1000}, fields)


_EVENT: Mapping[str, tuple[int, Any]] = {
    "metadata": (1, {"name": (1, str.encode), "namespace": (3, str.encode)}),
    "eventTime": (2, _micro_time),
    "reportingController": (4, str.encode),
    "reportingInstance": (5, str.encode),
    "action": (6, str.encode),
    "reason": (7, str.encode),
    "regarding": (
        8,
        {
            "kind": (1, str.encode),
            "namespace": (2, str.encode),
            "name": (3, str.encode),
            "uid": (4, str.encode),
            "apiVersion": (5, str.encode),
        },
    ),
    "note": (10, str.encode),
    "type": (11, str.encode),
}


def encoded_event(event: Mapping[str, Any]) -> bytes:
    """Return the body that creates an events.k8s.io/v1 Event, given as JSON has it."""
    fields = {name: each for name, each in event.items() if name not in ("apiVersion", "kind")}
    return wrapped("events.k8s.io/v1", "Event", encoded(fields, _EVENT))
