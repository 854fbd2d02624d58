"""Listening sockets that go from one proxy to the next."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from steersman.host.worker import KernelWorker
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Protocol
from steersman.model.plan import Endpoint, Verdict
from steersman.model.ruleset import Diff
from steersman.modes.userspace.render import Portal, left_without_endpoints
from steersman.proxy import handoff
from steersman.proxy.engine import Proxy
from steersman.proxy.handoff import SocketHandoff
from steersman.proxy.listeners import PORTAL, FrontendKey, ListenerPlan
from steersman.proxy.ports import PortAllocator
from tests.support.modes.userspace_proxy import (
    LOCAL,
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

NAME = f"steersman-test-{os.getpid()}"
Wanted = dict[FrontendKey, ListenerPlan]


@asynccontextmanager
async def serving(made: Proxy, wanted: Wanted) -> AsyncIterator[SocketHandoff]:
    """What a mode does with a Proxy."""
    started = SocketHandoff(NAME, made)
    await taken_over(started)
    await made.start(wanted)
    await started.started()
    try:
        yield started
    finally:
        started.close()


async def taken_over(handoff: SocketHandoff) -> None:
    """Take over in a thread, as a mode does: the predecessor is on this loop."""
    worker = KernelWorker()
    try:
        await worker.do(handoff.take_over)
    finally:
        await worker.close()


def many(to: Endpoint, count: int) -> Wanted:
    return {key(address=f"10.96.0.{number}"): listener(to) for number in range(count)}


def datagrams(to: Endpoint) -> Wanted:
    return {key(Protocol.UDP): listener(to, protocol=Protocol.UDP)}


async def test_all_sockets_are_handed_over_without_losing_a_client() -> None:
    async with endpoint(answering(b"1")) as one, proxy() as old, proxy() as new:
        wanted = many(one, 230)  # more than one message holds
        async with serving(old, wanted) as before:
            ports = {k: old.port(k) for k in wanted}
            waiting = [await asyncio.open_connection(LOCAL, port) for port in ports.values()]
            async with serving(new, wanted) as after:
                await until(before.retired.is_set)
                assert after.alone
                assert {k: new.port(k) for k in wanted} == ports
                draining = asyncio.create_task(old.drain(20))
                for reader, writer in waiting:
                    assert await reader.readexactly(1) == b"1"
                    writer.close()
                assert await draining == 0
                for port in tuple(ports.values())[::50]:
                    assert await ask(port) == b"1"


async def test_closing_twice_closes_no_descriptor_of_others() -> None:
    """The process ends while a mode that was left closes."""
    async with proxy() as made, serving(made, {}) as started:
        changes = started.changes()
        started.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(changes.fd)


async def test_unclaimed_sockets_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "_UNCLAIMED", 0.01)
    async with endpoint(answering(b"1")) as one, proxy() as old, proxy() as new:
        wanted = many(one, 2)
        async with serving(old, wanted):
            first, second = (old.port(k) for k in wanted)
            async with serving(new, many(one, 1)):
                await old.drain(0)
                assert await ask(first) == b"1"
                await until(lambda: not new._inherited)
                with pytest.raises(ConnectionRefusedError):
                    await ask(second)


async def test_a_port_outside_of_the_range_is_not_taken_over() -> None:
    async with endpoint(answering(b"1")) as one, proxy() as old, proxy() as spare:
        spare._ports = PortAllocator((23_000, 23_999))
        async with serving(old, many(one, 1)), serving(spare, many(one, 1)):
            (port,) = (spare.port(k) for k in many(one, 1))
            assert 23_000 <= port < 24_000
            assert await ask(port) == b"1"


async def test_a_retired_process_follows_plans_but_reads_no_datagrams() -> None:
    async with (
        server(b"3") as (three, _),
        endpoint(answering(b"1")) as one,
        endpoint(answering(b"2")) as two,
        proxy() as old,
        proxy() as new,
        serving(old, {**many(one, 1), **datagrams(three)}) as before,
        serving(new, {**many(one, 1), **datagrams(three)}),
    ):
        assert new.port(key(Protocol.UDP))
        await until(before.retired.is_set)
        for _ in range(20):  # datagrams are read by the new one only
            async with client(old.port(key(Protocol.UDP))) as somebody:
                assert await somebody.ask(b"?") == b"3?"
        assert not old.open_connections
        with pytest.raises(BusyError):
            await before.follow(many(two, 5), ())
        assert list(old.listeners.values()) == [
            *many(two, 1).values(),
            *datagrams(three).values(),
        ]


async def test_without_a_predecessor_nothing_is_received() -> None:
    assert handoff.receive(f"\0{NAME}") == (None, {})


async def test_a_process_of_another_user_receives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()

    def asks() -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(60)
            sock.connect(f"\0{NAME}")
            return sock.recv(100)

    plan = many(Endpoint(LOCAL, 9), 1)
    async with proxy() as old, serving(old, plan) as before:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        assert await asyncio.to_thread(asks) == b""
        assert before.alone


async def test_a_connected_client_is_served_after_its_listener_stops() -> None:
    async with endpoint(answering(b"1")) as one, proxy() as made:
        await made.start({key(): listener(one)})
        with socket.create_connection((LOCAL, made.port(key()))) as sock:  # no turn of the loop
            made.remove([key()])
            sock.settimeout(60)
            assert await asyncio.to_thread(sock.recv, 1) == b"1"
        await until(lambda: made.open_connections == 0)


async def test_a_refused_service_port_loses_no_socket_of_others() -> None:
    """A batch that is refused is halved: the rest comes bit by bit."""
    async with endpoint(answering(b"1")) as one, proxy() as old, proxy() as new:
        first, second = wanted = many(one, 2)
        taken = {key(address="10.96.0.9"): listener(one, port=one.port)}
        async with serving(old, wanted):
            after = SocketHandoff(NAME, new)
            try:
                await taken_over(after)
                with pytest.raises(ApplyError):
                    await new.start({**wanted, **taken})
                await new.start({first: wanted[first]})
                await after.started()
                await new.start({second: wanted[second]})
                assert [new.port(k) for k in wanted] == [old.port(k) for k in wanted]
                await old.drain(0)
                for each in wanted:
                    assert await ask(new.port(each)) == b"1"
            finally:
                after.close()


async def test_a_cancelled_successor_takes_over_at_its_next_attempt() -> None:
    async with endpoint(answering(b"1")) as one, proxy() as old, proxy() as new:
        wanted = many(one, 3)
        async with serving(old, wanted):
            after = SocketHandoff(NAME, new)
            try:
                await cancelled_while_it_takes_over(after)
                await taken_over(after)
                await new.start(wanted)
                assert [new.port(each) for each in wanted] == [old.port(each) for each in wanted]
            finally:
                after.close()


async def test_a_successor_that_is_cancelled_and_closed_lets_go(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        endpoint(answering(b"1")) as one,
        proxy() as old,
        proxy() as new,
        serving(old, many(one, 3)) as before,
    ):
        changes = before.changes()
        descriptors = len(os.listdir("/proc/self/fd"))
        after = SocketHandoff(NAME, new)
        await cancelled_while_it_takes_over(after)
        after.close()
        await until(lambda: "this one serves again" in caplog.text)
        assert before.alone
        assert changes.judge()
        await until(lambda: len(os.listdir("/proc/self/fd")) == descriptors)


async def cancelled_while_it_takes_over(handoff: SocketHandoff) -> None:
    """Begin to take over, and be cancelled before another process can have answered."""
    begun, loop, worker = asyncio.Event(), asyncio.get_running_loop(), KernelWorker()

    def take_over() -> None:
        loop.call_soon_threadsafe(begun.set)
        handoff.take_over()

    task = asyncio.create_task(worker.do(take_over))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await worker.close()


async def test_a_slow_predecessor_is_waited_for() -> None:
    async with (
        endpoint(answering(b"1")) as one,
        proxy() as old,
        proxy() as new,
        proxy() as third,
        serving(old, many(one, 1)) as before,
    ):
        asyncio.get_running_loop().call_soon(time.sleep, 2.5)
        async with serving(new, many(one, 1)) as after:
            await until(before.retired.is_set)
            assert after.alone
            (port,) = (new.port(k) for k in many(one, 1))
            assert await ask(port) == b"1"
            async with serving(third, many(one, 1)):
                await until(after.retired.is_set)


async def test_a_silent_predecessor_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "_TIMEOUT", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(f"\0{NAME}")
        silent.listen(1)
        async with endpoint(answering(b"1")) as one, proxy() as new, serving(new, many(one, 1)):
            (port,) = (new.port(k) for k in many(one, 1))
            assert await ask(port) == b"1"


async def test_all_sockets_are_sent_although_many_are_closed_meanwhile() -> None:
    async with endpoint(answering(b"1")) as one, proxy() as old:
        await old.start(many(one, 450))
        first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with first, second:
            second.settimeout(60)
            sockets = old.sockets()
            old.remove(list(many(one, 300)))  # among them all of the first message
            sending = asyncio.create_task(handoff._send_sockets(first, sockets))
            count = 0
            while (found := await asyncio.to_thread(socket.recv_fds, second, 1 << 18, 253))[
                0
            ] != b"[]":
                count += len(found[1])
                for descriptor in found[1]:
                    os.close(descriptor)
            await sending
            assert count == 150


async def test_a_retired_process_resets_connections_if_no_endpoint_is_left() -> None:
    async with endpoint(answering(b"1")) as one, proxy() as old, proxy() as new:
        wanted = {key(): listener(one, kept=(one,))}
        async with serving(old, wanted) as before:
            reader, writer = await asyncio.open_connection(LOCAL, old.port(key()))
            assert await reader.readexactly(1) == b"1"
            async with serving(new, wanted):
                refuses = {key().of(PORTAL): Portal("shop/cart:http", Verdict.REJECT)}
                change = Diff(refuses, wanted, {})
                with pytest.raises(BusyError):
                    await before.follow({}, left_without_endpoints(change))
                with pytest.raises(ConnectionResetError):
                    async with asyncio.timeout(60):
                        await reader.read()
                writer.close()
