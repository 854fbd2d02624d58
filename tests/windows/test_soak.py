"""A minute of traffic and changes on Windows' Python: memory, descriptors and handles stay."""

from __future__ import annotations

import asyncio
import os
import resource
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from steersman.model.plan import Endpoint
from tests.support.builders import kube
from tests.support.modes.userspace_proxy import answering, ask, client, endpoint, server, until
from tests.support.processes.steersman import manifests
from tests.windows.node import HOST, VIP, Node, on_a_node

pytestmark = [pytest.mark.kernel, pytest.mark.slow(seconds=120)]

SECONDS = 60.0
SPARE_BYTES = 16 << 20
"""By how much memory may grow after the first third: the heap of a busy process breathes."""


def resident(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def wine_server() -> int:
    """Return the pid of Wine's server in this namespace: it holds an open file for each handle."""
    here = os.readlink("/proc/thread-self/ns/net")
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_server = (path / "comm").read_text().startswith("wineserver")
            if is_server and os.readlink(path / "ns/net") == here:
                return int(path.name)
        except OSError:  # it has ended
            continue
    raise AssertionError("Wine's server does not run")


def world(tcp: Endpoint, udp: Endpoint) -> list[dict[str, object]]:
    """Return a Service with a port of each protocol."""
    ports = [{"name": "http", "port": 80}, {"name": "echo", "port": 90, "protocol": "UDP"}]
    ends = [
        {"name": "http", "port": tcp.port},
        {"name": "echo", "port": udp.port, "protocol": "UDP"},
    ]
    web = kube.service("web", VIP, ports=ports)
    return [web, kube.endpoint_slice("web-1", "web", HOST, ports=ends)]


def test_a_minute_of_traffic_and_changes_leaves_nothing(tmp_path: Path) -> None:
    async def body(node: Node) -> None:
        async with AsyncExitStack() as stack:
            tcp = [
                await stack.enter_async_context(endpoint(answering(b"t"), HOST)) for _ in range(2)
            ]
            udp = [(await stack.enter_async_context(server(b"u", HOST)))[0] for _ in range(2)]
            folder = manifests(node.folder / "manifests", *world(tcp[0], udp[0]))
            process = await stack.enter_async_context(node.steersman())
            await process.said("kernel objects")
            pid, wine, loop = process.process.pid, wine_server(), asyncio.get_running_loop()

            def handles() -> tuple[int, int]:
                return tuple(len(os.listdir(f"/proc/{each}/fd")) for each in (pid, wine))  # type: ignore[return-value]

            assert await ask(80, b"!", VIP) == b"t!"
            before, end = handles(), loop.time() + SECONDS
            answers = 0

            async def connect() -> None:
                nonlocal answers
                while loop.time() < end:
                    assert await ask(80, b"x" * 5000, VIP) == b"t" + b"x" * 5000
                    answers += 1

            async def send() -> None:
                nonlocal answers
                while loop.time() < end:
                    async with client(90, VIP) as asker:
                        assert await asker.ask(b"?") == b"u?"
                    answers += 1

            async def change() -> None:
                turn = 0
                while loop.time() < end:
                    turn += 1
                    manifests(folder, *world(tcp[turn % 2], udp[turn % 2]))
                    await asyncio.sleep(2)

            memory: list[int] = []

            async def measure() -> None:
                for share in (1 / 3, 1.0):
                    await asyncio.sleep(max(0.0, end - SECONDS * (1 - share) - loop.time()))
                    memory.append(resident(pid))

            async with asyncio.TaskGroup() as group:
                for work in (*[connect] * 8, send, send, change, measure):
                    group.create_task(work())
            assert memory[1] < memory[0] + SPARE_BYTES
            await until(lambda: all(a <= b + 8 for a, b in zip(handles(), before, strict=True)))
            assert answers > 100
            assert "Traceback" not in process.log

    on_a_node(tmp_path, body)
