"""Nothing is left behind if a connection, listener or endpoint ends at an awkward moment."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest

from steersman.proxy import tcp, traffic
from tests.support.modes.userspace_proxy import (
    LOCAL,
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


async def test_a_client_reset_before_it_is_served_leaves_nothing() -> None:
    async with endpoint(answering(b"1")) as one, proxy() as made:
        await made.start({key(): listener(one, kept=())})
        server = made._listeners[key()]
        assert isinstance(server, tcp.TcpListener)
        with socket.create_connection((LOCAL, made.port(key()))) as sock:  # no turn of the loop
            server._acceptable()
            made.reset_connections([key()])
            sock.settimeout(60)
            with pytest.raises(ConnectionResetError):
                await asyncio.to_thread(sock.recv, 1)
        await until(lambda: made.open_connections == 0)
        assert made.budget.used == 1


async def test_a_dial_that_fails_when_its_service_port_is_gone_counts_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp, "DIAL_TIMEOUTS", (0.05, 0.05, 0.05, 0.05))
    with silent() as one:
        async with proxy() as made:
            await made.start({key(): listener(one)})
            with socket.create_connection((LOCAL, made.port(key()))):
                await until(lambda: made.open_connections == 1)
                made.remove([key()])
                await until(lambda: made.open_connections == 0)
            assert list(made.traffic) == []
            assert made.budget.used == 0


async def test_a_connection_to_an_endpoint_removed_during_the_dial_is_reset() -> None:
    async with endpoint(answering(b"1")) as one, endpoint(answering(b"2")) as two, proxy() as made:
        await made.start({key(): listener(one, kept=(one,))})
        server = made._listeners[key()]
        assert isinstance(server, tcp.TcpListener)
        with socket.create_connection((LOCAL, made.port(key()))):
            server._acceptable()
            await asyncio.sleep(0)  # it dials the first one now
            await made.start({key(): listener(two, kept=(two,))})
            await until(lambda: made.open_connections == 0)
        assert made.budget.used == 1


async def test_stopped_listeners_are_forgotten_without_a_scrape() -> None:
    async with endpoint(answering(b"1")) as one, proxy() as made:
        for _ in range(5):
            await made.start({key(): listener(one)})
            reader, writer = await asyncio.open_connection(LOCAL, made.port(key()))
            assert await reader.readexactly(1) == b"1"
            (server,) = made._listeners.values()
            made.remove([key()])
            writer.close()
            await until(lambda server=server: server.open_connections == 0)  # type: ignore[misc]
        assert len(made._stopped) <= 1


async def test_counts_of_endpoints_that_are_gone_are_dropped_with_their_last_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traffic, "MAX_FORMER", 0)
    async with endpoint(answering(b"1")) as one, endpoint(answering(b"2")) as two, proxy() as made:
        other = key(address="10.96.0.2")
        await made.start({key(): listener(one), other: listener(one)})
        reader, writer = await asyncio.open_connection(LOCAL, made.port(key()))
        assert await reader.readexactly(1) == b"1"
        await made.start({key(): listener(two)})
        assert await ask(made.port(key())) == b"2"
        assert {e for _, e, _ in made.traffic} == {one, two}, "the other listener may use it"
        await made.start({other: listener(two)})
        assert {e for _, e, _ in made.traffic} == {one, two}, "a connection is left"
        writer.close()
        await until(lambda: made.open_connections == 0)
        await made.start({key(): listener(two, affinity_seconds=60)})
        assert [(e, counters.connections) for _, e, counters in made.traffic] == [(two, 1)]


async def test_connections_count_for_their_service_port_after_a_rename() -> None:
    renamed = owner(name="renamed")
    async with endpoint(answering(b"1")) as one, proxy() as made:
        await made.start({key(): listener(one)})
        ends = [await asyncio.open_connection(LOCAL, made.port(key()))]
        assert await ends[0][0].readexactly(1) == b"1"
        await made.start({key(): msgspec.structs.replace(listener(one), owner=renamed)})
        ends.append(await asyncio.open_connection(LOCAL, made.port(key())))
        assert await ends[1][0].readexactly(1) == b"1"
        ends[0][1].close()
        await until(lambda: made.open_connections == 1)
        assert made.shared.balancers[renamed].active == {one: 1}
        ends[1][1].close()
        await until(lambda: made.open_connections == 0)
        assert made.shared.balancers[renamed].active == {}


async def test_clients_waiting_to_be_accepted_are_reset_if_no_endpoint_is_left() -> None:
    async with endpoint(answering(b"1")) as one, proxy() as made:
        await made.start({key(): listener(one, kept=(one,))})
        with socket.create_connection((LOCAL, made.port(key()))) as client:  # no turn of the loop
            made.reset_connections([key()])
            made.remove([key()])
            await until(lambda: made.open_connections == 0)
            assert made.traffic.total.connections == 1, "it was accepted"
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        assert made.budget.used == 0
