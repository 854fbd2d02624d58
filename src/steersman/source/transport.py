"""Connections to the API server below HTTP: TLS, name resolution, keep-alive, proxies, gzip."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import tempfile
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from steersman.host.process import in_thread
from steersman.model.addresses import canonical_cidr, canonical_ip, in_cidr
from steersman.source.credentials import KeyPair
from steersman.source.kubeconfig import ClusterAccess

_PIECE = 256 << 10  # bytes decompressed at a time, in about a millisecond


class TlsError(Exception):
    """A certificate cannot be used; the message says which and why."""


class TlsContexts:
    """Makes the TLS context for the next connection; the same one until a certificate changes."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._inputs: tuple[bytes, KeyPair | None] | None = None
        self._context: ssl.SSLContext | None = None

    def current(self, pair: KeyPair | None) -> ssl.SSLContext:
        """Return a context for the current certificate authority and this client certificate.

        Raises:
            TlsError: the authority or the certificate cannot be read or used.
        """
        ca = self._access.ca
        try:
            authority = ca.read() if ca else b""
        except OSError as error:
            raise TlsError(f"certificate authority: {error}") from error
        if ca and not authority.decode("ascii", "ignore").strip():
            # The file is being written; trusting the system's authorities instead is not meant.
            raise TlsError(f"certificate authority: {ca.path or 'the text'} is empty")
        # Making a context parses all authorities, which takes milliseconds.
        inputs = (authority, pair)
        if self._context is None or inputs != self._inputs:
            self._context = _context(authority, pair, insecure=self._access.insecure)
            self._inputs = inputs
        return self._context


def _context(authority: bytes, pair: KeyPair | None, *, insecure: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cadata=authority.decode("ascii", "ignore") or None)
    except (ssl.SSLError, ValueError) as error:
        raise TlsError(f"certificate authority is not PEM: {error}") from error
    # On since Python 3.13; it refuses the CAs that many clusters were set up with.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if pair is not None:
        # `ssl` loads only files, so the key gets one that no disk ever sees.
        try:
            with ExitStack() as stack:
                certificate, key = (_private_file(stack, text) for text in pair)
                # With an encrypted key OpenSSL would ask on the terminal; this makes it fail.
                context.load_cert_chain(certificate, key, password="")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise TlsError(f"client certificate or key cannot be used: {error}") from error
    return context


def _private_file(stack: ExitStack, text: bytes) -> str:
    """Return the path of a file with this content that goes with the stack."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("steersman-pem")
        stack.callback(os.close, number)
        os.write(number, text)
        return f"/proc/self/fd/{number}"
    folder = stack.enter_context(tempfile.TemporaryDirectory())  # mode 0700
    path = os.path.join(folder, "pem")
    with open(path, "wb") as file:
        file.write(text)
    return path


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
