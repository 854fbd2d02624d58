"""Small HTTP servers on aiohttp that answer as Go's do: plain 404s, any method, no Server header.

A page returns an `Answer`. Pages that are expensive to build go through a `PageBuilder`: one at a
time, in a thread, and shared by all clients that ask for the same one. However many clients ask how
often, building takes a small share of one core, and cannot starve syncs and health checks. A page
is kept compressed while it is sent: `/state` of a large cluster has 9 MB, which slow clients must
not multiply and the heap would not return.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
import zlib
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TypeAlias

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from steersman.model.addresses import join_host_port
from steersman.run.connections import (
    POOL,
    ClientPool,
    Clients,
    ListenError,
    Reply,
    ReplyTo,
    listening_socket,
)

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""Seconds between two attempts to bind an address (behaviour 13)."""
_SHUTDOWN_SECONDS = 0.4  # for requests under way; aiohttp may take it twice
_PAUSE, _LONGEST_PAUSE = 9, 2.0
"""After a page took t seconds, the next one begins 9 t later, but after 2 seconds at most."""
_MOST_WAITING = 8
"""Different pages that may wait to be built."""
RETRY_AFTER = 5
"""Seconds after which a rejected client may ask again."""
CLIENTS = web.AppKey("clients", Clients)
"""The clients of an application that is served, set by `listen`."""
_SHORT: web.AppKey[ReplyTo] = web.AppKey("short")

_faults = logging.getLogger(f"{__name__}.aiohttp")
# No traceback for each request that is not HTTP: anyone can send those.
_faults.addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
)


class Answer(msgspec.Struct, frozen=True):
    """The answer of a server to a request."""

    body: str | bytes = ""
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"
    nosniff: bool = True
    """Browsers must not guess another type: upstream says so nearly everywhere."""
    more_headers: Mapping[str, str] = {}
    pieces: Iterator[bytes] | None = None
    """The body in pieces, none of them empty but the last: made in a thread, as it is sent."""

    @property
    def headers(self) -> dict[str, str]:
        """All headers apart from those of the protocol."""
        sniffing = {"X-Content-Type-Options": "nosniff"} if self.nosniff else {}
        return {"Content-Type": self.content_type, **sniffing, **self.more_headers}

    @property
    def content(self) -> bytes:
        """The body as bytes."""
        return self.body.encode() if isinstance(self.body, str) else self.body


Page: TypeAlias = Callable[[web.Request], Awaitable[Answer] | Answer]
"""Answers the requests for a path."""

ShortPage: TypeAlias = Callable[[], Answer]
"""Answers any request in one piece; it neither waits nor raises."""

NOT_FOUND = Answer("404 page not found\n", 404)


# Applications


def short_pages(pages: Mapping[str, ShortPage], otherwise: ShortPage) -> web.Application:
    """Return an application of pages that depend on nothing but their path."""

    def reply(path: str) -> Reply:
        answer = pages.get(path, otherwise)()
        return Reply(answer.content, answer.status, answer.headers)

    def page(found: ShortPage) -> Page:
        return lambda _: found()

    app = application({path: page(found) for path, found in pages.items()}, page(otherwise))
    app[_SHORT] = reply
    return app


def application(pages: Mapping[str, Page], otherwise: Page | None = None) -> web.Application:
    """Return an application of pages by path; a path that ends in `/` is a prefix."""
    # The longest prefix wins, as in Go's ServeMux.
    prefixes = sorted((path for path in pages if path.endswith("/")), key=len, reverse=True)

    def find(path: str) -> Page | None:
        if path in pages:
            return pages[path]
        longest = next((prefix for prefix in prefixes if path.startswith(prefix)), None)
        return pages[longest] if longest is not None else otherwise

    async def serve(request: web.Request) -> web.StreamResponse:
        page = find(request.path)
        with request.app[CLIENTS].request(request.transport):
            found = page(request) if page else NOT_FOUND
            answer = found if isinstance(found, Answer) else await found
            # A body in one piece, or in pieces that are made in a thread while they are sent.
            status, headers = answer.status, answer.headers
            if answer.pieces is None:
                return web.Response(body=answer.content, status=status, headers=headers)
            piece = await asyncio.to_thread(next, answer.pieces, b"")  # a failure is still a 500
            response = web.StreamResponse(status=status, headers=headers)
            await response.prepare(request)
            while piece and request.method != "HEAD":
                await response.write(piece)
                piece = await asyncio.to_thread(next, answer.pieces, b"")
            await response.write_eof()
            return response

    async def remove_server_header(_: web.Request, response: web.StreamResponse) -> None:
        response.headers.pop("Server", None)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", serve)
    app.on_response_prepare.append(remove_server_header)
    return app


class TooManyPagesError(Exception):
    """Too many different pages wait to be built."""


class PageBuilder:
    """Builds expensive pages, one at a time."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Create an idle builder; the arguments are for tests."""
        self._clock = clock
        self._sleep = sleep
        self._one = asyncio.Lock()
        self._not_before = clock()
        self._wanted: dict[Hashable, asyncio.Task[tuple[bytes, ...]]] = {}

    async def page(
        self, key: Hashable, make: Callable[[], Awaitable[Iterable[bytes]]]
    ) -> Iterator[bytes]:
        """Return the pieces of a page, built now or for an earlier client that still waits.

        Args:
            key: equal for the same page.
            make: starts to build it on the event loop; the pieces are then made in a thread.

        Raises:
            TooManyPagesError: too many other pages wait.
        """
        task = self._wanted.get(key)
        if task is None:
            if len(self._wanted) >= _MOST_WAITING:
                raise TooManyPagesError
            task = self._wanted[key] = asyncio.create_task(self._build(make))

            def done(task: asyncio.Task[tuple[bytes, ...]]) -> None:
                del self._wanted[key]
                if not task.cancelled():
                    task.exception()  # mark it as retrieved: every client may have gone

            task.add_done_callback(done)
        return map(zlib.decompress, await asyncio.shield(task))

    async def _build(self, make: Callable[[], Awaitable[Iterable[bytes]]]) -> tuple[bytes, ...]:
        # The pause before the next page is in proportion to the time that the last one took.
        async with self._one:
            await self._sleep(max(0.0, self._not_before - self._clock()))
            began = self._clock()
            try:
                pieces = await make()
                return await asyncio.to_thread(
                    lambda: tuple(zlib.compress(piece, 1) for piece in pieces)
                )
            finally:
                ended = self._clock()
                self._not_before = ended + min(_PAUSE * (ended - began), _LONGEST_PAUSE)


# Servers


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
        """Serve until cancelled; raise the error of a failed accept, a defect."""
        await asyncio.shield(self._accepting)

    async def close(self) -> None:
        """Stop listening; requests under way have a moment, then every connection is closed."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._sock.close()
        await self._runner.cleanup()
        self._clients.drop_all()


async def listen(
    app: web.Application,
    host: str,
    port: int,
    pool: ClientPool = POOL,
    tls: ssl.SSLContext | None = None,
) -> Listening:
    """Start to serve, with TLS if there is a context for it.

    Raises:
        ListenError: the address cannot be bound.
    """
    where = join_host_port(host, port)
    try:
        sock = listening_socket(host, port, pool)
    except OSError as error:
        text = error.strerror or str(error)
        raise ListenError(error.errno, f"listen on {where}: {text}") from error
    clients = app[CLIENTS] = Clients(pool, app.get(_SHORT), tls)
    runner = web.AppRunner(app, access_log=None, logger=_faults, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    assert runner.server is not None
    accepting = asyncio.create_task(clients.accept(sock, runner.server, f"server at {where}"))
    await asyncio.sleep(0)  # yield to the loop: there may be a thousand servers to open
    return Listening(runner, clients, sock, accepting)


async def keep_serving(
    app: Callable[[], web.Application],
    host: str,
    port: int,
    *,
    what: str,
    on_failure: Callable[[str], None] = lambda _message: None,
    hard_fail: bool = False,
    pool: ClientPool = POOL,
    tls: ssl.SSLContext | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Serve until cancelled; if the address cannot be bound, retry every 5 s (behaviour 13).

    Args:
        app: makes the application, once for each attempt.
        host: address to bind.
        port: port to bind.
        what: name of the server, for messages.
        on_failure: called with each failure, to post an Event.
        hard_fail: raise the failure instead of retrying (`bindAddressHardFail`).
        pool: bounds its clients.
        tls: the context of HTTPS; None for HTTP.
        sleep: for tests.

    Raises:
        ListenError: with `hard_fail`, the address cannot be bound.
    """
    while True:
        try:
            server = await listen(app(), host, port, pool, tls)
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
