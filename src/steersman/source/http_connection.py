"""A connection for HTTP/1.1 on asyncio: one request at a time, timeouts, tunnels, bodies.

h11 writes requests and reads the heads of answers. Bodies are read here, because a chunk takes 6 us
in h11 and 1 us here, and each event of a watch is one.

    Connection   keeps what arrives, and wakes the request that waits for it
    Body         takes the framing off what arrives after the head

Beyond _MOST_HELD bytes that nobody has taken, the kernel keeps what comes, and the server waits.
"""

from __future__ import annotations

import asyncio
import re
import ssl

import h11

from steersman import __version__
from steersman.host.connect import Route
from steersman.source.tls import tls_words

AGENT = f"steersman/{__version__}"
"""The User-Agent header."""
MAX_HEAD = 64 << 10
"""Bytes of the head of an answer: its status and headers."""
KEPT = 15.0
"""Seconds that an idle connection is kept."""
_MOST_HELD = 128 << 10
_MOST_INFORMATIONAL = 10  # answers of 1xx before the answer
_MOST_TRAILERS = 100  # lines after the last chunk
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?")
_SHOWN = 60  # bytes of something that is not HTTP, for the message


class HttpError(Exception):
    """There is no answer, or not all of it; the message says why."""

    def __init__(self, reason: str, message: str) -> None:
        """Make an error.

        Args:
            reason: connect, tls, timeout, connection or credentials; for metrics.
            message: for people.
        """
        super().__init__(message)
        self.reason = reason


class UnansweredError(HttpError):
    """The connection ended before the first byte of an answer."""


class Connection(asyncio.Protocol):
    """A connection, which serves one request at a time."""

    transport: asyncio.Transport

    def __init__(self, where: str) -> None:
        """Create the protocol; `where` is the server, for messages."""
        self._where = where
        self._busy = False  # between a request and the end of its answer
        self._begun = b""  # the first bytes of the answer
        self._received: list[bytes] = []
        self._held = 0  # bytes of these
        self._paused = False
        self.ended = False
        """The server sends no more."""
        self._failure: Exception | None = None
        # A timer for each chunk of a watch would take more time than reading it. One is enough: it
        # compares the clock with the moment since which a reader waits, and is set again.
        self._timer: asyncio.TimerHandle | None = None
        self.patience = 0.0
        """Seconds that the server may be silent."""
        self._waiting_since = 0.0
        self._waiter: asyncio.Future[None] | None = None

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Keep bytes until they are taken."""
        if not self._busy:
            self.close()  # unexpected: the next request must not take it for its answer
            return
        self._begun = self._begun or data[:_SHOWN]
        self._received.append(data)
        self._held += len(data)
        if self._held > _MOST_HELD and not self._paused:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        """Note the end; asyncio then closes the connection."""
        self.ended = True
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Note the end, and whether it was a reset."""
        self.ended, self._failure = True, error
        self._stop_timer()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What a request calls

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return not self.ended and not self.transport.is_closing()

    def close(self) -> None:
        """Close it at once, whatever is under way."""
        self._busy = False
        self._stop_timer()
        self.transport.abort()

    async def ask(self, request: h11.Request, body: bytes | None, patience: float) -> h11.Response:
        """Send a request; return the head of the answer.

        Raises:
            HttpError: there is none; an UnansweredError if not a byte came.
        """
        self._stop_timer()
        self._busy, self._begun, self.patience = True, b"", patience
        http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        events = (request, h11.Data(data=body or b""), h11.EndOfMessage())
        self.transport.write(b"".join(http.send(event) or b"" for event in events))
        for _ in range(_MOST_INFORMATIONAL):
            try:
                while (event := http.next_event()) is h11.NEED_DATA:
                    await self.more()
                    http.receive_data(self.take())
            except h11.RemoteProtocolError as error:
                raise self._not_http(error) from None
            if isinstance(event, h11.Response):
                rest = http.trailing_data[0]
                self._received[:0] = [rest] if rest else []
                return event
        raise HttpError("connection", "no answer comes after many of 1xx")

    def _not_http(self, error: h11.RemoteProtocolError) -> HttpError:
        """Return why there is no head of an answer."""
        http = self._begun.startswith(b"HTTP/")
        if self.ended and (http or not self._begun):
            return self.broken()
        why = str(error if http else self._begun)
        if error.error_status_hint == 431:
            why = f"its head has more than {MAX_HEAD} bytes"
        return HttpError("connection", f"the answer is not HTTP: {why}")

    def broken(self) -> HttpError:
        """Return why the answer is not complete although the connection has ended."""
        if isinstance(self._failure, ssl.SSLError):
            return HttpError("tls", tls_words(self._failure, self._where))
        if self._begun:
            return HttpError("connection", "the connection broke in the middle of an answer")
        why = self._failure or "the server closed it without an answer"
        return UnansweredError("connection", f"the connection broke: {why}")

    @property
    def complete(self) -> bool:
        """Whether the connection has ended, and not by a failure."""
        return self.ended and self._failure is None

    def take(self) -> bytes:
        """Return all that has come; b"" if there is nothing."""
        data = b"".join(self._received)
        self._received.clear()
        self._held = 0
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        return data

    async def more(self) -> None:
        """Wait until there is something to take, or the connection has ended.

        Raises:
            HttpError: nothing came in time.
        """
        if self._received or self.ended:
            return
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._waiting_since = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self.patience, self._check)
        try:
            await self._waiter
        except TimeoutError:
            why = f"the server stopped sending: nothing came for {self.patience:g} s"
            raise HttpError("timeout", why) from None
        finally:
            self._waiter = None

    def _check(self) -> None:
        """Fail the reader if it has waited for too long."""
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return  # the next one that waits sets the timer
        loop = asyncio.get_running_loop()
        due = self._waiting_since + self.patience
        if due <= loop.time():
            self._waiter.set_exception(TimeoutError())
        else:
            self._timer = loop.call_at(due, self._check)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def finish(self) -> None:
        """End a request after all of its answer; the connection closes itself if it stays idle."""
        self._busy = False
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(KEPT, self.close)

    async def tunnel(self, route: Route, patience: float) -> None:
        """Have the proxy at the other end connect to the server, and begin TLS with that.

        Raises:
            HttpError: the proxy does not.
            OSError: TLS fails.
        """
        server, loop = route.server, asyncio.get_running_loop()
        headers = [("Host", str(server)), ("User-Agent", AGENT), *route.proxy_headers]
        request = h11.Request(method="CONNECT", target=str(server), headers=headers)
        head = await self.ask(request, None, patience)
        why = ""
        if not 200 <= head.status_code < 300:
            why = f"answers {head.status_code} {head.reason.decode('latin-1')}"
            if head.status_code == 407:
                why += "; give its user and password in its URL: http://USER:PASSWORD@HOST:PORT"
        elif self._received:
            why = "sends more than an answer"
        if why:
            raise HttpError("connect", f"cannot connect to {server}: proxy {route.proxy} {why}")
        assert server.tls is not None
        self._busy = False
        self._stop_timer()
        secured = await loop.start_tls(
            self.transport, self, server.tls, server_hostname=server.name
        )
        assert secured is not None
        self.transport = secured


class Body:
    """Takes the framing off a body: chunks, a length, or all that comes until the end."""

    def __init__(self, head: h11.Response) -> None:
        """Begin to read the body after this head."""
        # h11 has refused other encodings than `chunked`, and lengths that are not one number.
        given = dict(head.headers)
        self._chunked = b"transfer-encoding" in given
        self.endless = not self._chunked and b"content-length" not in given
        """Whether it ends with the connection."""
        # Bytes of the body or chunk to come.
        self._left = 0 if self._chunked else int(given.get(b"content-length", b"0"))
        if head.status_code in (204, 304):
            self._chunked, self.endless, self._left = False, False, 0
        self._in_chunk = False  # or in the line that ends it
        self._trailers = 0  # lines since the last chunk
        self.ended = not (self._chunked or self.endless or self._left)
        self.rest = b""
        """Bytes that are not decoded: a part of a line; after the end, those too many."""
        self.problem = ""

    def decode(self, data: bytes) -> bytes:
        """Return what belongs to the body itself, up to its end or to a problem."""
        if self.endless:
            return data
        if not self._chunked:
            body, self.rest = data[: self._left], data[self._left :]
            self._left -= len(body)
            self.ended = not self._left
            return body
        pieces, at = [], 0
        data = self.rest + data if self.rest else data
        while not self.ended and not self.problem:
            if self._left:
                pieces.append(data[at : at + self._left])
                at += len(pieces[-1])
                self._left -= len(pieces[-1])
                if self._left:
                    break
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            line, at = data[at:end], end + 2
            if self._in_chunk:
                self._in_chunk = False
                if line:
                    self.problem = f"{line[:_SHOWN]!r} after a chunk"
            elif self._trailers:  # none of them is of use
                self._trailers += 1
                self.ended = not line
            elif size := _CHUNK.fullmatch(line):
                self._left = int(size[1], 16)
                self._in_chunk, self._trailers = self._left > 0, int(not self._left)
            else:
                self.problem = f"{line[:_SHOWN]!r} is not the size of a chunk"
        self.rest = data[at:]
        if not self.ended and (len(self.rest) > MAX_HEAD or self._trailers > _MOST_TRAILERS):
            self.problem = "a line between chunks does not end, or there are too many"
        return b"".join(pieces)
