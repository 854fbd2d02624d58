"""HTTP requests to the API servers of one cluster, with failover and one kind of error.

Lists and watches are asked for in protobuf, if so configured, and taken in JSON, too: the server
decides. Everything else becomes an `ApiError` with a short reason for metrics; when to try again is
decided in reflector.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from steersman import __version__
from steersman.host.process import in_thread
from steersman.model.addresses import canonical_cidr, canonical_ip, in_cidr, join_host_port
from steersman.source.base import LogThrottle, Pace, ServerOrder, SourceStats, Timing
from steersman.source.credentials import CredentialError, Credentials, TlsContexts, TlsError
from steersman.source.kubeconfig import ClusterAccess
from steersman.source.protobuf import CONTENT_TYPE, Message, unwrap
from steersman.source.wire import MAX_LINE, ApiError, Status, decode_status, shown

# -- Connections -----------------------------------------------------------------------------------
#
# Connections to the API server below HTTP: name resolution, keep-alive, proxies, gzip.

_PIECE = 256 << 10  # bytes decompressed at a time, in about a millisecond


class Resolver(AbstractResolver):
    """Resolves names in threads that do not delay the end of the process."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host, as getaddrinfo(3) sorts them."""
        found = await in_thread(
            socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG
        )
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=int(address[1]),
                family=kind,
                proto=proto,
                flags=flags,
            )
            for kind, _, proto, _, address in found
        ]

    async def close(self) -> None:
        """Do nothing."""


def keepalive_socket(address: tuple[int, int, int, str, tuple[object, ...]]) -> socket.socket:
    """Make a socket that notices within about half a minute that the peer is gone."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    # A silent peer: 15 s, then 3 probes 5 s apart. A peer that does not acknowledge data: 30 s.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 15),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 30_000),  # milliseconds; Linux
    ):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def environment_proxy(server: str, environ: Mapping[str, str]) -> str | None:
    """Return the proxy for a server by `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY`, as in Go.

    Loopback addresses never use one. `NO_PROXY` lists names (with their subdomains), addresses and
    CIDRs.
    """
    parts = urlsplit(server)
    proxies = {
        name.lower().removesuffix("_proxy"): value
        for name, value in environ.items()
        if name.lower().endswith("_proxy")
    }
    proxy = proxies.get(parts.scheme)
    if not proxy or _bypasses_proxy(parts.hostname or "", proxies.get("no", "")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _bypasses_proxy(host: str, no_proxy: str) -> bool:
    address = canonical_ip(host)
    if host == "localhost" or (address and (address.startswith("127.") or address == "::1")):
        return True
    for word in (part.strip().lower() for part in no_proxy.split(",")):
        cidr = canonical_cidr(word)
        if word == "*" or (word and word == host):
            return True
        if address and cidr and in_cidr(address, cidr):
            return True
        # `example.org`, `.example.org` and `*.example.org` mean all subdomains.
        if word and not address and host.endswith("." + word.lstrip("*").lstrip(".")):
            return True
    return False


class BrokenBodyError(aiohttp.ClientPayloadError):
    """A body is not compressed as its headers say, or is truncated."""


async def body_chunks(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield a body as it arrives, decompressed in small pieces.

    The session must not decompress: aiohttp returns all that a chunk expands to at once, and a few
    kilobytes of gzip can be hundreds of megabytes of zeros.

    Raises:
        BrokenBodyError: it cannot be decompressed.
    """
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding == "identity":
        async for chunk in response.content.iter_any():
            yield chunk
        return
    if encoding not in ("gzip", "x-gzip"):
        raise BrokenBodyError(f"it is compressed by {encoding[:40]!r}, which was not requested")
    # Other tasks run between two pieces, so that a bomb does not block the event loop either.
    gzip = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    async for chunk in response.content.iter_any():
        rest = chunk
        while True:
            try:
                piece = gzip.decompress(rest, _PIECE)
            except zlib.error as error:
                raise BrokenBodyError(f"it is not gzip: {error}") from None
            rest = gzip.unconsumed_tail
            if piece:
                yield piece
            if not rest and len(piece) < _PIECE:
                break
            await asyncio.sleep(0)
    if not gzip.eof:
        raise BrokenBodyError("it ended within compressed data")


# -- Requests --------------------------------------------------------------------------------------

JSON = "application/json"
MAX_ERROR_BODY = 64 << 10
"""Bytes of an error's body that are read."""

_SPOKEN = (JSON, CONTENT_TYPE)
_NOT_SPOKEN = frozenset({406, 415})  # Not Acceptable, Unsupported Media Type
_BROKEN = (aiohttp.ClientError, OSError, asyncio.TimeoutError)
_TLS_ALERTS = {
    "ALERT_CERTIFICATE_EXPIRED": "the server refuses our client certificate: it has expired",
    "ALERT_BAD_CERTIFICATE": "the server refuses our client certificate",
    "ALERT_UNKNOWN_CA": "the server refuses our client certificate: it does not know its authority",
    "ALERT_CERTIFICATE_REQUIRED": "the server requires a client certificate",
}

log = logging.getLogger("steersman.source")


class ApiClient:
    """Sends requests to the server that worked last, or to the next one."""

    def __init__(
        self,
        access: ClusterAccess,
        stats: SourceStats,
        timing: Timing,
        credentials: Credentials | None = None,
    ) -> None:
        self._access = access
        self._stats = stats
        self._timing = timing
        self._credentials = credentials or Credentials(access)
        self._tls = TlsContexts(access)
        self.throttle = LogThrottle(timing.now)
        self.large_body = asyncio.Lock()
        """Held while an unusually large body is in memory."""
        self.pace = Pace(timing, stats)
        self._order = ServerOrder(access.servers, timing)
        self._session: aiohttp.ClientSession | None = None
        self._json_only: set[str] = set()  # paths at which the server refused protobuf
        stats.server = self._order.current()

    async def __aenter__(self) -> Self:
        encoding = "identity" if self._access.disable_compression else "gzip"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, resolver=Resolver(), socket_factory=keepalive_socket
            ),
            auto_decompress=False,  # see `body_chunks`
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={
                "Accept": JSON,
                "Accept-Encoding": encoding,
                "User-Agent": f"steersman/{__version__}",
            },
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def failed(self, server: str) -> None:
        """Record that a server failed: the next request goes to the next one."""
        if self._order.leave(server):
            self._stats.server = self._order.current()
            self._stats.failovers += 1
            words = f"API server {server} failed, trying {self._stats.server}"
            log.log(self.throttle.level(words), "%s", words)

    @asynccontextmanager
    async def get(
        self,
        path: str,
        params: Mapping[str, str],
        idle_timeout: float,
        *,
        negotiate: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a GET request; yield the response with its body unread.

        Args:
            path: with a leading slash.
            params: the query.
            idle_timeout: seconds without a byte after which the connection is closed.
            negotiate: accept the configured content types, protobuf among them.

        Raises:
            ApiError: no server can be reached, or the answer is not one that is accepted, with
                status 200; also out of the caller's block, if the connection breaks there.
        """
        accept = self._access.accepted if negotiate and path not in self._json_only else JSON
        headers = [("Accept", accept)]
        response, server = await self._first_answer(path, params, idle_timeout, more=headers)
        if response.status in _NOT_SPOKEN and accept != JSON:
            response.close()
            log.info("%s: the server does not offer %s, using JSON", path, accept)
            self._json_only.add(path)
            headers = [("Accept", JSON)]
            response, server = await self._first_answer(path, params, idle_timeout, more=headers)
        try:
            await self._check(response, server, types=_SPOKEN if negotiate else (JSON,))
            yield response
        except _BROKEN as error:
            self.failed(server)
            raise connection_error(error) from error
        finally:
            response.close()

    @asynccontextmanager
    async def proxied(
        self,
        path: str,
        params: Mapping[str, str],
        idle_timeout: float,
        *,
        headers: Sequence[tuple[str, str]] = (),
        body: object = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request to a pod through the API server; yield the response with its body unread.

        Args:
            path: that of the pod's proxy, with the path of the pod's own page.
            params: the query.
            idle_timeout: seconds without a byte after which the connection is closed.
            headers: for the pod, beside those for the API server.
            body: a document to POST; None for a GET request.

        Raises:
            ApiError: the API server or the pod cannot be reached, or refuses; also out of the
                caller's block, if the connection breaks there.
        """
        response, server = await self._first_answer(path, params, idle_timeout, body, headers)
        try:
            if response.status != 200:
                if response.status == 401 and response.content_type != JSON:
                    text = shown(
                        (await response.content.read(MAX_ERROR_BODY)).decode(errors="replace")
                    )
                    raise ApiError("http_401", text or "the pod refuses the token", status=401)
                await self._check(response, server)
            yield response
        except _BROKEN as error:
            raise connection_error(error) from error
        finally:
            response.close()

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
        if self._access.content_type == CONTENT_TYPE:
            headers = [("Content-Type", CONTENT_TYPE), ("Accept", self._access.accepted)]
            response, server = await self._first_answer(path, {}, answer, message, headers)
            if response.status not in _NOT_SPOKEN:
                await self._created(path, response, server, _SPOKEN)
                return
            response.close()
        await self.post(path, body)

    async def _created(
        self, path: str, response: aiohttp.ClientResponse, server: str, types: Sequence[str]
    ) -> bytes:
        """Return the body of the answer to a POST request."""
        found = b""
        try:
            await self._check(response, server, (200, 201, 202), types)
            async for chunk in body_chunks(response):
                found += chunk
                if len(found) > MAX_LINE:
                    raise ApiError("malformed", f"the answer to {path} is too long")
            return found
        except _BROKEN as error:
            raise connection_error(error) from error
        finally:
            response.close()

    async def _first_answer(
        self,
        path: str,
        params: Mapping[str, str],
        idle_timeout: float,
        body: object = None,
        more: Sequence[tuple[str, str]] = (),
    ) -> tuple[aiohttp.ClientResponse, str]:
        """Try each server once, starting with the current one, until one answers."""
        assert self._session is not None, "used outside of `async with`"
        access, timing = self._access, self._timing
        last: Exception | None = None
        for _ in access.servers:
            server = self._stats.server = self._order.current()  # `failed` moves on
            secure = server.startswith("https:")
            try:
                tls = self._tls.current(await self._credentials.key_pair()) if secure else None
                headers = (
                    await self._credentials.headers()
                    if secure
                    else self._credentials.withheld(server)
                )
                async with asyncio.timeout(timing.connect + timing.answer):
                    response = await self._session.request(
                        "GET" if body is None else "POST",
                        server + path,
                        params=params,
                        **({"data": body} if isinstance(body, bytes) else {"json": body}),
                        headers=[*headers, *more],
                        allow_redirects=False,
                        timeout=aiohttp.ClientTimeout(
                            total=None, connect=timing.connect, sock_read=idle_timeout
                        ),
                        ssl=tls or True,
                        server_hostname=(access.tls_server_name or None) if tls else None,
                        proxy=access.proxy_url or environment_proxy(server, os.environ),
                    )
                    self.pace.answered()
                    self._order.answered(server)
                    return response, server
            except (CredentialError, TlsError) as error:
                raise ApiError("credentials", str(error)) from error
            except _BROKEN as error:
                last = error
                self.failed(server)
        assert last is not None
        self.pace.unreachable = True
        raise connection_error(last) from last

    async def _check(
        self,
        response: aiohttp.ClientResponse,
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
        async for chunk in body_chunks(response):
            body += chunk
            if len(body) > MAX_ERROR_BODY:
                break
        if status == 200:
            kind = response.content_type
            raise ApiError("not_json", f"the answer is {kind}, not JSON: is this an API server?")
        if 300 <= status < 400:
            target = shown(response.headers.get("Location", "nowhere"))
            raise ApiError("redirect", f"{status}: redirected to {target}", status=status)
        try:
            raw = body[:MAX_ERROR_BODY]
            protobuf = response.content_type == CONTENT_TYPE
            found = decode_status(Message(unwrap(raw)[1]) if protobuf else raw)
        except (ValueError, RecursionError):
            found = Status(message=shown(body.decode(errors="replace")) or "no body")
        wait = response.headers.get("Retry-After", "")  # its other form, a date, is not used
        seconds = float(wait) if wait.isascii() and wait.isdigit() else 0.0
        error = found.error(seconds, status)
        if status == 401:  # say which credential was not accepted
            sent = self._credentials.description if server.startswith("https:") else ""
            error.args = (f"{error}; sent: {sent or 'nothing'}",)
        raise error


def connection_error(error: Exception) -> ApiError:
    """Say in plain words why a connection failed."""
    text = shown(str(error)) or type(error).__name__
    refused = next((words for alert, words in _TLS_ALERTS.items() if alert in text), "")
    if refused:  # in TLS 1.3 the alert comes with the first bytes read
        return ApiError("tls", f"TLS: {refused}")
    match error:
        case aiohttp.ClientConnectorCertificateError(certificate_error=cause):
            why = getattr(cause, "verify_message", "") or str(cause)
            return ApiError("tls", f"TLS: {join_host_port(error.host, error.port or 0)}: {why}")
        case aiohttp.ClientSSLError(os_error=cause):
            why = getattr(cause, "reason", "") or str(cause)
            return ApiError("tls", f"TLS: {join_host_port(error.host, error.port or 0)}: {why}")
        case aiohttp.ClientConnectorError(os_error=cause):
            where = join_host_port(error.host, error.port or 0)
            proxy = "proxy " if isinstance(error, aiohttp.ClientProxyConnectionError) else ""
            number = cause.errno or 0  # negative if a name cannot be resolved
            why = os.strerror(number) if number > 0 else cause.strerror or str(cause)
            why = why or "the connection broke"
            return ApiError("connect", f"cannot connect to {proxy}{where}: {why}")
        case asyncio.TimeoutError():
            return ApiError("timeout", f"the server stopped sending: {text}")
        case aiohttp.ClientPayloadError():  # its text is about chunks and lengths
            return ApiError("connection", "the connection broke in the middle of an answer")
        case _:
            return ApiError("connection", f"the connection broke: {text}")
