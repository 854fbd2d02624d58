"""Answer simple requests at once: a probe's GET on a connection that is used once.

Kubelet and load balancers ask many times a minute, for many Services, and want one short page. No
protocol object, task or parser is made for that. Whatever else comes is left to the real server.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus

import msgspec

_LONGEST = 4096
"""Bytes of a request that are looked at."""
_REQUEST = re.compile(
    rb"GET (/[\w./~-]*) HTTP/1\.1\r\n"
    rb"(?:(?!(?i:content-length|transfer-encoding|upgrade|expect):)[\w-]+:[ \t]?[ -~]*\r\n)*\r\n",
    re.ASCII,
)
_CLOSE = re.compile(rb"\r\nconnection:[ \t]?close\r\n", re.IGNORECASE)


class Reply(msgspec.Struct, frozen=True):
    """A short answer."""

    body: bytes
    status: int
    headers: dict[str, str]

    def encode(self) -> bytes:
        """Write it as the last answer of a connection."""
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
            f"Content-Length: {len(self.body)}",
            f"Date: {formatdate(usegmt=True)}",
            "Connection: close",
        ]
        return "\r\n".join((*lines, "", "")).encode("latin-1") + self.body


Pages = Callable[[str], Reply]
"""Answers a GET for a path; it neither waits nor raises."""


def simple_path(head: bytes) -> str | None:
    """Return the path of a whole GET after which the client closes; None if it is anything else."""
    found = _REQUEST.fullmatch(head)
    return found[1].decode() if found and _CLOSE.search(head) else None


def answer(sock: socket.socket, pages: Pages) -> bool:
    """Answer what has come so far if that is a simple request; return whether it was.

    If it was not, nothing was read.

    Raises:
        BlockingIOError: nothing has come.
        OSError: the client is gone.
    """
    head = sock.recv(_LONGEST, socket.MSG_PEEK)
    path = simple_path(head)
    if path is None:
        return False
    sock.recv(len(head))  # what is left unread would turn the end into a reset
    sock.send(pages(path).encode())  # it fits into an empty buffer
    return True


class Newcomer:
    """A client that has not sent anything yet; it looks like a transport that can be dropped."""

    def __init__(self, sock: socket.socket, on_data: Callable[[Newcomer], None]) -> None:
        """Have `on_data` called once something has come; the socket is the caller's again then."""
        self._sock: socket.socket | None = sock
        self._loop = asyncio.get_running_loop()
        self._on_data = on_data
        self._loop.add_reader(sock, self._came)

    def is_closing(self) -> bool:
        """Whether somebody else looks after the client now."""
        return self._sock is None

    def abort(self) -> None:
        """Close the connection."""
        sock = self._release()
        if sock is not None:
            sock.close()

    def _came(self) -> None:
        self._release()
        self._on_data(self)

    def _release(self) -> socket.socket | None:
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.remove_reader(sock)
        return sock
