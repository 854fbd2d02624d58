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
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import TypeAlias, TypeVar

import msgspec
from aiohttp import web

from steersman.host.local_socket import CONTROL, is_trusted, peer
from steersman.model.errors import BusyError
from steersman.run.connections import POOL

log = logging.getLogger("steersman")

_RETRY = 2.0  # seconds between two attempts to bind the name
_MOST_CLIENTS = 32
"""Clients at a time; each is an operator's command or a page."""

_working: set[asyncio.Task[None]] = set()
"""Work of pages whose clients may have left."""

Asked = TypeVar("Asked", bound=msgspec.Struct)
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ControlSocket:
    """Serves pages on the local socket."""

    def __init__(self, pages: Mapping[tuple[str, str], Handler], name: str = CONTROL) -> None:
        """Create the socket; nothing is bound before `run`.

        Args:
            pages: the handlers, by method and path.
            name: of the abstract socket.
        """
        self._name = name
        self._pages = pages
        self._clients = 0
        self.listening = asyncio.Event()
        """The name is bound."""

    async def run(self) -> None:
        """Serve until cancelled."""
        sock = await self._bind()
        app = web.Application(client_max_size=1 << 20)
        for (method, path), handler in self._pages.items():
            app.router.add_route(method, path, self._counted(handler))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        assert runner.server is not None
        loop = asyncio.get_running_loop()
        self.listening.set()
        try:
            while True:
                try:
                    client, _ = await loop.sock_accept(sock)
                except OSError as error:  # no descriptor is left, for a moment
                    log.debug("local socket @%s: %s", self._name, error.strerror)
                    await asyncio.sleep(_RETRY)
                    continue
                if self._clients >= _MOST_CLIENTS or not is_trusted(peer(client)[1]):
                    client.close()
                    continue
                client.setblocking(False)
                with suppress(OSError):  # it has gone
                    await loop.connect_accepted_socket(runner.server, client)
        finally:
            sock.close()
            await runner.cleanup()

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

    def _counted(self, handler: Handler) -> Handler:
        async def call(request: web.Request) -> web.StreamResponse:
            self._clients += 1
            try:
                return await handler(request)
            finally:
                self._clients -= 1

        return call


def told_in_lines(
    kind: type[Asked], work: Callable[[Asked, Callable[[object], None]], Awaitable[object]]
) -> Handler:
    """Return a page that does some work, and answers with a line of JSON for each step of it.

    The work goes on if the client leaves.

    Args:
        kind: type of the request's body.
        work: gets the request, and a function that sends a step; its result is the last line. A
            BusyError before the first step is answered with status 409.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            asked = msgspec.json.decode(await request.read(), type=kind)
        except msgspec.MsgspecError as error:
            return web.Response(status=400, text=f"{error}\n")
        lines: asyncio.Queue[object] = asyncio.Queue()
        done = object()

        async def to_end() -> None:
            try:
                lines.put_nowait(await work(asked, lines.put_nowait))
            except BusyError as error:
                lines.put_nowait(error)
            finally:
                lines.put_nowait(done)

        task = asyncio.create_task(to_end())
        _working.add(task)
        task.add_done_callback(_working.discard)
        line = await lines.get()
        if isinstance(line, BusyError):
            return web.Response(status=409, text=f"{line}\n")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while line is not done:
            line = {"error": str(line)} if isinstance(line, BusyError) else line
            await response.write(msgspec.json.encode(line) + b"\n")
            line = await lines.get()
        await response.write_eof()
        return response

    return handle


async def send_pieces(
    request: web.Request, pieces: Iterator[bytes], content_type: str
) -> web.StreamResponse:
    """Answer with pieces that are made in a thread while they are sent."""
    response = web.StreamResponse(headers={"Content-Type": content_type})
    await response.prepare(request)
    while piece := await asyncio.to_thread(next, pieces, b""):
        await response.write(piece)
    await response.write_eof()
    return response
