"""Small HTTP servers on aiohttp that answer as Go's do: plain 404s, any method, no Server header.

What is answered is decided elsewhere, as an `Answer`; here it is only carried.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import TypeAlias

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from steersman.model.addresses import join_host_port
from steersman.run import quick
from steersman.run.accept import POOL, Clients, Pool, listening_socket

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
_SHUTDOWN_SECONDS = 0.4  # for requests under way; aiohttp may take it twice
_CLIENTS = web.AppKey("clients", Clients)
_QUICK: web.AppKey[quick.Pages] = web.AppKey("quick")


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Drop aiohttp's traceback for each request that is not HTTP: anybody can send those."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_faults = logging.getLogger(f"{__name__}.aiohttp")
_faults.addFilter(_is_our_fault)


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

ShortPage: TypeAlias = Callable[[], Answer]
"""Answers any request in one piece; it neither waits nor raises."""

NOT_FOUND = Answer("404 page not found\n", 404)


class ListenError(OSError):
    """A server's address cannot be bound."""


def short_pages(pages: Mapping[str, ShortPage], otherwise: ShortPage) -> web.Application:
    """Return an application of pages that depend on nothing but their path."""

    def reply(path: str) -> quick.Reply:
        said = pages.get(path, otherwise)()
        return quick.Reply(_body(said), said.status, said.headers)

    def page(found: ShortPage) -> Page:
        return lambda _: found()

    app = application({path: page(found) for path, found in pages.items()}, page(otherwise))
    app[_QUICK] = reply
    return app


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
        with request.app[_CLIENTS].request(request.transport):
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
    return web.Response(body=_body(answer), status=answer.status, headers=answer.headers)


def _body(answer: Answer) -> bytes:
    return answer.body.encode() if isinstance(answer.body, str) else answer.body


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


class Listening:
    """A server that listens; `close` ends it."""

    def __init__(
        self,
        runner: web.AppRunner,
        clients: Clients,
        sock: socket.socket,
        accepting: asyncio.Task[None],
    ) -> None:
        self._runner = runner
        self._clients = clients
        self._sock = sock
        self._accepting = accepting

    @property
    def port(self) -> int:
        """The port that it listens on."""
        number: int = self._sock.getsockname()[1]
        return number

    async def wait(self) -> None:
        """Serve until cancelled; what fails in accepting, a defect, is raised."""
        await asyncio.shield(self._accepting)

    async def close(self) -> None:
        """Stop listening; requests under way have a moment, then every connection is closed."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._sock.close()
        await self._runner.cleanup()
        self._clients.drop_all()


async def listen(app: web.Application, host: str, port: int, pool: Pool = POOL) -> Listening:
    """Start to serve.

    Raises:
        ListenError: the address cannot be bound.
    """
    where = join_host_port(host, port)
    try:
        sock = listening_socket(host, port, pool)
    except OSError as error:
        text = error.strerror or str(error)
        raise ListenError(error.errno, f"listen on {where}: {text}") from error
    clients = app[_CLIENTS] = Clients(pool, app.get(_QUICK))
    runner = web.AppRunner(app, access_log=None, logger=_faults, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    assert runner.server is not None
    accepting = asyncio.create_task(clients.accept(sock, runner.server, f"server at {where}"))
    await asyncio.sleep(0)  # there may be a thousand to open
    return Listening(runner, clients, sock, accepting)


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
    """Serve until cancelled; where the address cannot be bound, try again every 5 s (behaviour 13).

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
            server = await listen(app(), host, port)
        except ListenError as error:
            message = f"{what} cannot {error.strerror}"
            log.error("%s", message)
            on_failure(message)
            if hard_fail:
                raise
            await sleep(RETRY_SECONDS)
            continue
        try:
            await server.wait()
        finally:
            with suppress(OSError):
                await server.close()
