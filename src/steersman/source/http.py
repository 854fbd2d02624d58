"""HTTP/1.1 requests on asyncio, with connections that are used again; aiohttp takes 12 MB.

    HttpClient   sends requests, and keeps idle connections by their Route
    Response     status and headers of an answer; its body is read as it arrives

Redirects are not followed, and there are no cookies.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from urllib.parse import quote, urlencode, urlsplit

import h11

from steersman.host.connect import connect_tcp
from steersman.source.http_connection import AGENT, Connection, HttpError, UnansweredError
from steersman.source.route import Headers, Route
from steersman.source.tls import tls_words

_PIECE = 256 << 10
"""Bytes decompressed at a time, in about a millisecond."""


class Response:
    """An answer; its body is still to be read."""

    def __init__(
        self, head: h11.Response, connection: Connection, keep: Callable[[Connection], None]
    ) -> None:
        """Wrap a head; `keep` takes the connection once the body was read."""
        self.status = head.status_code
        self.headers: dict[str, str] = {}
        """By name in lower case; values of the same name are joined by commas."""
        for name, value in head.headers:
            key, text = name.decode(), value.decode(errors="replace")
            self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text
        given = self.headers.get("content-type", "application/octet-stream")
        self.content_type = given.partition(";")[0].strip().lower()
        """Without parameters, in lower case."""
        self._keep = keep
        self._connection: Connection | None = connection
        self._failure: HttpError | None = None

    async def read(self) -> bytes:
        """Return all bytes of the body that have come, at least one; b"" at its end.

        Raises:
            HttpError: the connection broke, or is silent; all that came before it was returned.
        """
        pieces: list[bytes] = []
        try:
            while self._connection is not None:
                event = self._connection.next_event()
                if isinstance(event, h11.Data):
                    pieces.append(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    self._finish(self._connection)
                elif pieces:
                    break
                else:
                    await self._connection.receive()
        except HttpError as error:
            self.close()
            self._failure = error
        if self._failure is not None and not pieces:
            raise self._failure
        return b"".join(pieces)

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

    def _finish(self, connection: Connection) -> None:
        connection.finish()
        self._connection = None
        if connection.usable:
            self._keep(connection)
        else:
            connection.close()

    def wait_up_to(self, seconds: float) -> None:
        """Change how long the server may be silent."""
        if self._connection is not None:
            self._connection.patience = seconds

    def close(self) -> None:
        """End it; its connection is closed unless the body was read to its end."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


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
        self._closed = False

    async def request(
        self,
        url: str,
        *,
        params: Mapping[str, str] | None = None,
        headers: Headers = (),
        body: bytes | None = None,
        patience: float,
        tls: ssl.SSLContext | None = None,
        server_name: str = "",
        proxy: str = "",
    ) -> Response:
        """Send a GET request, or POST a body; return the answer with its body unread.

        Args:
            url: of http or https, with or without a query.
            headers: beside those of the client.
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
        request = self._request(route, url, params or {}, headers, body)
        # Those that have ended meanwhile are of no use.
        kept = [connection for connection in self._kept.pop(route, ()) if connection.usable]
        again = kept.pop() if kept else None
        if kept:
            self._kept[route] = kept
        while True:
            connection = again or await self._connect(route)
            try:
                head = await connection.ask(request, body, patience)
            except UnansweredError:
                connection.close()
                # The server may have closed the kept connection at the moment it was used. A GET
                # request changes nothing, so that it can be sent again.
                if again is None or body is not None:
                    raise
                again = None
            except BaseException:
                connection.close()
                raise
            else:
                return Response(head, connection, lambda clean: self._keep(route, clean))

    def _request(
        self, route: Route, url: str, params: Mapping[str, str], own: Headers, body: bytes | None
    ) -> h11.Request:
        """Return the head of a request."""
        parts = urlsplit(url)
        query = "&".join(filter(None, (parts.query, urlencode(params, quote_via=quote))))
        target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (f"?{query}" if query else "")
        names = {name.lower() for name, _ in own}
        headers = [("Host", route.server.header)]
        headers += [each for each in self._headers if each[0].lower() not in names]
        headers += own
        if route.proxy and not route.server.tls:  # an https server is reached through a tunnel
            target = f"http://{route.server.header}{target}"
            headers += route.proxy_headers
        if body is not None:
            headers.append(("Content-Length", str(len(body))))
        for name, value in headers:
            if any(char < " " or char == "\x7f" for char in value):
                # h11's own message would show the value, which may be a password.
                why = f"the value of {name} has a line break or another control character"
                raise HttpError("credentials", why)
        encoded = [(name.encode(), value.strip().encode()) for name, value in headers]
        return h11.Request(method="GET" if body is None else "POST", target=target, headers=encoded)

    async def _connect(self, route: Route) -> Connection:
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
                        lambda: Connection(str(route.server)),
                        sock=sock,
                        ssl=hop.tls,
                        server_hostname=hop.name or None,
                    )
                except BaseException:
                    sock.close()
                    raise
                if route.proxy and route.server.tls:
                    where = f"{route.server} through {where}"
                    try:
                        await made.tunnel(route, self._seconds)
                    except BaseException:
                        made.close()
                        raise
                return made
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
        self._kept.clear()
        await asyncio.sleep(0)  # until their descriptors are closed
