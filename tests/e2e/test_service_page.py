"""The page of a Service about a real process: its kernel objects, a traced packet, and rates."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.apiserver.reading import service
from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import manifests, steersman, world
from tests.support.reader import Reader, reading

pytestmark = [pytest.mark.kernel, pytest.mark.slow]
PAGE = "/services/shop/web"
POD = "10.244.0.5"


async def press(reader: Reader, command: str, to: str) -> str:
    """Run a command from the page; return the text of its answer."""
    return await reader.press(f"{PAGE}/run", command=command, node="node-a", client="pod", to=to)


@contextmanager
def server() -> Iterator[None]:
    """Accept connections to the pod, and close them at once.

    A server of asyncio leaves a socket open if a client connects just when it is closed (CPython
    issue 109564).
    """
    loop = asyncio.get_running_loop()

    def accept() -> None:
        with suppress(OSError):  # the client has gone
            listener.accept()[0].close()

    with socket.create_server((POD, 8080)) as listener:
        listener.setblocking(False)
        loop.add_reader(listener, accept)
        try:
            yield
        finally:
            loop.remove_reader(listener)


@asynccontextmanager
async def connecting(address: str, port: int) -> AsyncIterator[None]:
    """Connect again and again."""

    async def connect() -> None:
        while True:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    _, writer = await asyncio.open_connection(address, port)
                    writer.close()
            await asyncio.sleep(0.02)

    task = asyncio.create_task(connect())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize(
    ("mode", "planned"),
    [("nftables", f"{POD} . 8080"), ("iptables", f"--to-destination {POD}:8080")],
)
def test_kernel_objects_and_a_packet(mode: str, planned: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        sh("ip link add eth0 type bridge && ip link set eth0 up")
        sh("ip addr add 192.0.2.1/24 dev eth0")
        sh(f"ip route add default dev eth0 && ip addr add {POD}/32 dev lo")
        headless = service("db", "None")
        folder = manifests(tmp_path / "world", *world(POD), headless)
        arguments = (f"--proxy-mode={mode}", f"--manifests={folder}")
        with server():
            async with steersman(tmp_path, *arguments) as process, reading() as reader:
                await process.said("sync 1 (start)")
                found = await reader.twin(PAGE)
                assert found["flow"]["hops"][0]["verdict"] == "forward"
                assert found["source"] == f"node node-a ({mode} mode)"
                (to,) = [each["to"] for each in found["choices"] if each["selected"]]
                # The kernel has the planned objects.
                text = await press(reader, "dump", to)
                assert f"lines of the {mode} mode" in text, text
                assert planned in text
                # A packet goes where the picture says.
                text = await press(reader, "trace", to)
                assert "the kernel did what explain predicts" in text, text
                text = await press(reader, "doctor", to)
                assert "No failure was found, but: there is no Node object named node-a" in text
                assert "1 of 1 ways work [SM5112 tries] 10.96.0.1:80/TCP from this node" in text
                # A Service that no proxy serves, and one that is not there.
                found = await reader.twin("/services/shop/db")
                assert "headless" in found["served"]["notes"][0]
                found = await reader.twin("/services/shop/none")
                assert "there is no Service" in found["problem"]
                # The process has gone: the page says so.
                await process.stop()
                found = await reader.until(PAGE, lambda got: got["problem"] != "")
                assert "no steersman runs in this network namespace" in found["problem"]

    in_namespace(scenario)


@pytest.mark.parametrize("mode", ["nftables", "userspace"])
def test_connections_are_counted_and_drawn(mode: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        sh(f"ip addr add {POD}/32 dev lo && ip link set lo up")
        sh("ip link add eth0 type bridge && ip link set eth0 up")
        sh("ip addr add 192.0.2.1/24 dev eth0")
        sh("ip route add default dev eth0")
        folder = manifests(tmp_path / "world", *world(POD))
        arguments = (f"--proxy-mode={mode}", f"--manifests={folder}")
        async with steersman(tmp_path, *arguments) as process, reading() as reader:
            await process.said("sync 1 (start)")
            with ExitStack() as stack:
                stack.enter_context(server())
                async with connecting("10.96.0.1", 80):
                    path = f"{PAGE}/rates?node=node-a"
                    found = await reader.until(
                        path, lambda got: any((each["rate"] or 0) > 1 for each in got["rows"])
                    )
                    assert found["problem"] == ""
                    found = await reader.until(
                        path, lambda got: len(got["connections"]["times"]) > 1
                    )
                    assert found["connections"]["series"][1]["label"].startswith(f"{POD}:8080")
                    found = await reader.until("/map", lambda got: len(got["graph"]["streams"]) > 1)
                    kinds = [each["kind"] for each in found["graph"]["points"]]
                    assert kinds == ["node", "service", "endpoint"]
                    if mode != "userspace":
                        return
                    # Without a server, each connection fails.
                    stack.close()
                    await reader.until(
                        path,
                        lambda got: any((each["failureRate"] or 0) > 1 for each in got["rows"]),
                    )

    in_namespace(scenario)
