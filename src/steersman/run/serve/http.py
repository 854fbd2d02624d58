"""Small HTTP servers that answer as Go's do: plain 404s, any method, no Server header.

    bytes --data_received--> unread --h11--> Request --page--> Answer --h11--> transport

h11 knows the protocol and does no input or output; a Connection moves the bytes. It is one task,
which answers a client's requests in turn. What the client sends meanwhile waits: some of it here,
the rest in the kernels. An answer is sent piece by piece, each made when the one before has been
taken, so a client that reads slowly costs one piece of memory. `Clients` drops it in time, and one
that sends slowly, too.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple, TypeAlias
from urllib.parse import parse_qsl, unquote

import h11
import msgspec

from steersman.model.addresses import join_host_port
from steersman.model.findings import quoted
from steersman.run.serve.connections import (
    POOL,
    ClientPool,
    Clients,
    ListenError,
    listening_socket,
    next_turn,
)

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""Seconds between two attempts to bind an address (behaviour 13)."""
_MOST_HEAD = 16_384
"""Bytes of a request without its body."""
_MOST_BODY = 1 << 20
_MOST_UNREAD = 16_384
"""Bytes that wait here for a client's turn, and that are read at a time: it has twice as many."""
_FED = 1024
"""Bytes that h11 gets at a time: 170 of the tiniest pieces of a body, for a millisecond or two."""
_AUTHORITY = re.compile("https?://[^/?]*", re.IGNORECASE)


class _GoneError(Exception):
    """The client has closed the connection, or takes nothing from it."""


class Request:
    """A request: its head, and the body for a page that wants to read it."""

    def __init__(
        self,
        head: h11.Request,
        event: Callable[[], Awaitable[object]],
        gone: Callable[[], bool],
        most_body: int = _MOST_BODY,
    ) -> None:
        """Take a head apart; `event` returns the next part of the body, and then its end."""
        self._event = event
        self._most_body = most_body
        self.gone = gone
        """Returns whether the client has left, or sends no more."""
        self.method = head.method.decode()
        self.target = _AUTHORITY.sub("", head.target.decode(), count=1)
        """Path and query as they came."""
        path, _, query = self.target.partition("?")
        self.path = unquote(path)
        self.arguments = parse_qsl(query, keep_blank_values=True) if query else []
        """All of the query, in order."""
        self.query: Mapping[str, str] = dict(reversed(self.arguments))
        """The first value of each name."""
        self.headers: Mapping[str, str] = {
            name.decode(): value.decode(errors="surrogateescape")
            for name, value in reversed(head.headers)
        }
        """The first value of each, by its name in lower case."""

    async def read(self) -> bytes:
        """Return the body.

        Raises:
            h11.RemoteProtocolError: it is broken or too large; the answer says so.
        """
        found = bytearray()
        while isinstance(event := await self._event(), h11.Data):
            found += event.data
            if len(found) > self._most_body:
                raise h11.RemoteProtocolError("too large", 413)
        return bytes(found)


class Answer(msgspec.Struct, frozen=True):
    """The answer of a server to a request."""

    body: str | bytes = ""
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"
    nosniff: bool = True
    """Browsers must not guess another type: upstream says so nearly everywhere."""
    more_headers: Mapping[str, str] = {}
    pieces: Iterator[bytes] | AsyncGenerator[bytes] | None = None
    """The body in pieces, each made when the last one was sent, by an Iterator in a thread; an
    empty piece ends it."""
    patience: float | None = None
    """Seconds after which a client is dropped that does not take a piece; None for no limit."""

    @property
    def headers(self) -> dict[str, str]:
        """All headers apart from those of the protocol."""
        sniffing = {"X-Content-Type-Options": "nosniff"} if self.nosniff else {}
        return {"Content-Type": self.content_type, **sniffing, **self.more_headers}

    @property
    def content(self) -> bytes:
        """The body as bytes."""
        return self.body.encode() if isinstance(self.body, str) else self.body


Page: TypeAlias = Callable[[Request], Awaitable[Answer] | Answer]
"""Answers the requests for a path."""

NOT_FOUND = Answer("404 page not found\n", 404)


class App(NamedTuple):
    """What a server answers."""

    page: Page
    most_body: int = _MOST_BODY
    """Bytes of a body; a larger one is refused when a page reads it."""


def application(pages: Mapping[str, Page], otherwise: Page = lambda _: NOT_FOUND) -> App:
    """Return an application of pages by path; a path that ends in `/` is a prefix."""
    # The longest prefix wins, as in Go's ServeMux.
    prefixes = sorted((path for path in pages if path.endswith("/")), key=len, reverse=True)

    def page(request: Request) -> Awaitable[Answer] | Answer:
        path = request.path
        if path not in pages:
            path = next((prefix for prefix in prefixes if path.startswith(prefix)), path)
        return pages.get(path, otherwise)(request)

    return App(page)


class Connection(asyncio.Protocol):
    """A client of a server."""

    _transport: asyncio.Transport
    _http: h11.Connection
    """Made when the task is."""

    def __init__(self, app: App, clients: Clients) -> None:
        """Wait for a client; `clients` know it while it is served."""
        self._app = app
        self._clients = clients
        self._unread = bytearray()
        self._readable, self._writable = asyncio.Event(), asyncio.Event()
        self._writable.set()
        self._ended = False
        """The client sends no more."""
        self._lost = False
        self._was_read = False
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; `Clients` drops who asks nothing."""
        assert isinstance(transport, asyncio.Transport)
        # Nothing but a piece that is under way may be buffered.
        transport.set_write_buffer_limits(high=1, low=0)
        if hasattr(transport, "max_size"):  # not with TLS; by default, a client may fill 256 kB
            transport.max_size = _MOST_UNREAD
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take what the client has sent."""
        if self._task is None:
            self._http = h11.Connection(h11.SERVER, _MOST_HEAD)
            self._task = asyncio.get_running_loop().create_task(self._serve())
            self._clients.add_task(self._task)
        self._unread += data
        self._readable.set()
        if len(self._unread) > _MOST_UNREAD:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """Answer what came before, as Go's servers do; TLS closes at once."""
        self._ended = True
        self._readable.set()
        return self._task is not None and self._transport.get_extra_info("ssl_object") is None

    def pause_writing(self) -> None:
        """Wait before the next piece."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Go on: everything was sent."""
        self._writable.set()

    def connection_lost(self, _: Exception | None) -> None:
        """End once the page is made, if one is."""
        self._lost = True
        self._clients.forget(self._transport)
        self._readable.set()
        self._writable.set()

    async def _serve(self) -> None:
        try:
            while await self._serve_request() and not self._clients.ending:
                if self._http.trailing_data[0]:  # a row of requests must not keep others waiting
                    await next_turn()
            self._transport.close()
        except (_GoneError, h11.RemoteProtocolError):
            pass
        finally:
            if not self._transport.is_closing():
                self._transport.abort()  # a part of an answer that nobody takes is never flushed

    async def _serve_request(self) -> bool:
        """Answer a request; return whether another one may follow."""
        try:
            head = await self._event()
        except h11.RemoteProtocolError as error:
            answer = _refusal(error.error_status_hint)
            await self._send(answer, answer.content)
            return False
        assert isinstance(head, h11.Request), "it follows the end of another one"
        most_body = self._app.most_body
        request = Request(
            head, self._event, lambda: self._ended or self._transport.is_closing(), most_body
        )
        with self._clients.request(self._transport):
            answer, piece = await self._answer(request, _unacceptable(head))
            # Without its "100 Continue" a client may send the body nevertheless, or may not.
            left = 0 if self._http.they_are_waiting_for_100_continue else most_body
            try:
                await self._send(answer, piece, request.method)
            except _GoneError:
                raise
            except Exception:
                log.exception("the page %s ends early", quoted(request.path))
                raise _GoneError from None
            finally:
                if isinstance(answer.pieces, AsyncGenerator):
                    await answer.pieces.aclose()
        # The next request follows the rest of a body that no page wanted, which is dropped here.
        while left > 0 and self._http.their_state is h11.SEND_BODY:
            event = await self._event()
            left -= len(event.data) if isinstance(event, h11.Data) else 0
        if not self._http.our_state is self._http.their_state is h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def _answer(self, request: Request, refused: Answer | None) -> tuple[Answer, bytes]:
        """Return the answer and its first piece, whose failure is still a 500."""
        try:
            found = refused or self._app.page(request)
            answer = found if isinstance(found, Answer) else await found
            return answer, await _next_piece(answer)
        except _GoneError:
            raise
        except h11.RemoteProtocolError as error:  # in the body
            answer = _refusal(error.error_status_hint)
        except Exception:
            log.exception("the page %s failed", quoted(request.path))
            answer = _refusal(500)
        return answer, answer.content

    async def _send(self, answer: Answer, piece: bytes, method: str = "") -> None:
        # The process never sets a locale with other names.
        date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
        headers = [*answer.headers.items(), ("Date", date)]
        if answer.pieces is None and answer.status != HTTPStatus.NOT_MODIFIED:
            headers.append(("Content-Length", str(len(piece))))
        if self._clients.ending or self._http.they_are_waiting_for_100_continue:
            headers.append(("Connection", "close"))
        reason = HTTPStatus(answer.status).phrase
        data = self._http.send(
            h11.Response(status_code=answer.status, headers=headers, reason=reason)
        )
        for name in (b"Connection: ", b"Transfer-Encoding: "):  # h11 writes them in lower case
            data = data.replace(b"\r\n" + name.lower(), b"\r\n" + name, 1)
        while piece and method != "HEAD":
            await self._write(data + self._http.send(h11.Data(data=piece)), answer.patience)
            data, piece = b"", b"" if answer.pieces is None else await _next_piece(answer)
        await self._write(data + self._http.send(h11.EndOfMessage()))

    async def _write(self, data: bytes, patience: float | None = None) -> None:
        """Write, and wait until the kernel has it.

        Raises:
            _GoneError: the client has left, or takes nothing.
        """
        if self._transport.is_closing():
            raise _GoneError
        self._transport.write(data)
        if not self._writable.is_set():
            try:
                async with asyncio.timeout(patience):
                    await self._writable.wait()
            except TimeoutError:
                raise _GoneError from None
        if self._lost:
            raise _GoneError

    async def _event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event as soon as it has come.

        Raises:
            _GoneError: the client has left, or ended its side.
            h11.RemoteProtocolError: it speaks something else.
        """
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                if self._http.they_are_waiting_for_100_continue:
                    go_on = h11.InformationalResponse(
                        status_code=100, headers=[], reason="Continue"
                    )
                    await self._write(self._http.send(go_on))
                while not self._unread:
                    if self._lost or self._ended:
                        raise _GoneError
                    self._readable.clear()
                    await self._readable.wait()
                await next_turn(newcomer=not self._was_read)
                self._was_read = True
                self._http.receive_data(bytes(self._unread[:_FED]))
                del self._unread[:_FED]
                if not self._unread:
                    self._transport.resume_reading()
            return event
        except h11.RemoteProtocolError as error:
            # A frame of h11's has the error itself: without that, only a collection would free it.
            raise error.with_traceback(None) from None


async def _next_piece(answer: Answer) -> bytes:
    """Return the first or the next piece of an answer; b"" is the end."""
    if answer.pieces is None:
        return answer.content
    if isinstance(answer.pieces, AsyncGenerator):
        return await anext(answer.pieces, b"")
    return await asyncio.to_thread(next, answer.pieces, b"")


def _refusal(status: int) -> Answer:
    """Return the last answer to a request that has none; nothing of the request is repeated."""
    text = f"{status} {HTTPStatus(status).phrase}\n"
    return Answer(text, status, more_headers={"Connection": "close"})


def _unacceptable(head: h11.Request) -> Answer | None:
    """Return the refusal of a request that h11 accepts."""
    names = {name for name, _ in head.headers}
    if {b"content-length", b"transfer-encoding"} <= names:  # another server may read it differently
        return _refusal(400)
    if head.http_version not in (b"1.0", b"1.1"):
        return _refusal(505)
    return _refusal(405) if head.method == b"CONNECT" else None


class Listening(NamedTuple):
    """A server that listens; `close` ends it."""

    sock: socket.socket
    accepting: asyncio.Task[None]
    clients: Clients

    @property
    def port(self) -> int:
        """The port that it listens on."""
        number: int = self.sock.getsockname()[1]
        return number

    async def close(self) -> None:
        """Stop listening; requests under way have a moment, then every connection is closed."""
        self.accepting.cancel()
        await asyncio.gather(self.accepting, return_exceptions=True)
        self.sock.close()
        await self.clients.end()


async def listen(
    app: App,
    host: str,
    port: int,
    pool: ClientPool = POOL,
    tls: ssl.SSLContext | None = None,
    *,
    both_families: bool = False,
) -> Listening:
    """Start to serve, with TLS if there is a context for it.

    Args:
        both_families: as for `listening_socket`.

    Raises:
        ListenError: the address cannot be bound.
    """
    where = join_host_port(host, port)
    try:
        sock = listening_socket(host, port, pool, both_families=both_families)
    except OSError as error:
        # socket.create_server repeats the address
        text = (error.strerror or str(error)).partition(" (while ")[0]
        raise ListenError(error.errno, f"listen on {where}: {text}") from error
    clients = Clients(pool, tls)
    accepting = asyncio.create_task(
        clients.accept(sock, lambda: Connection(app, clients), f"server at {where}")
    )
    await asyncio.sleep(0)  # yield to the loop: there may be a thousand servers to open
    return Listening(sock, accepting, clients)


async def keep_serving(
    app: Callable[[], App],
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

    The unspecified address of one family stands for every address of both.

    Args:
        app: makes the application, once for each attempt.
        what: name of the server, for messages.
        on_failure: called with each failure, to post an Event.
        hard_fail: raise the failure instead of retrying (`bindAddressHardFail`).
        tls: the context of HTTPS; None for HTTP.

    Raises:
        ListenError: with `hard_fail`, the address cannot be bound.
    """
    while True:
        try:
            server = await listen(app(), host, port, pool, tls, both_families=True)
        except ListenError as error:
            message = f"{what} cannot {error.strerror}"
            log.error("%s", message)
            on_failure(message)
            if hard_fail:
                raise
            await sleep(RETRY_SECONDS)
            continue
        try:
            await asyncio.shield(server.accepting)  # it ends only by an error, a defect
        finally:
            with suppress(OSError):
                await server.close()
