"""Accepting: as many clients as the descriptor budget allows, on any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from typing import Any

import msgspec
import pytest

from steersman.proxy import tcp
from steersman.proxy.relay import Direction
from tests.support.modes.userspace_proxy import (
    LOCAL,
    a_reset,
    answering,
    ask,
    endpoint,
    key,
    listener,
    owner,
    proxy,
    silent,
)
from tests.support.waiting import until


async def test_at_the_limit_new_clients_are_refused_and_old_ones_served() -> None:
    async with endpoint(answering(b"")) as one, proxy(limit=5) as made:
        await made.start({key(): listener(one)})
        old = []
        for _ in range(2):  # one after the other: only one client at a time may wait
            reader, writer = await asyncio.open_connection(LOCAL, made.port(key()))
            writer.write(b"served")
            assert await reader.readexactly(6) == b"served"
            old.append((reader, writer))
        assert made.budget.used == 5
        with a_reset():
            assert await ask(made.port(key())) == b""
        assert made.budget.refused == 1
        for reader, writer in old:
            writer.write(b"flows")
            assert await reader.readexactly(5) == b"flows"
            writer.close()
        await until(lambda: made.budget.used == 1)
        assert await ask(made.port(key()), b"again") == b"again"


class Exhausted:
    """A listening socket whose accept fails for a while: the system has no descriptors."""

    def __init__(self, sock: socket.socket, failures: int) -> None:
        self._sock, self.failures = sock, failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def accept(self) -> Any:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "too many open files")
        return self._sock.accept()


async def test_accepting_is_resumed_when_there_are_descriptors_again() -> None:
    async with endpoint(answering(b"one")) as one, proxy() as made:
        await made.start({key(): listener(one)})
        (server,) = made._listeners.values()
        assert isinstance(server, tcp.TcpListener)
        exhausted = Exhausted(server.socket, 2)
        server.socket = exhausted  # type: ignore[assignment]
        assert await ask(made.port(key())) == b"one"
        assert exhausted.failures == 0
        assert made.budget.refused == 2


async def test_a_loop_without_readers_accepts(monkeypatch: Any) -> None:
    """Its Proactor has no readers: then clients are awaited one by one."""

    def none(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(type(asyncio.get_running_loop()), "add_reader", none)
    async with endpoint(answering(b"one")) as one, proxy() as made:
        await made.start({key(): listener(one)})
        for _ in range(3):
            assert await ask(made.port(key()), b"!") == b"one!"


async def test_silent_endpoints_of_one_service_port_do_not_block_others() -> None:
    with silent() as deaf, contextlib.ExitStack() as stack:
        async with endpoint(answering(b"one")) as one, proxy(limit=80) as made:
            other = key(address="10.96.0.2")
            mute = listener(deaf)
            plan = msgspec.structs.replace(listener(one), owner=owner(name="other"))
            await made.start({key(): mute, other: plan})
            for _ in range(30):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex((LOCAL, made.port(key())))
            assert made.budget.dial_limit == 10
            await until(lambda: made.budget.refused == 20)
            assert made.shared.balancers[owner()].dialling == 10
            assert await ask(made.port(other)) == b"one"


async def test_a_loop_without_readers_accepts_after_a_failure(monkeypatch: Any) -> None:
    def none(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(type(asyncio.get_running_loop()), "add_reader", none)
    failures = [OSError(errno.EPROTO, "vanished"), OSError(errno.EMFILE, "too many open files")]
    loop_class = type(asyncio.get_running_loop())
    accept = loop_class.sock_accept

    async def sometimes(loop: Any, sock: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return await accept(loop, sock)

    monkeypatch.setattr(loop_class, "sock_accept", sometimes)
    async with endpoint(answering(b"one")) as one, proxy() as made:
        await made.start({key(): listener(one)})
        assert await ask(made.port(key()), b"!") == b"one!"
        assert made.budget.refused == 1


async def test_both_sockets_of_a_connection_send_at_once_and_notice_a_peer_that_vanished() -> None:
    async with endpoint(answering(b"1")) as one, proxy() as made:
        await made.start({key(): listener(one)})
        reader, writer = await asyncio.open_connection(LOCAL, made.port(key()))
        assert await reader.readexactly(1) == b"1"
        server = made._listeners[key()]
        assert isinstance(server, tcp.TcpListener)
        (connection,) = server.connections
        for sock in (connection.forth.source, connection.back.source):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if hasattr(socket, "TCP_KEEPIDLE"):  # Windows has it since 1709
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 120
            assert sock.gettimeout() == 0.0
        writer.close()


async def test_a_mistake_in_one_connection_is_reported_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(str(context["exception"])))
    handle = Direction.handle

    def fails_once(direction: Direction, events: int) -> None:
        if not told:
            raise ValueError("a mistake")
        handle(direction, events)

    monkeypatch.setattr(Direction, "handle", fails_once)
    async with endpoint(answering(b"1")) as one, proxy() as made:
        await made.start({key(): listener(one)})
        _, first = await asyncio.open_connection(LOCAL, made.port(key()))
        await until(lambda: told == ["a mistake"])
        assert await ask(made.port(key()), b"?") == b"1?"
        first.close()
