"""HTTP requests on asyncio, with connections that are used again; aiohttp takes 12 MB.

    HttpClient   sends requests, and keeps connections by their Route
    Response     status and headers of an answer; its body is read as it arrives

If TLS negotiates HTTP/2, all requests share one connection. In HTTP/1.1 each request has one.

Redirects are not followed, and there are no cookies.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode, urlsplit

from steersman.host.connect import connect_tcp
from steersman.source.http_connection import (
    AGENT,
    Answer,
    Connection,
    HttpError,
    Request,
    UnansweredError,
)
from steersman.source.route import Headers, Route
from steersman.source.tls import tls_words

if TYPE_CHECKING:
    from steersman.source.http2_connection import Http2Connection

_PIECE = 256 << 10
"""Bytes decompressed at a time, in about a millisecond."""


class Response:
    """An answer; its body is still to be read."""

    def __init__(self, answer: Answer) -> None:
        """Wrap an answer of any version of HTTP."""
        self.status = answer.status
        self.headers: dict[str, str] = {}
        """By name in lower case; values of the same name are joined by commas."""
        for name, value in answer.headers:
            key, text = name.decode(), value.decode(errors="replace")
            self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text
        given = self.headers.get("content-type", "application/octet-stream")
        self.content_type = given.partition(";")[0].strip().lower()
        """Without parameters, in lower case."""
        self.read = answer.read
        self.wait_up_to = answer.wait_up_to
        self.close = answer.close

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, decompressed in small pieces.

        A few kilobytes of gzip can be hundreds of megabytes of zeros.

        Raises:
            HttpError: the connection breaks, or the body cannot be decompressed.
        """
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding == "identity":
            while chunk := await self.read():
                yield chunk
            return
        if encoding not in ("gzip", "x-gzip"):
            raise _unreadable(f"it is compressed by {encoding[:40]!r}, which was not requested")
        # Other tasks run between two pieces, so that a bomb does not block the event loop either.
        gzip = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        while rest := await self.read():
            while True:
                try:
                    piece = gzip.decompress(rest, _PIECE)
                except zlib.error as error:
                    raise _unreadable(f"it is not gzip: {error}") from None
                rest = gzip.unconsumed_tail
                if piece:
                    yield piece
                if gzip.unused_data:  # zlib would keep all of it
                    raise _unreadable("more follows the compressed data")
                if not rest and len(piece) < _PIECE:
                    break
                await asyncio.sleep(0)
        if not gzip.eof:
            raise _unreadable("it ended within compressed data")


def _unreadable(why: str) -> HttpError:
    return HttpError("connection", f"the body of an answer cannot be read: {why}")


class HttpClient:
    """Sends requests, and keeps connections for the next ones."""

    def __init__(
        self,
        headers: Headers = (),
        connect: float = 10.0,
        dial: Callable[[str, int], Awaitable[socket.socket]] = connect_tcp,
    ) -> None:
        """Configure; nothing is connected before a request.

        Args:
            headers: of each request that has none of that name.
            connect: seconds for addresses, connection, proxy and TLS together.
        """
        self._headers = (*headers, ("User-Agent", AGENT))
        self._seconds = connect
        self._dial = dial
        self._kept: dict[Route, list[Connection]] = {}
        self._shared: dict[Route, list[Http2Connection]] = {}
        self._opening: dict[Route, asyncio.Future[HttpError | None]] = {}
        self._single: set[tuple[str, int]] = set()  # https servers without HTTP/2
        self._closed = False

    async def request(
        self,
        url: str,
        *,
        params: Mapping[str, str] | None = None,
        headers: Headers = (),
        body: bytes | None = None,
        method: str = "",
        patience: float,
        tls: ssl.SSLContext | None = None,
        server_name: str = "",
        proxy: str = "",
    ) -> Response:
        """Send a GET request, or POST a body; return the answer with its body unread.

        Args:
            url: of http or https, with or without a query.
            headers: beside those of the client.
            method: another one, which may be sent twice without harm.
            patience: seconds without a byte after which the server counts as silent.
            tls: for https, of the server or of the proxy.
            server_name: that the server's certificate must have; "" for its host.
            proxy: URL of a proxy, with its user and password; "" for none.

        Raises:
            HttpError: there is no answer.
        """
        try:
            route = Route.of(url, tls, server_name, proxy)
        except ValueError as error:
            raise HttpError("connect", str(error)) from None
        request = self._request(route, url, params or {}, headers, body, method=method)
        connection, used = await self._connection(route, fresh=False)
        try:
            return Response(await connection.ask(request, patience))
        except UnansweredError as error:
            # The server may have closed the connection at the moment it was used again. A GET
            # request changes nothing, so that it can be sent again.
            if not used or (body is not None and not error.unprocessed):
                raise
        connection, _ = await self._connection(route, fresh=True)
        return Response(await connection.ask(request, patience))

    def _request(
        self,
        route: Route,
        url: str,
        params: Mapping[str, str],
        own: Headers,
        body: bytes | None,
        *,
        method: str,
    ) -> Request:
        """Return a request."""
        parts = urlsplit(url)
        query = "&".join(filter(None, (parts.query, urlencode(params, quote_via=quote))))
        target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (f"?{query}" if query else "")
        names = {name.lower() for name, _ in own}
        headers = [each for each in self._headers if each[0].lower() not in names]
        headers += own
        if route.proxy and not route.server.tls:  # an https server is reached through a tunnel
            target = f"http://{route.server.header}{target}"
            headers += route.proxy_headers
        if body is not None:
            headers.append(("Content-Length", str(len(body))))
        for name, value in headers:
            if any(char < " " or char == "\x7f" for char in value):
                # The library's own message would show the value, which may be a password.
                why = f"the value of {name} has a line break or another control character"
                raise HttpError("credentials", why)
        return Request(
            method=method or ("GET" if body is None else "POST"),
            scheme="https" if route.server.tls else "http",
            host=route.server.header,
            target=target,
            headers=[(name.encode(), value.strip().encode()) for name, value in headers],
            body=body,
        )

    async def _connection(
        self, route: Route, *, fresh: bool
    ) -> tuple[Connection | Http2Connection, bool]:
        """Return a connection for one more request, and whether it was used before.

        While the first connection to an https server is opened, other requests wait: if the server
        speaks HTTP/2, they share it.

        Args:
            fresh: use no idle connection in HTTP/1.1.
        """
        while True:
            # Those that have ended meanwhile are of no use.
            for shared in self._shared.get(route, ()):
                if shared.usable:
                    return shared, True
            kept = [connection for connection in self._kept.pop(route, ()) if connection.usable]
            again = kept.pop() if kept and not fresh else None
            if kept:
                self._kept[route] = kept
            if again is not None:
                return again, True
            opening = self._opening.get(route)
            if opening is None:
                break
            if (error := await asyncio.shield(opening)) is not None:
                raise HttpError(error.reason, str(error))
        if route.server.tls is None or route.server[:2] in self._single:
            return await self._connect(route), False
        self._opening[route] = opening = asyncio.get_running_loop().create_future()
        failure: HttpError | None = None
        try:
            return await self._connect(route), False
        except HttpError as error:
            failure = error
            raise
        finally:
            del self._opening[route]
            opening.set_result(failure)

    async def _connect(self, route: Route) -> Connection | Http2Connection:
        """Open a connection.

        Raises:
            HttpError: that fails.
        """
        hop, loop = route.proxy or route.server, asyncio.get_running_loop()
        where = f"{'proxy ' if route.proxy else ''}{hop}"
        try:
            async with asyncio.timeout(self._seconds):
                sock = await self._dial(hop.host, hop.port)
                try:
                    _, made = await loop.create_connection(
                        lambda: Connection(str(route.server), partial(self._keep, route)), sock=sock
                    )
                except BaseException:
                    sock.close()
                    raise
                try:
                    # Not by create_connection: it does not tell the transport of a handshake that
                    # is cancelled, and this one is closed in any case.
                    if hop.tls:
                        await made.begin_tls(hop)
                    if route.proxy and route.server.tls:
                        where = f"{route.server} through {where}"
                        await made.tunnel(route, self._seconds)
                except BaseException:
                    made.close()
                    raise
                return self._begin(route, made)
        except ssl.SSLError as error:
            raise HttpError("tls", tls_words(error, where)) from error
        except OSError as error:
            if isinstance(error, TimeoutError) and not error.errno:  # ours, not TCP's
                why = f"cannot connect to {where} within {self._seconds:g} s"
                raise HttpError("timeout", why) from None
            number = error.errno or 0  # negative if a name cannot be resolved
            why = os.strerror(number) if number > 0 else error.strerror or str(error)
            why = why or "the connection broke"
            raise HttpError("connect", f"cannot connect to {where}: {why}") from error

    def _begin(self, route: Route, made: Connection) -> Connection | Http2Connection:
        """Speak the version of HTTP that was negotiated."""
        if made.negotiated != "h2":
            self._single.add(route.server[:2])
            made.begin()
            return made
        # Not every server offers it, and it takes more than a megabyte.
        from steersman.source.http2_connection import Http2Connection  # noqa: PLC0415

        self._single.discard(route.server[:2])
        shared = Http2Connection(str(route.server))
        made.hand_over(shared)
        open_ones = {
            each: [c for c in found if not c.ended] for each, found in self._shared.items()
        }
        self._shared = {each: found for each, found in open_ones.items() if found}
        self._shared.setdefault(route, []).append(shared)
        if self._closed:
            shared.retire()
        return shared

    def _keep(self, route: Route, connection: Connection) -> None:
        if self._closed:
            connection.close()
            return
        live = {each: [c for c in kept if c.usable] for each, kept in self._kept.items()}
        self._kept = {each: kept for each, kept in live.items() if kept}
        self._kept.setdefault(route, []).append(connection)

    async def aclose(self) -> None:
        """Close the connections that nobody uses; those in use are closed after their answers."""
        self._closed = True
        for kept in self._kept.values():
            for connection in kept:
                connection.close()
        for shared in self._shared.values():
            for each in shared:
                each.retire()
        self._kept.clear()
        self._shared.clear()
        await asyncio.sleep(0)  # until their descriptors are closed
