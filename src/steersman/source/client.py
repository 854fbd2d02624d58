"""HTTP requests to the API servers of one cluster, with failover and one kind of error.

Lists and watches are asked for in protobuf, if so configured and if it can be read here, and taken
in JSON, too: the server decides. Everything else becomes an `ApiError` with a short reason for
metrics; when to try again is decided in reflector.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from copy import copy
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from steersman.source.credentials import CredentialError, Credentials
from steersman.source.framing import CONTENT_TYPE, Message, unwrap
from steersman.source.http import HttpClient, Response
from steersman.source.http_connection import HttpError
from steersman.source.kubeconfig import ClusterAccess
from steersman.source.pace import LogThrottle, Pace, ServerOrder, Timing
from steersman.source.protobuf import NATIVE
from steersman.source.proxies import environment_proxy
from steersman.source.stats import SourceStats
from steersman.source.tls import TlsContexts, TlsError
from steersman.source.wire import (
    MAX_LINE,
    ApiError,
    Status,
    decode_list,
    decode_status,
    shown,
)

JSON = "application/json"
T = TypeVar("T")
_MAX_PAGE = 256 << 20
"""Bytes of a page of `list_all`; 500 pods are some megabytes."""
MAX_ERROR_BODY = 64 << 10
"""Bytes of an error's body that are read."""

_NOT_SPOKEN = frozenset({406, 415})  # Not Acceptable, Unsupported Media Type

log = logging.getLogger("steersman.source")


class Connections:
    """Connections to the servers of a cluster, which several ApiClients may share."""

    def __init__(
        self, access: ClusterAccess, timing: Timing, credentials: Credentials | None = None
    ) -> None:
        """Configure; nothing is connected yet."""
        self.access = access
        self.credentials = credentials or Credentials(access)
        self.tls = TlsContexts(access)
        self.order = ServerOrder(access.servers, timing)
        """With which each client begins; it leaves servers that fail on its own."""
        encoding = "identity" if access.disable_compression else "gzip"
        self.http = HttpClient((("Accept", JSON), ("Accept-Encoding", encoding)), timing.connect)

    async def aclose(self) -> None:
        """Close those that nobody uses."""
        await self.http.aclose()


class ApiClient:
    """Sends requests to the server that worked last, or to the next one."""

    def __init__(self, connections: Connections, stats: SourceStats, timing: Timing) -> None:
        self._access = access = connections.access
        self._stats = stats
        self._timing = timing
        self._credentials = connections.credentials
        self._tls = connections.tls
        self._http = connections.http
        self.throttle = LogThrottle(timing.now)
        self.large_body = asyncio.Lock()
        """Held while an unusually large body is in memory."""
        self.pace = Pace(timing, stats)
        self._order = copy(connections.order)
        self._accepted = access.accepted if NATIVE else JSON
        self._spoken = (JSON, CONTENT_TYPE) if NATIVE else (JSON,)
        self._json_only: set[str] = set()  # paths at which the server refused protobuf
        stats.server = self._order.current()

    def failed(self, server: str) -> None:
        """Record that a server failed: the next request goes to the next one."""
        if self._order.leave(server):
            self._stats.server = self._order.current()
            self._stats.failovers += 1
            words = f"API server {server} failed, trying {self._stats.server}"
            log.log(self.throttle.level(words), "%s", words)

    @asynccontextmanager
    async def get(
        self, path: str, params: Mapping[str, str], idle_timeout: float, *, negotiate: bool = False
    ) -> AsyncIterator[Response]:
        """Send a GET request; yield the response with its body unread.

        Args:
            idle_timeout: seconds without a byte after which the connection is closed.
            negotiate: accept the configured content types, protobuf among them.

        Raises:
            ApiError: no server can be reached, or the answer is not one that is accepted, with
                status 200; also out of the caller's block, if the connection breaks there.
        """
        accept = self._accepted if negotiate and path not in self._json_only else JSON
        headers = [("Accept", accept)]
        response, server = await self._first_answer(path, params, idle_timeout, more=headers)
        if response.status in _NOT_SPOKEN and accept != JSON:
            response.close()
            log.info("%s: the server does not offer %s, using JSON", path, accept)
            self._json_only.add(path)
            headers = [("Accept", JSON)]
            response, server = await self._first_answer(path, params, idle_timeout, more=headers)
        with _reading(response):
            try:
                await self._check(response, server, types=self._spoken if negotiate else (JSON,))
                yield response
            except HttpError:
                self.failed(server)
                raise

    @asynccontextmanager
    async def proxied(
        self,
        path: str,
        params: Mapping[str, str],
        idle_timeout: float,
        *,
        headers: Sequence[tuple[str, str]] = (),
        body: object = None,
    ) -> AsyncIterator[Response]:
        """Send a request to a pod through the API server; yield the response with its body unread.

        Args:
            path: that of the pod's proxy, with the path of the pod's own page.
            idle_timeout: seconds without a byte after which the connection is closed.
            headers: for the pod, beside those for the API server.
            body: a document to POST; None for a GET request.

        Raises:
            ApiError: the API server or the pod cannot be reached, or refuses; also out of the
                caller's block, if the connection breaks there.
        """
        response, server = await self._first_answer(path, params, idle_timeout, body, headers)
        with _reading(response):
            if response.status == 401 and response.content_type != JSON:
                text = shown((await response.read())[:MAX_ERROR_BODY].decode(errors="replace"))
                raise ApiError("http_401", text or "the pod refuses the token", status=401)
            if response.status != 200:
                await self._check(response, server)
            yield response

    async def list_all(
        self,
        kind: str,
        path: str,
        decoder: msgspec.json.Decoder[list[T]],
        params: Mapping[str, str] | None = None,
    ) -> list[T]:
        """Return all objects of a list in JSON, read a page at a time.

        Raises:
            ApiError: they cannot be listed.
        """
        found: list[T] = []
        params = {**(params or {}), "limit": "500"}
        while True:
            async with self.get(path, params, self._timing.answer) as response:
                body = await read_body(response, _MAX_PAGE, path)
            try:
                page = decode_list(kind, body)
                found += decoder.decode(page.items)
            except msgspec.DecodeError as error:
                raise ApiError("malformed", f"unexpected answer: {error}") from error
            if not page.metadata.continue_:
                return found
            params["continue"] = page.metadata.continue_

    async def post(self, path: str, body: object) -> bytes:
        """Create an object; return it, in JSON, as the server completed it.

        Raises:
            ApiError: no server can be reached, or it refuses.
        """
        response, server = await self._first_answer(path, {}, self._timing.answer, body)
        return await self._created(path, response, server, (JSON,))

    async def post_message(self, path: str, message: bytes, body: object) -> None:
        """Create an object, given in protobuf and in JSON; the latter if the server needs it.

        Raises:
            ApiError: no server can be reached, or it refuses.
        """
        answer = self._timing.answer
        if NATIVE and self._access.content_type == CONTENT_TYPE:
            headers = [("Content-Type", CONTENT_TYPE), ("Accept", self._accepted)]
            response, server = await self._first_answer(path, {}, answer, message, headers)
            if response.status not in _NOT_SPOKEN:
                await self._created(path, response, server, self._spoken)
                return
            response.close()
        await self.post(path, body)

    async def delete(self, path: str) -> None:
        """Delete an object, and what it owns; it may be gone already.

        Raises:
            ApiError: no server can be reached, or it refuses.
        """
        params = {"propagationPolicy": "Background"}
        response, server = await self._first_answer(
            path, params, self._timing.answer, method="DELETE"
        )
        with _reading(response):
            await self._check(response, server, (200, 202, 404))

    async def _created(
        self, path: str, response: Response, server: str, types: Sequence[str]
    ) -> bytes:
        """Return the body of the answer to a POST request."""
        with _reading(response):
            await self._check(response, server, (200, 201, 202), types)
            return await read_body(response, MAX_LINE, path)

    async def _first_answer(
        self,
        path: str,
        params: Mapping[str, str],
        idle_timeout: float,
        body: object = None,
        more: Sequence[tuple[str, str]] = (),
        *,
        method: str = "",
    ) -> tuple[Response, str]:
        """Try each server once, starting with the current one, until one answers.

        The method is GET, or POST with a body, if it is not given.
        """
        access, timing = self._access, self._timing
        headers, method = list(more), method or ("GET" if body is None else "POST")
        if body is not None and not isinstance(body, bytes):
            headers.append(("Content-Type", JSON))
            body = msgspec.json.encode(body)
        last: HttpError | None = None
        for _ in access.servers:
            server = self._stats.server = self._order.current()  # `failed` moves on
            proxy = access.proxy_url or environment_proxy(server, os.environ) or ""
            tls, own = await self._authentication(server, proxy)
            began = timing.now()
            try:
                async with asyncio.timeout(timing.connect + timing.answer):
                    response = await self._http.request(
                        server + path,
                        params=params,
                        headers=[*own, *headers],
                        body=body,
                        method=method,
                        patience=idle_timeout,
                        tls=tls,
                        server_name=access.tls_server_name,
                        proxy=proxy,
                    )
            except HttpError as error:
                last = error
            except TimeoutError:
                seconds = timing.connect + timing.answer
                last = HttpError("timeout", f"the server did not answer within {seconds:g} s")
            else:
                self._count(server, str(response.status), method, began, params)
                self.pace.answered()
                self._order.answered(server)
                return response, server
            self._count(server, "<error>", method, began, params)
            self.failed(server)
        assert last is not None
        self.pace.unreachable = True
        raise _api_error(last) from last

    async def _authentication(
        self, server: str, proxy: str
    ) -> tuple[ssl.SSLContext | None, list[tuple[str, str]]]:
        """Return the TLS context and the headers that show a server who asks.

        The context is for an https proxy, too, with which HTTP/1.1 is spoken.

        Raises:
            ApiError: there are no credentials, or they cannot be used.
        """
        http2 = not proxy.startswith("https:")
        try:
            if server.startswith("https:"):
                tls = self._tls.current(await self._credentials.key_pair(), http2=http2)
                return tls, await self._credentials.headers()
            tls_of_proxy = None if http2 else self._tls.current(None, http2=False)
            return tls_of_proxy, self._credentials.withheld(server)
        except (CredentialError, TlsError) as error:
            raise ApiError("credentials", str(error)) from error

    def _count(
        self, server: str, code: str, method: str, began: float, params: Mapping[str, str]
    ) -> None:
        host = urlsplit(server).netloc.rpartition("@")[2]
        self._stats.requests.count(code, method, host)
        if "watch" not in params:  # as client-go
            self._stats.requests.took(self._timing.now() - began, method, host)

    async def _check(
        self,
        response: Response,
        server: str,
        good: Sequence[int] = (200,),
        types: Sequence[str] = (JSON,),
    ) -> None:
        """Raise ApiError unless this has a good status and one of these content types."""
        status = response.status
        if status in good and response.content_type in types:
            return
        if status == 401:
            self._credentials.refused()
        # Another server may do better: after errors, overload, or if this one is no API server.
        if status >= 500 or status in (200, 429):
            self.failed(server)
        # Read a part of the body, for the message.
        body = b""
        async for chunk in response.chunks():
            body += chunk
            if len(body) > MAX_ERROR_BODY:
                break
        if status == 200:
            kind = response.content_type
            raise ApiError("not_json", f"the answer is {kind}, not JSON: is this an API server?")
        if 300 <= status < 400:
            target = shown(response.headers.get("location", "nowhere"))
            raise ApiError("redirect", f"{status}: redirected to {target}", status=status)
        try:
            raw = body[:MAX_ERROR_BODY]
            protobuf = response.content_type == CONTENT_TYPE
            found = decode_status(Message(unwrap(raw)[1]) if protobuf else raw)
        except (ValueError, RecursionError):
            found = Status(message=shown(body.decode(errors="replace")) or "no body")
        wait = response.headers.get("retry-after", "")  # its other form, a date, is not used
        seconds = float(wait) if wait.isascii() and wait.isdigit() else 0.0
        error = found.error(seconds, status)
        if status == 401:  # say which credential was not accepted
            sent = self._credentials.description if server.startswith("https:") else ""
            error.args = (f"{error}; sent: {sent or 'nothing'}",)
        raise error


async def read_body(response: Response, most: int, path: str) -> bytes:
    """Return the body of the answer to a request of a path.

    Raises:
        ApiError: it has more bytes than `most`.
        HttpError: the connection breaks, see `Response.chunks`.
    """
    body = bytearray()
    async for chunk in response.chunks():
        body += chunk
        if len(body) > most:
            raise ApiError("too_long", f"the answer to {path} has too many bytes")
    return bytes(body)


@contextmanager
def _reading(response: Response) -> Iterator[None]:
    """Close an answer at the end; a broken connection is an ApiError."""
    try:
        yield
    except HttpError as error:
        raise _api_error(error) from error
    finally:
        response.close()


def _api_error(error: HttpError) -> ApiError:
    return ApiError(error.reason, shown(str(error)))
