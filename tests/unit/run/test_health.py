from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import aiohttp
import pytest

from steersman.host.worker import KernelWorker
from steersman.model.kube import Node, NodeSpec, ObjectMeta, Taint
from steersman.model.names import Family, ObjectName
from steersman.model.ruleset import Diff
from steersman.model.times import rfc3339
from steersman.run.serve.connections import ListenError
from steersman.run.serve.health import (
    DELETION_TAINT,
    Moment,
    ProxyHealth,
    ServiceHealth,
    ServiceHealthServers,
    eligible,
    now,
    proxy_health_app,
    readyz,
)
from steersman.run.serve.http import Answer, application, keep_serving
from tests.support.http import ask, free_port, free_ports, serving
from tests.support.modes.memory import MemoryMode, World
from tests.support.waiting import until

NODE = Node(ObjectMeta(name="n"))
CART, SHOP = ObjectName("shop", "cart"), ObjectName("shop", "front")


def at(seconds: float, wall_step: float = 0) -> Moment:
    return Moment(round((seconds + wall_step) * 1e9), seconds)


def body(answer: Answer) -> dict[str, object]:
    decoded: dict[str, object] = json.loads(answer.body)
    return decoded


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (None, False),
        (NODE, True),
        (Node(ObjectMeta(name="n", deletion_timestamp="2026-01-01T00:00:00Z")), False),
        (Node(ObjectMeta(name="n"), NodeSpec(taints=[Taint(DELETION_TAINT)])), False),
        (Node(ObjectMeta(name="n"), NodeSpec(taints=[Taint("other")])), True),
    ],
)
def test_a_node_that_goes_gets_no_new_traffic(node: Node | None, expected: bool) -> None:
    assert eligible(node) is expected
    health = ProxyHealth(10)
    assert health.healthz(at(0), node).status == (200 if expected else 503)
    assert body(health.healthz(at(0), node))["healthy"] is True
    assert health.livez(at(0)).status == 200


def test_a_family_is_unhealthy_once_its_oldest_change_has_waited_the_timeout() -> None:
    health = ProxyHealth(10)
    health.updated(Family.IPV6, at(0))
    health.queued(Family.IPV6, at(5))
    health.queued(Family.IPV6, at(14))
    assert health.healthy(at(14.999))
    assert not health.healthy(at(15))
    health.updated(Family.IPV6, at(15))
    assert health.healthy(at(1000))


def test_the_oldest_change_of_all_families_is_the_one_that_waits() -> None:
    health = ProxyHealth(10)
    assert health.waiting(at(3)) == 0
    health.queued(Family.IPV4, at(5))
    health.queued(Family.IPV6, at(7))
    assert health.waiting(at(9)) == 4
    health.updated(Family.IPV4, at(10))
    assert health.waiting(at(10)) == 3


def test_a_family_never_updated_is_not_judged() -> None:
    health = ProxyHealth(10)
    health.queued(Family.IPV4, at(0))
    assert health.healthy(at(1000))
    assert "status" not in body(health.livez(at(1000)))


def test_the_clock_on_the_wall_may_be_set() -> None:
    health = ProxyHealth(10)
    health.updated(Family.IPV4, at(0))
    health.queued(Family.IPV4, at(1))
    assert health.healthy(at(2, wall_step=86400))
    assert not health.healthy(at(11, wall_step=-86400))


def test_an_unhealthy_answer_has_the_newest_real_update() -> None:
    health = ProxyHealth(10)
    assert body(health.healthz(at(5), None))["lastUpdated"] == "0001-01-01T00:00:00Z"
    health.updated(Family.IPV4, at(1))
    health.updated(Family.IPV6, at(2))
    assert body(health.healthz(at(5), None))["lastUpdated"] == rfc3339(2 * 10**9)
    assert body(health.healthz(at(5), NODE))["lastUpdated"] == rfc3339(5 * 10**9)
    assert body(health.healthz(at(5), NODE))["currentTime"] == rfc3339(5 * 10**9)


def test_ready_is_said_only_after_the_first_sync() -> None:
    assert readyz(True).status == 200
    answer = readyz(False)
    assert answer.status == 503
    assert "first sync" in str(answer.body)


def test_a_service_answers_with_its_count() -> None:
    services = ServiceHealth()
    services.sync_services({CART: 30001})
    services.sync_endpoints({CART: 2, SHOP: 7})
    answer = services.answer(CART, proxy_healthy=True)
    assert answer.status == 200
    assert answer.headers["X-Load-Balancing-Endpoint-Weight"] == "2"
    assert answer.body == (
        '{\n\t"service": {\n\t\t"namespace": "shop",\n\t\t"name": "cart"\n\t},\n'
        '\t"localEndpoints": 2,\n\t"serviceProxyHealthy": true\n}'
    )
    assert services.answer(CART, proxy_healthy=False).status == 503
    assert services.answer(SHOP, proxy_healthy=True).status == 503


def test_a_service_missing_from_the_counts_has_none() -> None:
    services = ServiceHealth()
    services.sync_services({CART: 30001})
    services.sync_endpoints({CART: 2})
    services.sync_endpoints({})
    assert services.answer(CART, proxy_healthy=True).status == 503


def test_a_changed_port_starts_at_none() -> None:
    services = ServiceHealth()
    services.sync_services({CART: 30001, SHOP: 30003})
    services.sync_endpoints({CART: 2, SHOP: 7})
    services.sync_services({CART: 30001, SHOP: 30003})
    assert services.answer(CART, proxy_healthy=True).status == 200
    services.sync_services({CART: 30002, SHOP: 30003})
    assert services.answer(CART, proxy_healthy=True).status == 503
    assert services.answer(SHOP, proxy_healthy=True).status == 200
    services.sync_services({CART: 30002})
    assert services.answer(SHOP, proxy_healthy=True).status == 503


def test_a_longer_sync_period_is_more_patience() -> None:
    health = ProxyHealth(60.0)
    for family in Family:
        health.updated(family, at(0))
        health.queued(family, at(1))
    assert not health.healthy(at(62))
    health.timeout = 120.0
    assert health.healthy(at(62))


# Servers


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


async def test_the_server_answers_while_the_kernel_holds_a_write_up() -> None:
    """As while another program commits a large ruleset."""
    begun, over = threading.Event(), threading.Event()

    def write() -> None:
        begun.set()
        assert over.wait(60)

    class Held(MemoryMode):
        def apply(self, change: Diff) -> None:
            write()
            super().apply(change)

    world = World(1)
    world.mode = Held()
    worker = world.mode.worker = KernelWorker()
    world.start()
    app = proxy_health_app(
        ProxyHealth(10), lambda: NODE, ready=lambda: True, count=lambda *_: None, clock=now
    )
    async with serving(app) as port:
        sync = asyncio.create_task(world.run())
        await until(begun.is_set)
        assert (await ask(port, "/healthz")).status == 200
        assert not sync.done()
        over.set()
        assert await sync
    await worker.close()


async def test_service_ports_are_opened_changed_and_closed() -> None:
    servers = ServiceHealthServers(lambda: ["127.0.0.1"], lambda: True)
    first, second = free_ports(2)
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
        async with asyncio.timeout(60):
            while True:
                with suppress(aiohttp.ClientConnectionError):
                    assert (await ask(port)).body == "here"
                    break
                await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slept == [5.0]
    why = "Address already in use"
    assert failures[0] == f"the test's server cannot listen on 127.0.0.1:{port}: {why}"


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
async def test_an_unspecified_address_is_served_in_both_families(address: str) -> None:
    """As by Go's servers: a node is probed at its IPv4 or at its IPv6 address."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as found:
            port = found.getsockname()[1]
    except OSError:
        pytest.skip("no IPv6 here")
    app = application({"/": lambda _: Answer("here")})
    task = asyncio.create_task(keep_serving(lambda: app, address, port, what="it"))
    for host in ("127.0.0.1", "[::1]"):
        async with asyncio.timeout(60):
            while True:
                with suppress(aiohttp.ClientConnectionError):
                    assert (await ask(port, host=host)).body == "here"
                    break
                await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_hard_failure_ends_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError):
            await keep_serving(
                lambda: application({}), "127.0.0.1", port, what="it", hard_fail=True
            )
