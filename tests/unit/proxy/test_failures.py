"""What failover hears of the proxy's dials, and what becomes of those to ejected endpoints."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

import pytest

from steersman.failover.watch import Failure, FailureWatch
from steersman.model.failover import Backend, Observation
from steersman.model.names import Protocol
from steersman.model.plan import Endpoint
from steersman.proxy import tcp
from steersman.proxy.dials import DialRegistry
from steersman.proxy.engine import Proxy
from steersman.proxy.failures import DialWatch, WithDials
from tests.support.modes.userspace_proxy import (
    LOCAL,
    UDP,
    answering,
    ask,
    client,
    endpoint,
    key,
    listener,
    owner,
    proxy,
    refusing,
    server,
    silent,
)
from tests.support.waiting import PATIENCE, until

ANSWERED, REFUSED, SILENT = Observation.ANSWERED, Observation.REFUSED, Observation.SILENT
LONG_AGO = float("-inf")


@asynccontextmanager
async def watched(made: Proxy) -> AsyncIterator[DialWatch]:
    watch = DialWatch(made.shared.dials)
    try:
        yield watch
    finally:
        await watch.aclose()


async def received(
    watch: FailureWatch, enough: Callable[[list[Failure]], bool] = bool
) -> list[Failure]:
    """Return all that is received until it is enough."""
    found: list[Failure] = []
    async with asyncio.timeout(PATIENCE):
        while not enough(found):
            found += await watch.receive()
    return found


def backend(end: Endpoint, protocol: Protocol = Protocol.TCP) -> Backend:
    return Backend(end.ip, end.port, protocol)


async def nothing_left(watch: DialWatch) -> None:
    receiving = asyncio.create_task(watch.receive())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not receiving.done()
    receiving.cancel()


async def test_a_refused_dial_is_seen_with_its_client() -> None:
    gone = await refusing()
    async with endpoint(answering(b"one")) as one, proxy() as made, watched(made) as watch:
        await made.start({key(): listener(gone, one)})
        assert await ask(made.port(key())) == b"one"
        assert (await received(watch))[0] == Failure(backend(gone), REFUSED, LOCAL)


async def test_a_silent_dial_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "DIAL_TIMEOUTS", (0.05, 5.0, 5.0, 5.0))
    async with endpoint(answering(b"one")) as one, proxy() as made, watched(made) as watch:
        with silent() as deaf:
            await made.start({key(): listener(deaf, one)})
            assert await ask(made.port(key())) == b"one"
            assert (await received(watch))[0] == Failure(backend(deaf), SILENT, LOCAL)


async def test_a_datagram_that_nobody_takes_is_seen() -> None:
    async with server(b"1") as (one, answers), proxy() as made, watched(made) as watch:
        await made.start({key(UDP): listener(one, protocol=UDP)})
        answers.transport.close()
        await asyncio.sleep(0)
        async with client(made.port(key(UDP))) as a:
            a.transport.sendto(b"?")
            assert await received(watch) == [Failure(backend(one, UDP), REFUSED, LOCAL)]


async def test_answers_are_seen_only_while_others_fail() -> None:
    async with endpoint(answering(b"one")) as one, proxy() as made, watched(made) as watch:
        await made.start({key(): listener(one)})
        assert await ask(made.port(key())) == b"one"
        await nothing_left(watch)
        gone = await refusing()
        await made.start({key(): listener(gone, one)})
        for _ in range(4):
            assert await ask(made.port(key())) == b"one"
        found = await received(watch, lambda found: len(found) > 1)
        assert [each.backend for each in found if each.observation is REFUSED] == [backend(gone)]
        assert Failure(backend(one), ANSWERED) in found


async def test_answers_of_udp_are_seen_while_others_fail() -> None:
    async with server(b"1") as (one, _), proxy() as made, watched(made) as watch:
        await made.start({key(UDP): listener(one, protocol=UDP)})
        watch.failed(owner(UDP), Endpoint(LOCAL, 9), LOCAL, ConnectionRefusedError(), LONG_AGO)
        async with client(made.port(key(UDP))) as a:
            assert await a.ask(b"a") == b"1a"
            found = await received(watch, lambda found: len(found) > 1)
        assert found[1] == Failure(backend(one, UDP), ANSWERED)


async def test_an_answer_just_before_the_first_failure_is_reported() -> None:
    end = Endpoint("10.1.0.1", 80)
    for ago, reported in ((0.1, [ANSWERED, SILENT]), (60.0, [SILENT])):
        watch = DialWatch(DialRegistry())
        watch.failed(owner(), end, "::ffff:10.9.9.9", TimeoutError(), time.monotonic() - ago)
        found = await watch.receive()
        assert [each.observation for each in found] == reported
        assert found[-1].client == "10.9.9.9"


async def test_an_error_of_this_machine_says_nothing_about_an_endpoint() -> None:
    watch = DialWatch(DialRegistry())
    for number in (errno.EMFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS):
        watch.failed(owner(), Endpoint("10.1.0.1", 80), LOCAL, OSError(number, "here"), LONG_AGO)
    await nothing_left(watch)


async def test_failures_that_nobody_receives_are_limited() -> None:
    watch = DialWatch(DialRegistry())
    for _ in range(5000):
        watch.failed(owner(), Endpoint("10.1.0.1", 80), LOCAL, TimeoutError(), LONG_AGO)
    assert len(await watch.receive()) == 1024


async def test_nothing_is_noted_after_the_end() -> None:
    gone = await refusing()
    async with endpoint(answering(b"one")) as one, proxy() as made:
        await made.start({key(): listener(gone, one)})
        async with watched(made) as watch:
            pass
        assert await ask(made.port(key())) == b"one"
        await nothing_left(watch)
        # One that is closed late does not end the next one.
        async with watched(made):
            await watch.aclose()
            assert made.shared.dials.watch is not None


async def test_clients_that_wait_for_an_ejected_endpoint_get_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp, "DIAL_TIMEOUTS", (600.0,) * 4)
    async with endpoint(answering(b"one")) as one, proxy() as made, watched(made) as watch:
        with silent() as deaf, silent() as too:
            await made.start({key(): listener(deaf, too)})
            port = made.port(key())
            asking = [asyncio.create_task(ask(port)) for _ in range(4)]
            await until(lambda: len(made.shared.dials) == 4)
            await made.start({key(): listener(one)})
            assert await watch.cut({backend(deaf), backend(too)}) == 4
            async with asyncio.timeout(PATIENCE):
                assert await asyncio.gather(*asking) == [b"one"] * 4
            assert await watch.cut({backend(deaf), backend(too), backend(one)}) == 0


async def test_connections_are_not_cut() -> None:
    async with endpoint(answering(b"one")) as one, proxy() as made, watched(made) as watch:
        await made.start({key(): listener(one)})
        reader, writer = await asyncio.open_connection(LOCAL, made.port(key()))
        assert await reader.readexactly(3) == b"one"
        assert await watch.cut({backend(one)}) == 0
        writer.write(b"on")
        assert await reader.readexactly(2) == b"on"
        writer.close()


async def test_a_dial_whose_service_loses_all_endpoints_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp, "DIAL_TIMEOUTS", (600.0,) * 4)
    async with proxy() as made, watched(made) as watch:
        with silent() as deaf:
            await made.start({key(): listener(deaf)})
            asking = asyncio.create_task(ask(made.port(key())))
            await until(lambda: len(made.shared.dials) == 1)
            await made.start({key(): listener()})
            assert await watch.cut({backend(deaf)}) == 1
            with pytest.raises(ConnectionResetError):
                await asking


async def test_an_endpoint_that_returns_is_dialled_like_others() -> None:
    gone = await refusing()
    async with endpoint(answering(b"one")) as one, proxy() as made:
        await made.start({key(): listener(gone, one)})
        for _ in range(2):
            assert await ask(made.port(key())) == b"one"
        for ends in ((one,), (gone, one)):  # ejected, and back
            await made.start({key(): listener(*ends)})
        server = await asyncio.start_server(_says_two, gone.ip, gone.port)
        assert {await ask(made.port(key())) for _ in range(2)} == {b"one", b"two"}
        server.close()


async def _says_two(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"two")
    writer.close()


class Scripted(FailureWatch):
    """Another watch: the test says what it sees, and when it breaks."""

    def __init__(self) -> None:
        self.seen: asyncio.Queue[list[Failure] | OSError] = asyncio.Queue()
        self.cuts: set[Backend] = set()
        self.closed = False

    async def receive(self) -> list[Failure]:
        if isinstance(found := await self.seen.get(), OSError):
            raise found
        return found

    async def cut(self, backends: Collection[Backend]) -> int:
        self.cuts |= set(backends)
        return 2

    async def aclose(self) -> None:
        self.closed = True


async def test_dials_are_watched_beside_packets() -> None:
    gone = await refusing()
    async with endpoint(answering(b"one")) as one, proxy() as made:
        await made.start({key(): listener(gone, one)})
        packets = Scripted()
        watch = WithDials(packets, made.shared.dials)
        assert (watch.counts_answers, watch.of_this_node) == (False, False)
        # A receiver that gives up loses nothing.
        for _ in range(2):
            waiting = asyncio.create_task(watch.receive())
            await asyncio.sleep(0)
            waiting.cancel()
        other = Failure(Backend("10.1.0.9", 80, Protocol.TCP), SILENT, "10.9.9.9")
        packets.seen.put_nowait([other])
        async with asyncio.timeout(PATIENCE):
            assert await watch.receive() == [other]
            assert await ask(made.port(key())) == b"one"
            assert Failure(backend(gone), REFUSED, LOCAL) in await watch.receive()
        assert await watch.cut({backend(gone)}) == 2
        assert packets.cuts == {backend(gone)}
        packets.seen.put_nowait(OSError(errno.EBADF, "gone"))
        with pytest.raises(OSError, match="gone"):
            await received(watch, lambda _: False)
        await watch.aclose()
        assert packets.closed
        assert made.shared.dials.watch is None
