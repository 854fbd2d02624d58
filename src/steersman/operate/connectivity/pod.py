"""Answer connections, and check who answers: what a pod does in a test of connectivity.

    python3 -c TEXT serve NAME NODE PORT
    python3 -c TEXT ask CHECKS SECONDS FILE

In a cluster, the text of this module is the program of the pods, whatever image they have: so it
imports Python's library only, and its arguments and results are JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from functools import partial
from typing import Any, NamedTuple, cast

TIMES = 8
"""Connections that must all reach the same endpoint."""
_TRY_SECONDS, _CHECK_SECONDS = 3.0, 8.0
_AGAIN = 0.5  # seconds between two tries of the checks that failed
_MOST_TEXT = 100
"""Characters of a reason: all results of a pod must fit into 4096 bytes."""


class Said(NamedTuple):
    """What a server answered."""

    server: str
    """Its name."""
    node: str
    """Where it runs."""
    client: str
    """The address of the client, as the server sees it."""
    own: str
    """The address that the client really has."""


class Check(NamedTuple):
    """Connections to make, and what must be true of the answers."""

    address: str
    port: int
    protocol: str = "TCP"
    times: int = 1
    server: str = ""
    """The server that must answer; "" for any."""
    node: str = ""
    """The node that it must be on; "" for any."""
    seen: bool = False
    """Whether the server must see the client's own address."""
    same: bool = False
    """Whether each connection must reach the same server."""


NewSocket = Callable[[Check], socket.socket]
"""Makes a non-blocking socket for a check; it may take a while."""


# A server


class _Datagrams(asyncio.DatagramProtocol):
    """Answers each datagram."""

    def __init__(self, name: str, node: str) -> None:
        self._own = (name, node)
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        del data
        self._transport.sendto(json.dumps([*self._own, addr[0]]).encode(), addr)


@asynccontextmanager
async def answering(sockets: Iterable[socket.socket], name: str, node: str) -> AsyncIterator[None]:
    """Answer on bound sockets for a while, with the name of the server and of its node."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        writer.write(json.dumps([name, node, writer.get_extra_info("peername")[0]]).encode())
        with suppress(OSError):
            await writer.drain()
        writer.close()

    async with AsyncExitStack() as stack:
        for sock in sockets:
            if sock.type == socket.SOCK_STREAM:
                server = await asyncio.start_server(answer, sock=sock)
                stack.callback(server.close)
            else:
                transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                    partial(_Datagrams, name, node), sock=sock
                )
                stack.callback(transport.close)
        yield


def bound_sockets(port: int) -> list[socket.socket]:
    """Return sockets of a port on all addresses of this pod, in the families that it has."""
    found = []
    for family in (socket.AF_INET, socket.AF_INET6):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            try:
                sock = socket.socket(family, kind)
                sock.setblocking(False)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(("", port))
            except OSError:
                if family == socket.AF_INET:
                    raise
            else:
                found.append(sock)
    return found


async def _serve(name: str, node: str, port: int) -> None:
    async with answering(bound_sockets(port), name, node):
        await asyncio.Event().wait()


# A client


def _new_socket(check: Check) -> socket.socket:
    family = socket.AF_INET6 if ":" in check.address else socket.AF_INET
    kind = socket.SOCK_STREAM if check.protocol == "TCP" else socket.SOCK_DGRAM
    sock = socket.socket(family, kind)
    sock.setblocking(False)
    return sock


async def _connect(check: Check, new_socket: NewSocket) -> Said:
    """Connect once, and return what the server answers."""
    loop = asyncio.get_running_loop()
    with closing(await asyncio.to_thread(new_socket, check)) as sock:
        async with asyncio.timeout(_TRY_SECONDS):
            await loop.sock_connect(sock, (check.address, check.port))
            own = sock.getsockname()[0]
            if check.protocol == "UDP":
                await loop.sock_sendall(sock, b"?")
            answer = await loop.sock_recv(sock, 1024)
    if not answer:
        raise ConnectionResetError(104, "the connection was closed without an answer")
    server, node, client = json.loads(answer)
    return Said(server, node, client, own)


def wrong(check: Check, said: Sequence[Said]) -> str:
    """Return why answers are wrong; "" if they are right."""
    for each in said:
        if check.server and each.server != check.server:
            return f"{each.server} answered instead of {check.server}"
        if check.node and each.node != check.node:
            return f"{each.server} on {each.node} answered: it is not on {check.node}"
        if check.seen and each.client != each.own:
            return f"the endpoint saw {each.client} instead of {each.own}"
    servers = sorted({each.server for each in said})
    if check.same and len(servers) > 1:
        return f"one client reached {' and '.join(servers)}"
    return ""


async def try_check(check: Check, new_socket: NewSocket = _new_socket) -> str:
    """Make the connections of a check; return why the answers are wrong, "" if they are right."""
    host = f"[{check.address}]" if ":" in check.address else check.address
    try:
        async with asyncio.timeout(_CHECK_SECONDS):
            return wrong(check, [await _connect(check, new_socket) for _ in range(check.times)])
    except TimeoutError:
        return f"{host}:{check.port}: no answer within {_TRY_SECONDS:g} s"
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        return f"{host}:{check.port}: {why}"


async def _ask(checks: Sequence[Check], seconds: float) -> list[str]:
    """Try checks until all are right, or the time is over: nodes need time to serve a Service."""
    loop = asyncio.get_running_loop()
    end, results = loop.time() + seconds, [""] * len(checks)
    again: Sequence[int] = range(len(checks))
    while again:
        found = await asyncio.gather(*(try_check(checks[number]) for number in again))
        for number, reason in zip(again, found, strict=True):
            results[number] = reason
        again = [number for number, reason in enumerate(results) if reason]
        if loop.time() > end:
            break
        await asyncio.sleep(_AGAIN)
    return [each[:_MOST_TEXT] for each in results]


def main(words: Sequence[str]) -> None:
    """Serve until killed, or ask and write a reason for each check, or "", into a file."""
    if words[0] == "serve":
        _, name, node, port = words
        asyncio.run(_serve(name, node, int(port)))
    _, checks, seconds, path = words
    found = asyncio.run(
        _ask([Check(*cast(Any, each)) for each in json.loads(checks)], float(seconds))
    )
    with open(path, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1:])
