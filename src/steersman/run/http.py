"""Small HTTP servers on aiohttp that answer as Go's do: plain 404s, any method, no Server header.

What is answered is decided elsewhere, as an `Answer`; here it is only carried.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import TypeAlias

import msgspec
from aiohttp import web

from steersman.model.addresses import join_host_port

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
_SHUTDOWN_SECONDS = 1.0


class Answer(msgspec.Struct, frozen=True):
    """What a server says."""

    body: str | bytes = ""
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"
    nosniff: bool = True
    """Browsers are not to guess another type: upstream says so nearly everywhere."""
    more_headers: Mapping[str, str] = {}
    pieces: Iterator[bytes] | None = None
    """The body piece by piece, none of them empty but the last: made in a thread, as it is sent."""

    @property
    def headers(self) -> dict[str, str]:
        """All headers that are not the server's own business."""
        sniffing = {"X-Content-Type-Options": "nosniff"} if self.nosniff else {}
        return {"Content-Type": self.content_type, **sniffing, **self.more_headers}


Page: TypeAlias = Callable[[web.Request], Awaitable[Answer] | Answer]
"""Answers the requests for a path."""

NOT_FOUND = Answer("404 page not found\n", 404)


class ListenError(OSError):
    """A server's address cannot be bound."""


def application(pages: Mapping[str, Page], otherwise: Page | None = None) -> web.Application:
    """Return an application of pages by path; a path that ends in `/` is a prefix."""
    prefixes = sorted((path for path in pages if path.endswith("/")), key=len, reverse=True)

    def find(path: str) -> Page | None:
        if path in pages:
            return pages[path]
        longest = next((prefix for prefix in prefixes if path.startswith(prefix)), None)
        return pages[longest] if longest is not None else otherwise

    async def serve(request: web.Request) -> web.StreamResponse:
        page = find(request.path)
        said = page(request) if page else NOT_FOUND
        answer = said if isinstance(said, Answer) else await said
        if answer.pieces is not None:
            return await _send(request, answer, answer.pieces)
        return _response(answer)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", serve)
    app.on_response_prepare.append(_without_server)
    return app


def _response(answer: Answer) -> web.Response:
    body = answer.body.encode() if isinstance(answer.body, str) else answer.body
    return web.Response(body=body, status=answer.status, headers=answer.headers)


async def _send(
    request: web.Request, answer: Answer, pieces: Iterator[bytes]
) -> web.StreamResponse:
    piece = await asyncio.to_thread(next, pieces, b"")  # what fails here is still a plain 500
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    await response.prepare(request)
    while piece and request.method != "HEAD":
        await response.write(piece)
        piece = await asyncio.to_thread(next, pieces, b"")
    await response.write_eof()
    return response


async def _without_server(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.pop("Server", None)


async def listen(app: web.Application, host: str, port: int) -> web.AppRunner:
    """Start to serve; `cleanup()` of what is returned ends it.

    Raises:
        ListenError: the address cannot be bound.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        where = join_host_port(host, port)
        text = error.strerror or str(error)
        raise ListenError(error.errno, f"listen on {where}: {text}") from error
    return runner


async def keep_serving(
    app: Callable[[], web.Application],
    host: str,
    port: int,
    *,
    what: str,
    on_failure: Callable[[str], None] = lambda _message: None,
    hard_fail: bool = False,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Serve until cancelled; where the address cannot be bound, try again every 5 s (SPEC 13).

    Args:
        app: makes the application, afresh for each try.
        host: address to bind.
        port: port to bind.
        what: name of the server, for messages.
        on_failure: told of each failure, to post an Event.
        hard_fail: end with the failure instead of trying again (`bindAddressHardFail`).
        sleep: for tests.

    Raises:
        ListenError: with `hard_fail`, the address cannot be bound.
    """
    while True:
        try:
            runner = await listen(app(), host, port)
        except ListenError as error:
            message = f"{what} cannot {error.strerror}"
            log.error("%s", message)
            on_failure(message)
            if hard_fail:
                raise
            await sleep(RETRY_SECONDS)
            continue
        try:
            await asyncio.Event().wait()
        finally:
            with suppress(OSError):
                await runner.cleanup()
