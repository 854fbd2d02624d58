"""The local port: what the local socket (control.py) is on Windows.

HTTP on a port of loopback, which the system chooses and host/local_port.py publishes. A question
without a proof of the secret gets no answer, and the answer has a proof of its own.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Mapping
from inspect import isawaitable
from math import inf
from pathlib import Path

import msgspec

from steersman.host.local_port import NONCE, PROOF, LocalPort, port_file, publish
from steersman.run.serve.connections import Bounds, ClientPool, Clients, listening_socket
from steersman.run.serve.http import NOT_FOUND, Answer, App, Connection, Page, Request

log = logging.getLogger("steersman")

_RETRY = 10.0  # seconds between two attempts
_MOST_CLIENTS = 32


class ControlPort:
    """Serves pages on the local port."""

    def __init__(self, pages: Mapping[tuple[str, str], Page], file: Path | None = None) -> None:
        """Create the server; nothing is bound before `run`.

        Args:
            pages: by method and path.
            file: names the port; for tests.
        """
        self._pages = pages
        self._file = file or port_file()
        self._local_port = LocalPort(0, secrets.token_hex(32))
        self.listening = asyncio.Event()
        """The file names the port."""

    async def run(self) -> None:
        """Serve until cancelled; then remove the file."""
        pool = ClientPool(Bounds(per_server=_MOST_CLIENTS, total=_MOST_CLIENTS, busy=inf))
        clients, app = Clients(pool), App(self._page)
        while True:
            try:
                sock = listening_socket("127.0.0.1", 0, pool)
            except OSError as error:
                log.warning("no commands are answered: %s; retrying", error)
                await asyncio.sleep(_RETRY)
                continue
            with sock:
                self._local_port = self._local_port._replace(port=sock.getsockname()[1])
                try:
                    publish(self._file, self._local_port)
                except OSError as error:
                    log.warning("no commands are answered: %s; retrying", error)
                    await asyncio.sleep(_RETRY)
                    continue
                self.listening.set()
                try:
                    await clients.accept(sock, lambda: Connection(app, clients), "local port")
                finally:
                    self._file.unlink(missing_ok=True)
                    await clients.end()

    async def _page(self, request: Request) -> Answer:
        nonce, given = (request.headers.get(name.lower(), "") for name in (NONCE, PROOF))
        if not hmac.compare_digest(
            given.encode(errors="replace"), self._local_port.proof("question", nonce).encode()
        ):
            return Answer("only administrators get answers\n", 401)
        page = self._pages.get((request.method, request.path))
        answer = NOT_FOUND if page is None else page(request)
        if isawaitable(answer):
            answer = await answer
        headers = {**answer.more_headers, PROOF: self._local_port.proof("answer", nonce)}
        return msgspec.structs.replace(answer, more_headers=headers)
