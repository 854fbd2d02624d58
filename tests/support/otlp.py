"""A tiny OTLP receiver: keeps the spans that a real exporter sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from gzip import decompress
from typing import Any

from aiohttp import web
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Received:
    """The spans that came so far, and the resource of the last ones."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.resource: dict[str, str] = {}
        self.news = asyncio.Event()

    async def serve(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip":
            body = decompress(body)
        found = MessageToDict(ExportTraceServiceRequest.FromString(body))
        for resource in found["resourceSpans"]:
            self.resource = {
                each["key"]: each["value"].get("stringValue", "")
                for each in resource["resource"]["attributes"]
            }
            for scope in resource["scopeSpans"]:
                self.spans += scope["spans"]
        self.news.set()
        return web.Response(content_type="application/x-protobuf")

    def named(self, name: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["name"] == name]


@asynccontextmanager
async def otlp_receiver(port: int = 0) -> AsyncIterator[tuple[Received, str]]:
    """Serve OTLP over HTTP on loopback; yields what came, and the URL."""
    received, app = Received(), web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/traces", received.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield received, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
