"""GET requests to one cluster's API servers: who answers, how to ask, and what is an answer.

Everything that is not the JSON that was asked for leaves here as one exception, `ApiError`, with a
short reason to count; when to try again is not decided here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult

from steersman import __version__
from steersman.host.process import in_thread
from steersman.model.addresses import (
    canonical_cidr,
    canonical_ip,
    in_cidr,
    join_host_port,
    without_password,
)
from steersman.source.backoff import Timing
from steersman.source.body import pieces
from steersman.source.credentials import CredentialError, Credentials
from steersman.source.kubeconfig import ClusterAccess
from steersman.source.stats import Complaints, SourceStats
from steersman.source.tls import TlsContexts, TlsError

MAX_ERROR_BODY = 64 << 10
"""Bytes of an error's body that are looked at."""

_LONGEST = 400  # characters of a server's words that are shown

log = logging.getLogger("steersman.source")


class ApiError(Exception):
    """A request failed or was answered by something else than asked for."""

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        status: int = 0,
        retry_after: float = 0.0,
        causes: Sequence[str] = (),
    ) -> None:
        """Take what happened.

        Args:
            reason: a short word to count it under, such as `http_403`.
            message: what happened, for people.
            status: HTTP status (or code of an ERROR event), 0 where there is none.
            retry_after: seconds that the server wants to be left alone.
            causes: reasons in the details of a Status, such as `ResourceVersionTooLarge`.
        """
        super().__init__(message)
        self.reason = reason
        self.status = status
        self.retry_after = retry_after
        self.causes = tuple(causes)


class _Cause(msgspec.Struct, frozen=True):
    reason: str | None = None


class _Details(msgspec.Struct, frozen=True, rename="camel"):
    retry_after_seconds: float | None = None
    causes: list[_Cause] | None = None


class Status(msgspec.Struct, frozen=True):
    """The fields read of a Kubernetes `Status` object."""

    message: str | None = None
    reason: str | None = None
    code: int | None = None
    details: _Details | None = None

    def error(self, retry_after: float = 0.0, status: int = 0) -> ApiError:
        """Turn it into an ApiError; the HTTP status and header, where given, come first."""
        code = status or self.code or 0
        details = self.details or _Details()
        return ApiError(
            # a label of metrics, so the answer must not make up any number of them
            f"http_{code}" if 100 <= code <= 599 else "http_other",
            f"{code}: {_shown(self.message or self.reason or 'no reason given')}",
            status=code,
            retry_after=retry_after or details.retry_after_seconds or 0.0,
            causes=[cause.reason for cause in details.causes or () if cause.reason],
        )


class ApiClient:
    """Asks the server that last worked, or the next one."""

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
        self.complaints = Complaints(timing.now)
        self.large_body = asyncio.Lock()
        """Held while a body is in memory that is larger than usual."""
        self._current = 0
        self._session: aiohttp.ClientSession | None = None
        stats.server = access.servers[0]

    async def __aenter__(self) -> Self:
        encoding = "identity" if self._access.disable_compression else "gzip"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, resolver=_Resolver(), socket_factory=_socket),
            auto_decompress=False,  # see `body`
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={
                "Accept": "application/json",
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
        """Take note that a server does not work: the next request goes to the next one."""
        servers = self._access.servers
        if len(servers) > 1 and servers[self._current] == server:
            self._current = (self._current + 1) % len(servers)
            self._stats.server = servers[self._current]
            self._stats.failovers += 1
            words = f"API server {server} does not work, trying {self._stats.server}"
            log.log(self.complaints.level(words), "%s", words)

    @asynccontextmanager
    async def get(
        self, path: str, params: Mapping[str, str], quiet: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask, and give the answer while its body is still to be read.

        Args:
            path: with a leading slash.
            params: the query.
            quiet: seconds without a byte after which the connection is given up.

        Raises:
            ApiError: no server can be reached, or the answer is not JSON with status 200; also out
                of the caller's block, when the connection breaks there.
        """
        response, server = await self._first_answer(path, params, quiet)
        try:
            await self._check(response, server)
            yield response
        except _BROKEN as error:
            self.failed(server)
            raise _broken(error) from error
        finally:
            response.close()

    async def post(self, path: str, body: object) -> None:
        """Create an object.

        Raises:
            ApiError: no server can be reached, or it refuses.
        """
        response, server = await self._first_answer(path, {}, self._timing.answer, body)
        try:
            await self._check(response, server, good=(200, 201, 202))
        except _BROKEN as error:
            raise _broken(error) from error
        finally:
            response.close()

    async def _first_answer(
        self, path: str, params: Mapping[str, str], quiet: float, body: object = None
    ) -> tuple[aiohttp.ClientResponse, str]:
        """Ask each server once, beginning with the current one, until one answers."""
        last: Exception | None = None
        for _ in self._access.servers:
            server = self._access.servers[self._current]
            try:
                return await self._ask(server, path, params, quiet, body), server
            except (CredentialError, TlsError) as error:
                raise ApiError("credentials", str(error)) from error
            except _BROKEN as error:
                last = error
                self.failed(server)
        assert last is not None
        raise _broken(last) from last

    async def _ask(
        self, server: str, path: str, params: Mapping[str, str], quiet: float, body: object
    ) -> aiohttp.ClientResponse:
        assert self._session is not None, "used outside of `async with`"
        secure = server.startswith("https:")
        tls = self._tls.current(await self._credentials.key_pair()) if secure else None
        timing = self._timing
        async with asyncio.timeout(timing.connect + timing.answer):
            return await self._session.request(
                "GET" if body is None else "POST",
                server + path,
                params=params,
                json=body,
                headers=await self._credentials.headers()
                if secure
                else self._credentials.withheld(server),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None, connect=timing.connect, sock_read=quiet),
                ssl=tls or True,
                server_hostname=(self._access.tls_server_name or None) if tls else None,
                proxy=self._access.proxy_url or environment_proxy(server, os.environ),
            )

    async def _check(
        self, response: aiohttp.ClientResponse, server: str, good: Sequence[int] = (200,)
    ) -> None:
        """Raise ApiError unless this is JSON with a good status."""
        status = response.status
        if status in good and response.content_type == "application/json":
            return
        if status == 401:
            self._credentials.refused()
        if status >= 500 or status in (200, 429):
            self.failed(server)
        body = await _beginning(response)
        if status == 200:
            kind = response.content_type
            raise ApiError("not_json", f"the answer is {kind}, not JSON: is this an API server?")
        if 300 <= status < 400:
            target = _shown(response.headers.get("Location", "nowhere"))
            raise ApiError("redirect", f"{status}: redirected to {target}", status=status)
        wish = _seconds(response.headers.get("Retry-After", ""))
        error = _status_of(body).error(wish, status)
        if status == 401:
            sent = self._credentials.words if server.startswith("https:") else ""
            error.args = (f"{error}; sent: {sent or 'nothing'}",)
        raise error


_BROKEN = (aiohttp.ClientError, OSError, asyncio.TimeoutError)


def _broken(error: Exception) -> ApiError:
    text = _shown(str(error)) or type(error).__name__
    refused = next((words for alert, words in _TLS_ALERTS.items() if alert in text), "")
    if refused:  # in TLS 1.3 it comes with the first bytes that are read
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
            number = cause.errno or 0  # negative where a name cannot be resolved
            why = os.strerror(number) if number > 0 else cause.strerror or str(cause)
            why = why or "the connection broke"
            return ApiError("connect", f"cannot connect to {proxy}{where}: {why}")
        case asyncio.TimeoutError():
            return ApiError("timeout", f"the server stopped sending: {text}")
        case _:
            return ApiError("connection", f"the connection broke: {text}")


_TLS_ALERTS = {
    "ALERT_CERTIFICATE_EXPIRED": "the server refuses our client certificate: it has expired",
    "ALERT_BAD_CERTIFICATE": "the server refuses our client certificate",
    "ALERT_UNKNOWN_CA": "the server refuses our client certificate: it does not know its authority",
    "ALERT_CERTIFICATE_REQUIRED": "the server requires a client certificate",
}


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    body = b""
    async for chunk in pieces(response):
        body += chunk
        if len(body) > MAX_ERROR_BODY:
            break
    return body[:MAX_ERROR_BODY]


def _shown(text: str) -> str:
    """Return what a server says as one line, not too long and without passwords."""
    words = without_password(" ".join(text.split()))
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."


def _status_of(body: bytes) -> Status:
    try:
        return msgspec.json.decode(body, type=Status)
    except (ValueError, RecursionError):
        return Status(message=_shown(body[:_LONGEST].decode(errors="replace")) or "no body")


def _seconds(text: str) -> float:
    """`Retry-After` in seconds; its other form, a date, is not used by API servers."""
    return float(text) if text.isascii() and text.isdigit() else 0.0


class _Resolver(AbstractResolver):
    """Resolves names in threads that the end of the process does not wait for."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
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
        """Nothing to close."""


def _socket(address: tuple[int, int, int, str, tuple[object, ...]]) -> socket.socket:
    """Make a socket that notices within about half a minute that the other end is gone."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
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
    """Return the proxy that `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY` ask for, as Go reads them.

    Addresses of the loopback network never go through one; `NO_PROXY` takes names (with their
    subdomains), addresses and CIDRs.
    """
    parts = urlsplit(server)
    proxies = _proxies(environ)
    proxy = proxies.get(parts.scheme)
    if not proxy or _bypassed(parts.hostname or "", proxies.get("no", "")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _proxies(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name.lower().removesuffix("_proxy"): value
        for name, value in environ.items()
        if name.lower().endswith("_proxy")
    }


def _bypassed(host: str, no_proxy: str) -> bool:
    address = canonical_ip(host)
    if host == "localhost" or (address and (address.startswith("127.") or address == "::1")):
        return True
    for word in (part.strip().lower() for part in no_proxy.split(",")):
        cidr = canonical_cidr(word)
        if word == "*" or (word and word == host):
            return True
        if address and cidr and in_cidr(address, cidr):
            return True
        if word and not address and host.endswith("." + word.lstrip("*").lstrip(".")):
            return True
    return False
