from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import suppress

import aiohttp
import pytest

from steersman.model.kube import Node, ObjectMeta
from steersman.model.names import Family, ObjectName
from steersman.run.health import Moment, ProxyHealth
from steersman.run.health_server import ServiceHealthServers, now, proxy_health_app
from steersman.run.http import Answer, ListenError, application, keep_serving
from tests.support.http import ask, free_port, serving

CART = ObjectName("shop", "cart")


@pytest.mark.parametrize(("method", "body"), [("GET", "one two"), ("HEAD", "")])
async def test_a_body_is_sent_as_it_is_made(method: str, body: str) -> None:
    async with serving(application({"/": lambda _: Answer(pieces=iter([b"one ", b"two"]))})) as p:
        reply = await ask(p, "/", method)
    assert (reply.status, reply.body) == (200, body)
    assert reply.received["Content-Type"] == "text/plain; charset=utf-8"


async def test_a_body_that_cannot_be_made_is_an_error() -> None:
    def fails() -> Iterator[bytes]:
        yield str(1 // 0).encode()

    async with serving(application({"/": lambda _: Answer(pieces=fails())})) as port:
        assert (await ask(port)).status == 500


async def test_unknown_paths_are_answered_as_go_does() -> None:
    async with serving(application({})) as port:
        reply = await ask(port, "/nothing")
    assert (reply.status, reply.body) == (404, "404 page not found\n")
    assert reply.received["Content-Type"] == "text/plain; charset=utf-8"
    assert reply.received["X-Content-Type-Options"] == "nosniff"
    assert "Server" not in reply.received


async def test_pages_are_found_by_path_then_by_the_longest_prefix() -> None:
    pages = {
        "/a": lambda _: Answer("a"),
        "/p/": lambda _: Answer("p"),
        "/p/q/": lambda _: Answer("q"),
    }
    async with serving(application(pages)) as port:
        assert [(await ask(port, path)).body for path in ("/a", "/p/x", "/p/q/x")] == [*"apq"]
        assert (await ask(port, "/a/b")).status == 404


async def test_the_proxy_health_server_answers_and_counts() -> None:
    health, counted = ProxyHealth(10), list[tuple[str, int]]()
    moment, node, ready = now(), None, False
    app = proxy_health_app(
        health,
        lambda: node,
        ready=lambda: ready,
        count=lambda path, status: counted.append((path, status)),
        clock=lambda: moment,
    )
    async with serving(app) as port:
        assert (await ask(port, "/healthz")).status == 503
        node = Node(ObjectMeta(name="n"))
        reply = await ask(port, "/healthz", "POST")
        assert reply.status == 200
        assert reply.received["Content-Type"] == "application/json"
        health.updated(Family.IPV4, moment)
        health.queued(Family.IPV4, moment)
        moment = Moment(moment.wall, moment.steady + 10)
        assert (await ask(port, "/livez")).status == 503
        assert (await ask(port, "/readyz")).status == 503
        ready = True
        assert (await ask(port, "/readyz")).status == 200
        assert (await ask(port, "/")).status == 404
    assert counted == [("healthz", 503), ("healthz", 200), ("livez", 503)]


async def test_service_ports_are_opened_changed_and_closed() -> None:
    servers = ServiceHealthServers(lambda: ["127.0.0.1"], lambda: True)
    first, second = free_port(), free_port()
    await servers.sync({CART: first}, {CART: 3})
    reply = await ask(first, "/any/path", "PUT")
    assert reply.status == 200
    assert reply.received["X-Load-Balancing-Endpoint-Weight"] == "3"
    await servers.sync({CART: second}, {})
    assert (await ask(second)).status == 503
    with pytest.raises(aiohttp.ClientConnectionError):
        await ask(first)
    await servers.close()
    with pytest.raises(aiohttp.ClientConnectionError):
        await ask(second)


async def test_a_taken_port_is_reported_and_tried_again() -> None:
    failures = list[tuple[ObjectName, int, str]]()
    servers = ServiceHealthServers(
        lambda: ["127.0.0.1"], lambda: True, lambda *failure: failures.append(failure)
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        await servers.sync({CART: port}, {CART: 1})
    assert [(name, number) for name, number, _ in failures] == [(CART, port)]
    assert f"listen on 127.0.0.1:{port}: " in failures[0][2]
    await servers.sync({CART: port}, {CART: 1})
    assert (await ask(port)).status == 200
    await servers.close()


async def test_a_taken_port_is_logged_once_however_many_syncs_there_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers = ServiceHealthServers(lambda: ["127.0.0.1"], lambda: True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ports = {CART: taken.getsockname()[1]}
        for wanted in (ports, ports, {}, ports):
            await servers.sync(wanted, {})
        assert [record.message.startswith("health check of ") for record in caplog.records] == [
            True,
            True,  # it was not wanted meanwhile
        ]
    await servers.sync(ports, {})
    assert len(caplog.records) == 2
    await servers.close()


async def test_addresses_are_followed() -> None:
    addresses = ["127.0.0.1"]
    servers = ServiceHealthServers(lambda: addresses, lambda: True)
    port = free_port()
    await servers.sync({CART: port}, {CART: 1})
    addresses = ["127.0.0.2"]
    await servers.sync({CART: port}, {CART: 1})
    with pytest.raises(aiohttp.ClientConnectionError):
        await ask(port)
    await servers.close()


async def test_serving_is_tried_again_until_the_address_is_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slept, failures = list[float](), list[str]()
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        taken.close()

    async def serve() -> None:
        await keep_serving(
            lambda: application({"/": lambda _: Answer("here")}),
            "127.0.0.1",
            port,
            what="the test's server",
            on_failure=failures.append,
            sleep=sleep,
        )

    with caplog.at_level(logging.CRITICAL):
        task = asyncio.create_task(serve())
        async with asyncio.timeout(10):
            while True:
                with suppress(aiohttp.ClientConnectionError):
                    assert (await ask(port)).body == "here"
                    break
                await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slept == [5.0]
    assert f"the test's server cannot listen on 127.0.0.1:{port}" in failures[0]


async def test_a_hard_failure_ends_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError):
            await keep_serving(
                lambda: application({}), "127.0.0.1", port, what="it", hard_fail=True
            )
