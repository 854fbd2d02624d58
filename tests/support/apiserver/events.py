"""What the test API server does with Events that are posted."""

from __future__ import annotations

import json

from aiohttp import web

from tests.support.apiserver import protobuf
from tests.support.apiserver.answers import answer_status, answer_value
from tests.support.apiserver.world import Kind, Object

EVENT = Kind("Event", "events.k8s.io/v1", "/apis/events.k8s.io/v1/events", {})
PATH = "/apis/events.k8s.io/v1/namespaces/{namespace}/events"
_NEEDED = ("eventTime", "reportingController", "reportingInstance", "action", "reason", "type")


async def take(request: web.Request, known: list[Object]) -> web.Response:
    """Create an Event as the real server does: complete, and no name is used twice."""
    data = await request.read()
    if request.content_type == protobuf.CONTENT_TYPE:
        event = protobuf.decoded("Event", protobuf.message_of(data))
        event |= {"kind": EVENT.kind, "apiVersion": EVENT.api_version}
    else:
        event = json.loads(data)
    metadata = event.get("metadata", {})
    if metadata.get("namespace") != request.match_info["namespace"]:
        return answer_status(request, 400, "the namespace of the object is not that of the request")
    missing = [field for field in _NEEDED if not event.get(field)]
    if missing:
        return answer_status(request, 422, f"Event is invalid: {', '.join(missing)}: Required")
    if any(metadata["name"] == other["metadata"]["name"] for other in known):
        return answer_status(request, 409, f'events "{metadata["name"]}" already exists')
    known.append(event)
    return answer_value(request, event, 201)
