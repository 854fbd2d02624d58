"""Listening sockets handed over between real processes, in a network namespace."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from steersman.model.errors import BusyError
from steersman.model.names import Protocol
from steersman.model.plan import Endpoint
from steersman.proxy.engine import Proxy
from steersman.proxy.handoff import SocketHandoff, receive
from tests.support.lab.namespace import in_namespace
from tests.support.modes.userspace_proxy import (
    answering,
    ask,
    client,
    endpoint,
    key,
    listener,
    proxy,
    server,
)
from tests.support.waiting import until

pytestmark = pytest.mark.kernel
NAME = "steersman-test"
TCP_KEY, UDP_KEY = key(), key(Protocol.UDP)


class Predecessor:
    """A proxy with a TCP and a UDP listener that hands over on request."""

    def __init__(self, made: Proxy, handoff: SocketHandoff) -> None:
        self.proxy, self.handoff = made, handoff

    async def serves(self) -> None:
        """Check that clients of both protocols are served."""
        assert await ask(self.proxy.port(TCP_KEY), b"!") == b"1!"
        async with client(self.proxy.port(UDP_KEY)) as somebody:
            assert await somebody.ask(b"!") == b"2!"


def on_a_node(body: Callable[[Predecessor, Endpoint], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with (
            endpoint(answering(b"1")) as one,
            server(b"2") as (two, _),
            proxy() as made,
        ):
            handoff = SocketHandoff(NAME, made)
            handoff.take_over()
            udp = listener(two, protocol=Protocol.UDP)
            await made.start({TCP_KEY: listener(one), UDP_KEY: udp})
            await handoff.started()
            try:
                await body(Predecessor(made, handoff), one)
            finally:
                handoff.close()

    in_namespace(inside)


@asynccontextmanager
async def successor(*options: str) -> AsyncIterator[tuple[Process, int]]:
    """A process that takes sockets over, and how many it got."""
    command = (sys.executable, "-m", "tests.support.processes.userspace_successor", NAME, *options)
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            yield process, int(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def serve(process: Process) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"serve\n")
    assert await process.stdout.readline() == b"serving\n"


def test_root_without_capabilities_gets_nothing() -> None:
    async def body(node: Predecessor, _: Endpoint) -> None:
        async with successor("--without-capabilities") as (_process, count):
            assert count == 0
            assert node.handoff.alone
            await node.serves()
        async with successor() as (_process, count):
            assert count == 2

    on_a_node(body)


@pytest.mark.parametrize("trusted", [True, False])
def test_sockets_of_a_process_without_capabilities_are_not_taken(trusted: bool) -> None:
    """It could share them in order to accept other programs' clients."""

    async def body(node: Predecessor, _: Endpoint) -> None:
        node.handoff.close()
        async with successor(*[] if trusted else ["--without-capabilities"]) as (process, _count):
            await serve(process)
            link, sockets = await asyncio.to_thread(receive, f"\0{NAME}")
            assert len(sockets) == trusted
            for sock in (link, *sockets.values()):
                if sock is not None:
                    sock.close()

    on_a_node(body)


def test_a_successor_that_dies_before_it_serves_changes_nothing() -> None:
    async def body(node: Predecessor, one: Endpoint) -> None:
        async with successor() as (process, count):
            assert count == 2
            assert not node.handoff.alone
            await node.serves()
            with pytest.raises(BusyError):
                await node.handoff.follow({TCP_KEY: listener(one)}, ())
            process.kill()
            await until(lambda: node.handoff.alone)
        changes = node.handoff.changes()
        assert changes.judge()
        assert not changes.judge()
        await node.serves()
        async with successor() as (_process, count):
            assert count == 2

    on_a_node(body)


def test_each_process_hands_over_to_the_next() -> None:
    async def body(node: Predecessor, _: Endpoint) -> None:
        async with successor() as (second, _count):
            await serve(second)
            await until(node.handoff.retired.is_set)
            async with successor() as (third, count):
                await serve(third)
                assert count == 1
                second.kill()
                await second.wait()
                assert third.returncode is None
                assert node.handoff.retired.is_set()

    on_a_node(body)
