"""The local socket: how commands on this node talk to the running process, without a port.

HTTP over an abstract Unix socket. Its name lives in the network namespace, like the lock of
instance.py: `kubectl exec` into the pod reaches it, and so does root on the node. The kernel tells
who connects (SO_PEERCRED); only root and the process's own user get an answer. Others can at most
connect and are closed at once, so they cannot use up descriptors.

Anyone can bind an abstract name first. The client therefore checks the server's user in the same
way (operate/client.py), and this process waits until the name is free.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from math import inf
from typing import NamedTuple, TypeVar

import msgspec

from steersman.host.peers import CONTROL, is_trusted, peer
from steersman.model.errors import BusyError
from steersman.model.findings import quoted
from steersman.run.serve.connections import POOL, Bounds, ClientPool, Clients
from steersman.run.serve.http import NOT_FOUND, Answer, App, Connection, Page, Request

log = logging.getLogger("steersman")

_RETRY = 2.0  # seconds between two attempts to bind the name
_MOST_CLIENTS = 32
"""Clients at a time; each is an operator's command or a page."""

_working: set[asyncio.Task[None]] = set()
"""Work of pages whose clients may have left."""

Asked = TypeVar("Asked", bound=msgspec.Struct)


class ControlSocket:
    """Serves pages on the local socket."""

    def __init__(self, pages: Mapping[tuple[str, str], Page], name: str = CONTROL) -> None:
        self._name = name
        self._pages = pages
        self.listening = asyncio.Event()
        """The name is bound."""

    async def run(self) -> None:
        """Serve until cancelled."""
        sock = await self._bind()
        app = App(self._page)
        # The operator's commands may use the reserve: there are few of them.
        clients = Clients(ClientPool(Bounds(reserve=0, busy=inf)))
        self.listening.set()
        try:
            await clients.accept(
                sock,
                lambda: Connection(app, clients),
                f"local socket @{self._name}",
                lambda client: clients.busy < _MOST_CLIENTS and is_trusted(peer(client)[1]),
            )
        finally:
            sock.close()
            await clients.end()

    async def _bind(self) -> socket.socket:
        warned = False
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.bind(f"\0{self._name}")
                sock.listen(16)
                sock.setblocking(False)
                if not POOL.spares(sock):  # kept for rules and for the API server
                    raise OSError(errno.EMFILE, "too few file descriptors are left")
            except OSError as error:
                sock.close()
                if not warned:  # usually the previous instance, which is about to end
                    log.info("local socket @%s: %s; retrying", self._name, error.strerror)
                warned = True
                await asyncio.sleep(_RETRY)
            else:
                return sock

    def _page(self, request: Request) -> Awaitable[Answer] | Answer:
        page = self._pages.get((request.method, request.path))
        return NOT_FOUND if page is None else page(request)


class _Failure(NamedTuple):
    """Why some work has no result."""

    text: str
    status: int
    """Of HTTP, before the first step."""


def told_in_lines(
    kind: type[Asked], work: Callable[[Asked, Callable[[object], None]], Awaitable[object]]
) -> Page:
    """Return a page that does some work, and answers with a line of JSON for each step of it.

    The work goes on if the client leaves.

    Args:
        work: gets the request, and a function that sends a step; its result is the last line. A
            failure is the last line, too; before the first step, it is a status: 409 for a
            BusyError, else 500.
    """

    async def handle(request: Request) -> Answer:
        try:
            asked = msgspec.json.decode(await request.read(), type=kind)
        except msgspec.MsgspecError as error:
            return Answer(f"{error}\n", 400)
        steps: asyncio.Queue[object] = asyncio.Queue()
        done = object()

        async def to_end() -> None:
            try:
                steps.put_nowait(await work(asked, steps.put_nowait))
            except BusyError as error:
                steps.put_nowait(_Failure(str(error), 409))
            except Exception as error:
                log.exception("the page %s failed", quoted(request.path))
                text = f"{type(error).__name__}: {error}; the log of the process says more"
                steps.put_nowait(_Failure(text, 500))
            finally:
                steps.put_nowait(done)

        task = asyncio.create_task(to_end())
        _working.add(task)
        task.add_done_callback(_working.discard)
        first = await steps.get()
        if first is done:
            return Answer("the process is ending\n", 503)
        if isinstance(first, _Failure):
            return Answer(f"{first.text}\n", first.status)

        async def lines(step: object) -> AsyncGenerator[bytes]:
            while step is not done:
                step = {"error": step.text} if isinstance(step, _Failure) else step
                yield msgspec.json.encode(step) + b"\n"
                step = await steps.get()

        return Answer(pieces=lines(first), content_type="application/json")

    return handle
