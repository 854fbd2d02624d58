"""The TCP relay on loopback: what goes in comes out, whatever either end does."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from steersman.model.errors import ApplyError
from steersman.model.names import Protocol
from steersman.model.plan import Endpoint, Verdict
from steersman.proxy import engine, relay, tcp
from steersman.proxy.budget import DescriptorBudget, Reservation
from steersman.proxy.listeners import Decision
from steersman.proxy.poller import Tasks, make_poller
from steersman.proxy.relay import RelayedConnection, Splice
from steersman.proxy.sockets import open_socket
from steersman.proxy.tcp import proxy_protocol_header
from steersman.proxy.traffic import EndpointCounters
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
    refusing,
    silent,
)
from tests.support.waiting import until

RESET = struct.pack("ii", 1, 0)
EVERY_WAY = pytest.mark.usefixtures("way")


@pytest.fixture(params=["copied", "spliced", "by tasks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """How bytes are passed on; spliced: from the second read on, however small it is."""
    if request.param == "by tasks":
        monkeypatch.setattr(engine, "make_poller", Tasks)
    spliced = 0

    class Counted(Splice):
        def __init__(self, *args: Any) -> None:
            nonlocal spliced
            spliced += 1
            super().__init__(*args)

    monkeypatch.setattr(relay, "SPLICE_AFTER", 0 if request.param == "spliced" else 1 << 60)
    monkeypatch.setattr(relay, "_LARGE_READ", 0)
    monkeypatch.setattr(relay, "Splice", Counted)
    yield
    assert bool(spliced) == (request.param == "spliced")


@EVERY_WAY
async def test_half_close_is_passed_on() -> None:
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(str(len(await reader.read())).encode())  # only after the client has ended

    async with endpoint(count) as one, proxy() as made:
        await made.start({key(): listener(one)})
        assert await ask(made.port(key()), b"x" * 300_000) == b"300000"
        await until(lambda: made.budget.used == 1)  # the listening socket


@EVERY_WAY
async def test_the_server_may_end_first() -> None:
    got = asyncio.get_running_loop().create_future()

    async def ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write_eof()
        got.set_result(await reader.read())

    async with endpoint(ends) as one, proxy() as made:
        await made.start({key(): listener(one)})
        reader, writer = await asyncio.open_connection(LOCAL, made.port(key()))
        assert await reader.read() == b""
        writer.write(b"still here")
        writer.write_eof()
        assert await got == b"still here"
        writer.close()


@EVERY_WAY
async def test_a_slow_reader_slows_the_writer_down() -> None:
    sent = 0

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while sent < 64 << 20:
            writer.write(bytes(1 << 20))
            await writer.drain()
            sent += 1 << 20

    async with endpoint(pour) as one, proxy() as made:
        await made.start({key(): listener(one)})
        reader, writer = await asyncio.open_connection(LOCAL, made.port(key()), limit=1 << 12)
        before = -1
        while sent != before:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 64 << 20
        (pair,) = [p for li in made._listeners.values() for p in getattr(li, "connections", ())]
        assert len(pair.back.unsent) <= 1 << 16
        total = 0
        while data := await reader.read(1 << 20):
            total += len(data)
        assert total == 64 << 20
        writer.close()


@EVERY_WAY
async def test_a_reset_is_passed_on_as_a_reset() -> None:
    broken = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"!")
        try:
            await reader.read()
        except ConnectionResetError:
            broken.set()

    async with endpoint(wait) as one, proxy() as made:
        await made.start({key(): listener(one)})
        reader, writer = await asyncio.open_connection(LOCAL, made.port(key()))
        await reader.readexactly(1)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
        async with asyncio.timeout(60):
            await broken.wait()


async def test_a_reset_is_noticed_while_the_endpoint_takes_no_more() -> None:
    """Otherwise each client that gives up leaves two descriptors to a server that hangs."""
    hangs = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hangs.wait()

    async with endpoint(hang) as one, proxy() as made:
        await made.start({key(): listener(one)})
        client = socket.create_connection((LOCAL, made.port(key())))
        client.setblocking(False)

        def is_full() -> bool:
            try:
                client.send(bytes(1 << 16))
            except BlockingIOError:
                (pair,) = [p for li in made._listeners.values() for p in li.connections]  # type: ignore[union-attr]
                return pair.forth.blocked
            return False

        await until(is_full)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        client.close()
        await until(lambda: made.open_connections == 0)
        hangs.set()


@EVERY_WAY
async def test_long_streams_arrive_whole_both_ways_at_once_and_are_counted() -> None:
    data = random.Random(1).randbytes(1 << 16) * 128
    sums: list[bytes] = []

    async def both(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def read() -> None:
            sums.append(hashlib.sha256(await reader.read()).digest())

        reading = asyncio.create_task(read())
        writer.write(data)
        await writer.drain()
        writer.write_eof()
        await reading

    async with endpoint(both) as one, proxy() as made:
        await made.start({key(): listener(one)})
        got = await asyncio.gather(*(ask(made.port(key()), data) for _ in range(4)))
        await until(lambda: made.open_connections == 0 and len(sums) == 4)
        assert got == [data] * 4
        assert sums == [hashlib.sha256(data).digest()] * 4
        assert [counters.moved for _, _, counters in made.traffic] == [[4 * len(data)] * 2]
        assert made.budget.used == 1


@EVERY_WAY
async def test_a_reset_by_the_endpoint_resets_the_client() -> None:
    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"!")
        await reader.readexactly(1 << 20)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()

    async with endpoint(breaks) as one, proxy() as made:
        await made.start({key(): listener(one)})
        reader, writer = await asyncio.open_connection(LOCAL, made.port(key()))
        assert await reader.readexactly(1) == b"!"
        writer.write(bytes(2 << 20))
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        await until(lambda: made.budget.used == 1)


async def test_an_endpoint_that_is_gone_before_it_is_greeted_resets_the_client() -> None:
    with socket.create_server((LOCAL, 0)) as listening:
        one = Endpoint(*listening.getsockname())
        server, client = (socket.create_connection(listening.getsockname()) for _ in "12")
        gone, us = listening.accept()[0], listening.accept()[0]
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        gone.close()
        for sock in (server, client):
            sock.setblocking(False)
        ended: list[RelayedConnection] = []
        poller = make_poller()
        pair = RelayedConnection(
            (client, server),
            one,
            EndpointCounters(),
            DescriptorBudget(100),
            Reservation(owner(), LOCAL, 2),
            poller=poller,
            on_end=ended.append,
        )
        with pytest.raises(ConnectionError):
            pair.start(b"PROXY")
        pair.abort()
        pair.abort()  # again: nothing is closed or told twice
        with us, a_reset():
            assert await asyncio.to_thread(us.recv, 1) == b""
        assert ended == [pair]
        poller.stop()


async def test_streams_are_copied_if_splicing_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(relay, "SPLICE_AFTER", 0)
    monkeypatch.setattr(relay, "_LARGE_READ", 0)
    data = random.Random(2).randbytes(1 << 20)
    for name, value in (("Splice", fails), ("splice_supported", bool)):
        monkeypatch.setattr(relay, name, value)
        async with endpoint(answering(b"")) as one, proxy() as made:
            await made.start({key(): listener(one)})
            assert await ask(made.port(key()), data) == data


@EVERY_WAY
async def test_the_next_endpoint_is_dialled_and_the_failed_one_comes_last() -> None:
    gone = await refusing()
    async with endpoint(answering(b"one")) as one, proxy() as made:
        await made.start({key(): listener(gone, one)})
        for _ in range(6):
            assert await ask(made.port(key())) == b"one"
        tallies = {e: counters for _, e, counters in made.traffic}
        assert tallies[gone].failures == 1
        assert tallies[one].connections == 6
        assert sum(tallies[one].dial_buckets) == 6


async def test_the_next_endpoint_is_tried_after_a_silent_one(monkeypatch: Any) -> None:
    monkeypatch.setattr(tcp, "DIAL_TIMEOUTS", (0.05, 5.0, 5.0, 5.0))
    async with endpoint(answering(b"one")) as one, proxy() as made:
        with silent() as deaf:
            await made.start({key(): listener(deaf, one)})
            assert await ask(made.port(key())) == b"one"


async def test_a_stall_of_this_process_is_no_failure_of_the_endpoint(monkeypatch: Any) -> None:
    monkeypatch.setattr(tcp, "DIAL_TIMEOUTS", (0.9,))  # less than until a SYN is sent again

    def stand_still() -> None:
        server.accept()[0].close()  # the dialled connection gets its place
        time.sleep(1.3)

    def make(address: str, protocol: str) -> socket.socket:
        asyncio.get_running_loop().call_soon(stand_still)  # the first SYN is lost by now
        return open_socket(address, protocol)

    with socket.socket() as server, socket.socket() as filler:
        server.bind((LOCAL, 0))
        server.listen(0)
        filler.connect(server.getsockname())
        one = Endpoint(*server.getsockname())
        async with proxy() as made:
            await made.start({key(): listener(one)})
            monkeypatch.setattr(tcp, "open_socket", make)
            with socket.create_connection((LOCAL, made.port(key()))):
                await until(lambda: made.traffic.of(owner(), one).connections == 1)
            assert made.traffic.of(owner(), one).failures == 0


async def test_a_client_that_no_endpoint_takes_is_reset() -> None:
    async with proxy() as made:
        await made.start({key(): listener(await refusing())})
        with a_reset():
            assert await ask(made.port(key())) == b""
        await until(lambda: made.budget.used == 1)


async def test_a_client_outside_of_the_source_ranges_is_reset() -> None:
    async with endpoint(answering(b"one")) as one, proxy() as made:
        ranges = ("203.0.113.0/24",)
        await made.start({key(): listener(one, source_ranges=ranges)})
        with a_reset():
            assert await ask(made.port(key())) == b""
        assert not list(made.traffic)


async def test_the_proxy_protocol_names_the_client() -> None:
    async with endpoint(answering(b"")) as one, proxy() as made:
        await made.start({key(): listener(one, proxy_protocol=True)})
        said = await ask(made.port(key()), b"hello")
        ends = socket.inet_aton(LOCAL) + socket.inet_aton("10.96.0.1")
        assert said.startswith(b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + ends)
        assert said[26:28] == (80).to_bytes(2, "big")
        assert said[28:] == b"hello"


async def test_the_proxy_protocol_names_the_address_of_a_node_port() -> None:
    async with endpoint(answering(b"")) as one, proxy() as made:
        where = key(address="", port=30080)._replace(node_port=True)
        await made.start({where: listener(one, proxy_protocol=True)})
        said = await ask(made.port(where), b"")
        assert said[16:24] == socket.inet_aton(LOCAL) * 2
        assert said[26:28] == (30080).to_bytes(2, "big")


async def test_least_connections_fill_up_evenly() -> None:
    async with (
        endpoint(answering(b"1")) as one,
        endpoint(answering(b"2")) as two,
        proxy() as made,
    ):
        await made.start({key(): listener(one, two, least_connections=True)})
        port = made.port(key())
        first = await asyncio.open_connection(LOCAL, port)
        name = await first[0].readexactly(1)
        assert {await ask(port) for _ in range(5)} == {b"1", b"2"} - {name}
        first[1].close()


@EVERY_WAY
async def test_another_plan_keeps_connections() -> None:
    async with (
        endpoint(answering(b"1")) as one,
        endpoint(answering(b"2")) as two,
        proxy() as made,
    ):
        await made.start({key(): listener(one)})
        port = made.port(key())
        reader, writer = await asyncio.open_connection(LOCAL, port)
        assert await reader.readexactly(1) == b"1"
        assert not (await made.start({key(): listener(two)})).replaced
        assert await ask(port) == b"2"
        writer.write(b"old")
        assert await reader.readexactly(3) == b"old"
        made.remove([key()])
        with pytest.raises(ConnectionRefusedError):
            await ask(port)
        writer.write(b"still")
        assert await reader.readexactly(5) == b"still"
        writer.close()
        await until(lambda: made.open_connections == 0)
        assert made.budget.used == 0


@EVERY_WAY
async def test_connections_to_endpoints_that_may_not_keep_them_are_reset() -> None:
    async with (
        endpoint(answering(b"1")) as one,
        endpoint(answering(b"2")) as two,
        proxy() as made,
    ):
        await made.start({key(): listener(one, two, kept=(one, two))})
        ends = [await asyncio.open_connection(LOCAL, made.port(key())) for _ in range(2)]
        by_name = {await reader.readexactly(1): (reader, writer) for reader, writer in ends}
        await made.start({key(): listener(two, kept=(one, two))})
        for reader, writer in ends:
            writer.write(b"still")
            assert await reader.readexactly(5) == b"still"
        await made.start({key(): listener(two, kept=(two,))})
        with pytest.raises(ConnectionResetError):
            await by_name[b"1"][0].read()
        reader, writer = by_name[b"2"]
        writer.write(b"still")
        assert await reader.readexactly(5) == b"still"
        for _, writer in ends:
            writer.close()


async def test_affinity_and_counts_outlive_another_plan() -> None:
    async with (
        endpoint(answering(b"1")) as one,
        endpoint(answering(b"2")) as two,
        proxy() as made,
    ):
        await made.start({key(): listener(one, two, affinity_seconds=60)})
        name = await ask(made.port(key()))
        for some in ((two, one), (one, two), (two, one)):
            await made.start({key(): listener(*some, affinity_seconds=60)})
            assert await ask(made.port(key())) == name
        assert [counters.connections for _, _, counters in made.traffic] == [4]


async def test_a_port_in_use_is_an_error_and_nothing_is_started() -> None:
    async with endpoint(answering(b"1")) as one, proxy() as made:
        other = key(address="10.96.0.2")
        wanted = {other: listener(one), key(): listener(one, port=one.port)}
        with pytest.raises(ApplyError, match=f"shop/cart.*port {one.port}/TCP"):
            await made.start(wanted)
        assert made.listeners == {}
        assert made.budget.used == 0


async def test_a_port_is_taken_over_while_the_old_process_drains() -> None:
    async with endpoint(answering(b"1")) as one, proxy() as old, proxy() as new:
        await old.start({key(): listener(one)})
        port = old.port(key())
        old.remove([key()])
        await old.start({key(): listener(one, port=port)})
        reader, writer = await asyncio.open_connection(LOCAL, port)
        assert await reader.readexactly(1) == b"1"
        await new.start({key(): listener(one, port=port)})
        draining = asyncio.create_task(old.drain(10))
        await until(lambda: not old.listeners)
        assert await ask(port) == b"1"
        writer.write(b"on")
        assert await reader.readexactly(2) == b"on"
        writer.close()
        assert await draining == 0


@EVERY_WAY
async def test_draining_ends_at_the_limit() -> None:
    async with endpoint(answering(b"1")) as one, proxy() as made:
        await made.start({key(): listener(one)})
        reader, writer = await asyncio.open_connection(LOCAL, made.port(key()))
        assert await reader.readexactly(1) == b"1"
        assert await made.drain(0) == 1
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


async def test_shared_state_is_dropped_with_the_last_listener() -> None:
    async with endpoint(answering(b"1")) as one, proxy() as made:
        await made.start({key(): listener(one)})
        assert await ask(made.port(key())) == b"1"
        assert [o for o, _, _ in made.traffic] == [owner()]
        made.remove([key()])
        await until(lambda: made.open_connections == 0)
        assert not list(made.traffic)
        assert not made.shared.balancers


async def test_every_client_is_dropped_if_the_plan_says_so() -> None:
    drop = Decision(Verdict.DROP)
    plan = listener()
    async with proxy() as made:
        await made.start({key(): type(plan)(owner(), LOCAL, 0, drop, drop, drop)})
        with a_reset():
            assert await ask(made.port(key())) == b""


def test_keys_of_tcp_and_udp_differ() -> None:
    assert key(Protocol.UDP) != key(Protocol.TCP)


@pytest.mark.parametrize(
    ("client", "destination", "body"),
    [
        (("192.0.2.1", 1000), ("192.0.2.2", 80), "2111000cc0000201c000020203e80050"),
        (
            ("2001:db8::1", 1),
            ("2001:db8::2", 2),
            "21210024" + "20010db8" + "0" * 23 + "1" + "20010db8" + "0" * 23 + "2" + "00010002",
        ),
    ],
)
def test_the_header_of_the_proxy_protocol(
    client: tuple[str, int], destination: tuple[str, int], body: str
) -> None:
    header = proxy_protocol_header(client, destination)
    assert header == b"\r\n\r\n\0\r\nQUIT\n" + bytes.fromhex(body)


@pytest.mark.parametrize("after", [0, 1 << 60], ids=["spliced", "copied"])
async def test_a_stream_without_pause_leaves_others_their_turn(
    monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(relay, "SPLICE_AFTER", after)

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(bytes(1 << 20))
            await writer.drain()

    async with endpoint(pour) as one, endpoint(answering(b"2")) as two, proxy() as made:
        other = key(address="10.96.0.2")
        await made.start({key(): listener(one), other: listener(two)})
        reader, writer = await asyncio.open_connection(LOCAL, made.port(key()), limit=1 << 20)

        async def take() -> None:
            while await reader.read(1 << 20):
                pass

        taking = asyncio.create_task(take())
        for _ in range(20):
            assert await ask(made.port(other), b"?") == b"2?"
        assert not taking.done()
        taking.cancel()
        writer.close()
