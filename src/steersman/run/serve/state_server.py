"""The server for pages of a cluster: the pages of the local socket on a port, with a token.

It is off unless it is configured, and never open: every request brings the token of the file, in
`Authorization: Bearer TOKEN`, or in `X-Steersman-Token: TOKEN` because the API server's proxy of
pods removes the other header. Without a token in the file nobody gets an answer. Switching the mode
is left to the local socket.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import ssl
from collections.abc import Awaitable, Callable, Mapping
from math import inf
from pathlib import Path

from steersman.config.types import StateServer
from steersman.host.files import read_file
from steersman.model.addresses import split_host_port
from steersman.run.serve.connections import Bounds, ClientPool
from steersman.run.serve.http import (
    NOT_FOUND,
    RETRY_SECONDS,
    Answer,
    App,
    Page,
    Request,
    keep_serving,
)

log = logging.getLogger(__name__)

MOST_CLIENTS = 32
_LEAST_TOKEN, _LONGEST_TOKEN = 16, 4096
"""Characters of a token: a shorter one could be guessed."""
_CERTIFICATE_CHECK = 60.0
"""Seconds between two looks for a new certificate."""
_ONLY_LOCAL = frozenset({"/switch"})


class TokenFile:
    """The token of a file, which may change at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._logged = ""

    def read(self) -> bytes:
        """Return the token; b"" if there is none, which is logged once."""
        token, problem = b"", ""
        try:
            token = read_file(self._path, _LONGEST_TOKEN).strip()
            if len(token) < _LEAST_TOKEN:
                problem = f"has no token: write at least {_LEAST_TOKEN} characters into it"
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        if problem and problem != self._logged:
            text = "the state server answers nobody: its token file %s %s"
            log.error(text, self._path, problem)
        self._logged = problem
        return b"" if problem else token

    def admits(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request brings the token."""
        given = headers.get("x-steersman-token", "")
        scheme, _, value = headers.get("authorization", "").partition(" ")
        if not given and scheme.lower() == "bearer":
            given = value.strip()
        token = self.read()
        # Compared in any case, and in constant time: the answer tells nothing about the token.
        same = hmac.compare_digest(given.encode(errors="surrogateescape"), token)
        return same and bool(token)


def state_app(pages: Mapping[tuple[str, str], Page], token: TokenFile) -> App:
    """Return the application: every page of the local socket but a switch of the mode."""

    def serve(request: Request) -> Awaitable[Answer] | Answer:
        if not token.admits(request.headers):
            headers = {"WWW-Authenticate": "Bearer"}
            return Answer("unauthorized\n", 401, more_headers=headers)
        page = pages.get((request.method, request.path))
        if page is None or request.path in _ONLY_LOCAL:
            return NOT_FOUND
        return page(request)

    return App(serve)


async def serve_state(
    config: StateServer,
    pages: Mapping[tuple[str, str], Page],
    *,
    on_failure: Callable[[str], None],
    hard_fail: bool,
) -> None:
    """Serve until cancelled; retry whatever keeps the server from being started.

    Args:
        config: its address is given, and a token file.
        on_failure: called with the reason if the address cannot be bound.
        hard_fail: raise that instead of retrying.
    """
    token = TokenFile(Path(config.token_file))
    logged = ""
    while not token.read():  # noqa: ASYNC110 - the file may be on a system without notifications
        await asyncio.sleep(RETRY_SECONDS)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if config.cert_file else None
    while tls is not None:
        try:
            _load_certificate(tls, config)
            break
        except OSError as error:
            text = f"the state server has no certificate: {config.cert_file}, {config.key_file}"
            if logged != (logged := f"{text}: {error.strerror or error}"):
                log.error("%s", logged)
            await asyncio.sleep(RETRY_SECONDS)
    host, port = split_host_port(config.bind_address)
    if tls is None:
        log.info(
            "the state server at %s has no TLS: others on the network can read its token", host
        )
    pool = ClientPool(Bounds(per_server=MOST_CLIENTS, total=MOST_CLIENTS, busy=inf))
    serving = keep_serving(
        lambda: state_app(pages, token),
        host,
        port,
        what="state server",
        on_failure=on_failure,
        hard_fail=hard_fail,
        pool=pool,
        tls=tls,
    )
    if tls is None:
        await serving
        return
    tasks = [asyncio.create_task(work) for work in (serving, follow_certificate(tls, config))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # both end only by a failure
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _load_certificate(tls: ssl.SSLContext, config: StateServer) -> None:
    """Load the certificate and its key.

    Raises:
        OSError: they cannot be read, do not belong together, or the key is encrypted.
    """

    def no_password() -> str:  # without this, OpenSSL would ask on the terminal and hold the loop
        raise OSError(f"{config.key_file} is encrypted: give a key without a password")

    tls.load_cert_chain(config.cert_file, config.key_file, password=no_password)


async def follow_certificate(tls: ssl.SSLContext, config: StateServer) -> None:
    """Load the certificate again whenever its files change, until cancelled."""

    def version() -> list[tuple[int, int]]:
        files = map(os.stat, (config.cert_file, config.key_file))
        return [(found.st_ino, found.st_mtime_ns) for found in files]

    known = None
    while True:
        try:
            if (now := version()) != known:
                _load_certificate(tls, config)
                known = now
        except OSError as error:  # a pair that is being replaced; the last one stays in use
            log.warning("the certificate of the state server cannot be read: %s", error)
        await asyncio.sleep(_CERTIFICATE_CHECK)
