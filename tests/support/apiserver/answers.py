"""How the test API server words its answers: headers, Status objects, lines of a watch."""

from __future__ import annotations

import gzip
import json
import uuid

from aiohttp import web

from tests.support.apiserver import protobuf
from tests.support.apiserver.http2 import SUBJECT
from tests.support.apiserver.world import Object, Selector, continue_token, status

GZIP_ABOVE = 128 << 10
JSON_ONLY = web.RequestKey("json_only", bool)
"""Whether protobuf is not spoken."""


def verb_of(request: web.Request) -> str:
    if request.query.get("watch") not in ("true", "1"):
        return "list"
    return "watchlist" if request.query.get("sendInitialEvents") == "true" else "watch"


def selector_of(request: web.Request) -> Selector:
    query = request.query
    fields = query.get("fieldSelector", "")
    if namespace := request.match_info.get("namespace"):
        fields = ",".join(filter(None, (fields, f"metadata.namespace={namespace}")))
    return Selector(query.get("labelSelector", ""), fields)


def subject_of(request: web.Request) -> str:
    if subject := request.headers.get(SUBJECT):
        return subject
    certificate = request.get_extra_info("peercert") or {}
    return str(dict(pair for (pair,) in certificate.get("subject", ())).get("commonName", ""))


def _headers() -> dict[str, str]:
    return {"Audit-Id": str(uuid.uuid4()), "Cache-Control": "no-cache, private"}


def wants_protobuf(request: web.Request) -> bool:
    """Whether protobuf is the first content type that the client accepts, and spoken here."""
    accepted = request.headers.get("Accept", "").startswith(protobuf.CONTENT_TYPE)
    return accepted and not request.get(JSON_ONLY, False)


async def open_stream(request: web.Request) -> web.StreamResponse:
    stream = f"{protobuf.CONTENT_TYPE};stream=watch"
    kind = stream if wants_protobuf(request) else "application/json"
    response = web.StreamResponse(headers={**_headers(), "Content-Type": kind})
    response.enable_chunked_encoding()
    await response.prepare(request)
    return response


def answer_value(
    request: web.Request, value: Object, code: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """Answer as the real server does: indented for curl, gzipped where long."""
    if wants_protobuf(request):
        kind, body = protobuf.CONTENT_TYPE, protobuf.body_of(value)
    else:
        pretty = code != 200 or request.headers.get("User-Agent", "").startswith("curl")
        indent, separators = (2, None) if pretty else (None, (",", ":"))
        kind = "application/json"
        body = json.dumps(value, indent=indent, separators=separators).encode()
    all_headers = {**_headers(), **(headers or {}), "Content-Type": kind}
    if len(body) > GZIP_ABOVE and "gzip" in request.headers.get("Accept-Encoding", ""):
        body = gzip.compress(body, 1)
        all_headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return web.Response(body=body, status=code, headers=all_headers)


def answer_status(
    request: web.Request,
    code: int,
    message: str = "",
    *,
    details: Object | None = None,
    headers: dict[str, str] | None = None,
) -> web.Response:
    return answer_value(request, status(code, message, details=details), code, headers)


def answer_too_large(request: web.Request, wanted: int, current: int) -> web.Response:
    reason = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
    return answer_status(
        request,
        504,
        f"Timeout: Too large resource version: {wanted}, current: {current}",
        details={"causes": [reason], "retryAfterSeconds": 1},
        headers={"Retry-After": "1"},
    )


def answer_expired(request: web.Request, start: str) -> web.Response:
    message = (
        "The provided continue parameter is too old to display a consistent list result. You can "
        "start a new list without the continue parameter, or use the continue token in this "
        "response to retrieve the remainder of the results."
    )
    answer = status(410, message)
    fresh = tuple(start.rstrip("\0").rpartition("/")[::2])
    answer["metadata"] = {"continue": continue_token(-1, (fresh[0], fresh[1]))}
    return answer_value(request, answer, 410)


def too_old(since: int, current: int) -> Object:
    text = f"too old resource version: {since} ({current})"
    return {"type": "ERROR", "object": status(410, text)}


def encoded_event(event: Object, request: web.Request) -> bytes:
    """An event of a watch, as the client wants it."""
    if wants_protobuf(request):
        return protobuf.frame_of(event)
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def bare(obj: Object) -> Object:
    """As in a list: without kind and apiVersion."""
    return {name: value for name, value in obj.items() if name not in ("kind", "apiVersion")}
