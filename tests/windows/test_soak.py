"""A minute of traffic and changes on Windows' Python: memory and handles stay."""

from __future__ import annotations

import asyncio
import resource
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from steersman.model.plan import Endpoint
from tests.support.builders import kube
from tests.support.modes.userspace_proxy import answering, ask, client, endpoint, server
from tests.support.processes.steersman import manifests
from tests.support.waiting import PATIENCE
from tests.windows.node import CONTROLLED, HOST, VIP, Node, Process, on_a_node

pytestmark = [pytest.mark.kernel, pytest.mark.slow(seconds=120)]

SECONDS = 60.0
SPARE_HANDLES = 64
"""By how many the count may grow: threads begin when they are needed. Each connection has one."""
SPARE_BYTES = 16 << 20
"""By how much memory may grow after the warm-up: the heap of a busy process breathes."""


def resident(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def handles(process: Process) -> int:
    """Return how many of Windows' handles the process has."""
    asked = process.log.count(" open handles")
    process.tell("handles")
    await process.said(" open handles", times=asked + 1)
    return int(process.log.rpartition(" open handles")[0].split()[-1])


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
            process = await stack.enter_async_context(node.steersman(program=CONTROLLED))
            await process.said("kernel objects")
            pid, loop = process.process.pid, asyncio.get_running_loop()
            assert await ask(80, b"!", VIP) == b"t!"
            before, end = await handles(process), loop.time() + SECONDS
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
                while loop.time() < end:
                    memory.append(resident(pid))
                    await asyncio.sleep(0.5)

            async with asyncio.TaskGroup() as group:
                for work in (*[connect] * 8, send, send, change, measure):
                    group.create_task(work())
            # After a warm-up of 20 s: the least in 10 s, as what a moment needs goes back.
            warm = memory[len(memory) // 3 :]
            quarter = len(warm) // 4
            assert min(warm[-quarter:]) < min(warm[:quarter]) + SPARE_BYTES
            async with asyncio.timeout(PATIENCE):  # connections end
                while await handles(process) > before + SPARE_HANDLES:
                    pass
            assert answers > 100
            assert "Traceback" not in process.log

    on_a_node(tmp_path, body)
