"""The process in the userspace mode: served, changed, handed over and cleaned up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from steersman.model.plan import Endpoint
from tests.support.builders import kube
from tests.support.lab.namespace import in_namespace, sh
from tests.support.modes.userspace_proxy import answering, ask, endpoint
from tests.support.processes.steersman import NOBODY, command, get, manifests, rules, steersman
from tests.support.waiting import until

pytestmark = pytest.mark.kernel

HOST, VIP, NODE_PORT = "192.168.77.2", "10.96.0.10", 30080
FLAGS = ("--proxy-mode=userspace", "--proxy-port-range=21000-21099", "--drain-period=10s")


def world(*endpoints: Endpoint) -> tuple[dict[str, Any], ...]:
    """A Service with a node port; each endpoint is a slice of its own, for its port."""
    ports = [{"name": "http", "port": 80, "nodePort": NODE_PORT}]
    web = kube.service("web", VIP, ports=ports, type="NodePort")
    slices = [
        kube.endpoint_slice(
            f"web-{number}", "web", each.ip, ports=[{"name": "http", "port": each.port}]
        )
        for number, each in enumerate(endpoints)
    ]
    return (web, *slices)


def on_a_node(body: Callable[[Endpoint, Endpoint], Awaitable[None]]) -> None:
    async def inside() -> None:
        sh(f"ip link add eth0 type bridge && ip link set eth0 up && ip addr add {HOST}/24 dev eth0")
        sh("ip route add default dev eth0")
        async with (
            endpoint(answering(b"1"), HOST) as one,
            endpoint(answering(b"2"), HOST) as two,
        ):
            await body(one, two)

    in_namespace(inside)


class Visitors:
    """Clients that connect, ask and leave without pause; what goes wrong is counted."""

    def __init__(self, *places: tuple[str, int]) -> None:
        self.served = 0
        self.failures: list[str] = []
        self._tasks = [asyncio.create_task(self._visit(*place)) for place in places for _ in "123"]

    async def _visit(self, address: str, port: int) -> None:
        while True:
            try:
                assert await ask(port, b"x", address) == b"1x"
                self.served += 1
            except (OSError, AssertionError) as error:
                self.failures.append(f"{address} port {port}: {error!r}")

    async def some_more(self, count: int = 50) -> None:
        """Wait until some more were served."""
        until_now = self.served

        async def served() -> bool:
            return self.served >= until_now + count

        await until(served)

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def answered(said: bytes, address: str = VIP, port: int = 80) -> bool:
    try:
        return await ask(port, b"", address) == said
    except OSError:
        return False


def test_it_serves_follows_and_leaves_in_order(tmp_path: Path) -> None:
    async def body(one: Endpoint, two: Endpoint) -> None:
        folder = manifests(tmp_path / "m", *world(one))
        async with steersman(tmp_path, f"--manifests={folder}", *FLAGS) as proxy:
            await proxy.said("Using userspace Proxier")
            await until(lambda: answered(b"1"))
            assert await answered(b"1", HOST, NODE_PORT)
            assert "--to-destination 192.168.77.2:210" in rules()
            reader, writer = await asyncio.open_connection(VIP, 80)
            assert await reader.readexactly(1) == b"1"
            manifests(folder, *world(two))
            await until(lambda: answered(b"2"))
            writer.write(b"old")
            assert await reader.readexactly(3) == b"old"
            assert "steersman_proxied_connections 1" in (await get("/metrics"))[1]
            assert f'endpoint="{two}"' in (await get("/metrics/services"))[1]
            manifests(folder, *world())
            await until(lambda: refused(VIP, 80))
            stopping = asyncio.create_task(proxy.stop())
            writer.write(b"and on")
            assert await reader.readexactly(6) == b"and on"
            writer.close()
            assert await stopping == 0
        status, out, _ = await command("cleanup")
        assert status == 0, out
        assert "KUBE-PORTALS" not in rules() + rules("filter")

    on_a_node(body)


async def refused(address: str, port: int) -> bool:
    try:
        await ask(port, b"", address)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def test_the_next_process_takes_over_while_the_old_one_drains(tmp_path: Path) -> None:
    async def body(one: Endpoint, _: Endpoint) -> None:
        folder = manifests(tmp_path / "m", *world(one))
        flags = (f"--manifests={folder}", *FLAGS)
        async with steersman(tmp_path, *flags) as old:
            await until(lambda: answered(b"1"))
            held = [await asyncio.open_connection(*at) for at in ((VIP, 80), (HOST, NODE_PORT))]
            for reader, _writer in held:
                assert await reader.readexactly(1) == b"1"
            stopping = asyncio.create_task(old.stop())
            await old.said("stopping")
            async with steersman(tmp_path, *flags, name="second"):
                await until(lambda: answered(b"1"))
                await until(lambda: answered(b"1", HOST, NODE_PORT))
                for reader, writer in held:
                    writer.write(b"old")
                    assert await reader.readexactly(3) == b"old"
                    writer.close()
                assert await stopping == 0
                # Until now it may have been the old process that answered.
                await until(lambda: answered(b"1"))
                await until(lambda: answered(b"1", HOST, NODE_PORT))

    on_a_node(body)


@pytest.mark.parametrize("portals", ["", "nftables", "direct", "none"])
def test_no_connection_is_lost_when_a_process_follows_another(tmp_path: Path, portals: str) -> None:
    """The listening sockets are handed over; what waits to be accepted goes with them."""

    async def body(one: Endpoint, two: Endpoint) -> None:
        folder = manifests(tmp_path / "m", *world(one))
        flags = (f"--manifests={folder}", f"--userspace-portals={portals}", *FLAGS)
        places = [(VIP, 80), (HOST, NODE_PORT)][portals == "none" :]
        async with steersman(tmp_path, *flags) as old:
            for place in places:  # a node port is bound a moment before there are rules
                await until(partial(answered, b"1", *place))
            visitors = Visitors(*places)
            held = [await asyncio.open_connection(*place) for place in places]
            for reader, _writer in held:
                assert await reader.readexactly(1) == b"1"
            await visitors.some_more()
            async with steersman(tmp_path, *flags, "--take-over", name="second") as new:
                await new.said("listening sockets")
                await old.said("another process has taken over")
                await visitors.some_more()
                stopping = asyncio.create_task(old.stop())
                await old.said("stopping")
                await visitors.some_more()
                for reader, writer in held:
                    writer.write(b"old")
                    assert await reader.readexactly(3) == b"old"
                    writer.close()
                assert await stopping == 0
                await visitors.some_more()
                await visitors.leave()
                assert visitors.failures == []
                manifests(folder, *world(two))
                await until(lambda: answered(b"2", *places[-1]))

    on_a_node(body)


def test_a_user_without_rights_serves_node_ports(tmp_path: Path) -> None:
    async def body(one: Endpoint, two: Endpoint) -> None:
        folder = manifests(tmp_path / "m", *world(one))
        flags = (f"--manifests={folder}", *FLAGS)
        async with steersman(tmp_path, *flags, through=NOBODY) as proxy:
            await until(partial(answered, b"1", HOST, NODE_PORT))
            assert not await answered(b"1")
            manifests(folder, *world(two))
            await until(partial(answered, b"2", HOST, NODE_PORT))
            assert (await get("/healthz"))[0] == 200
            assert await proxy.stop() == 0
        assert "Only node ports, and Service addresses that this machine has" in proxy.log
        assert "KUBE" not in rules()

    on_a_node(body)
