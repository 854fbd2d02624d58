"""The userspace proxy under load: many connections, endpoints that come and go, rude peers.

Loopback only and no rules, so it needs no root; it is here because it takes time and descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import os
import random
import socket
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from steersman.model.plan import Endpoint
from steersman.proxy import relay
from steersman.proxy.engine import Proxy
from tests.support.modes.userspace_proxy import LOCAL, answering, endpoint, key, listener, proxy
from tests.support.waiting import until

pytestmark = [pytest.mark.kernel, pytest.mark.slow]
CONNECTIONS = 2000
ENDPOINTS = 8
CHUNKS = 12
IDLE = 1000
RESET = struct.pack("ii", 1, 0)


async def digest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back everything, and at the end the checksum of it."""
    seen = hashlib.sha256()
    while data := await reader.read(1 << 15):
        seen.update(data)
        writer.write(data)
        await writer.drain()
    writer.write(seen.digest())


async def exchange(port: int, seed: int) -> int:
    """Send random bytes with pauses, and check that they come back, with their checksum."""
    rng, sent, got = random.Random(seed), hashlib.sha256(), hashlib.sha256()
    reader, writer = await asyncio.open_connection(LOCAL, port)
    total = 0
    for _ in range(CHUNKS):
        data = rng.randbytes(rng.choice((1, 100, 5000, 40_000)))
        writer.write(data)
        sent.update(data)
        got.update(await reader.readexactly(len(data)))
        total += len(data)
        await asyncio.sleep(rng.random() * 0.2)  # stay open while others come
    writer.write_eof()
    assert await reader.read() == sent.digest() == got.digest()
    writer.close()
    return total


async def churn(made: Proxy, endpoints: list, stop: asyncio.Event) -> int:  # type: ignore[type-arg]
    """Change the plan without pause; some endpoint always stays."""
    rng, changes = random.Random(7), 0
    while not stop.is_set():
        some = rng.sample(endpoints, rng.randrange(1, len(endpoints) + 1))
        await made.start({key(): listener(*some)})
        changes += 1
        await asyncio.sleep(0.01)
    return changes


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_no_byte_is_lost_while_endpoints_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each connection is copied first, and most are spliced on the way."""
    monkeypatch.setattr(relay, "SPLICE_AFTER", 1 << 16)
    before = descriptors()
    async with contextlib.AsyncExitStack() as stack:
        endpoints = [await stack.enter_async_context(endpoint(digest)) for _ in range(ENDPOINTS)]
        made = await stack.enter_async_context(proxy())
        await made.start({key(): listener(*endpoints)})
        stop = asyncio.Event()
        churning = asyncio.create_task(churn(made, endpoints, stop))
        async with asyncio.timeout(240):
            port = made.port(key())
            totals = await asyncio.gather(*(exchange(port, n) for n in range(CONNECTIONS)))
        stop.set()
        assert await churning > 10
        await until(lambda: made.open_connections == 0)
        moved = Counter[int]()
        for _, _, counters in made.traffic:
            moved.update({0: counters.moved[0], 1: counters.moved[1], 2: counters.connections})
        assert moved[2] == CONNECTIONS
        assert moved[0] == sum(totals)
        assert moved[1] == sum(totals) + 32 * CONNECTIONS
        assert made.budget.used == 1
    gc.collect()
    await until(lambda: descriptors() <= before + 1)


async def test_resets_leave_nothing_behind() -> None:
    """Resets, ends without a word, silence, and floods of connections that are dropped at once."""
    async with endpoint(digest) as one, proxy() as made:
        await made.start({key(): listener(one)})
        address, rng = (LOCAL, made.port(key())), random.Random(3)
        held = []
        for number in range(1500):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(address)
            with contextlib.suppress(OSError):
                sock.send(rng.randbytes(rng.randrange(200)))
            match number % 4:
                case 0:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    sock.close()
                case 1:
                    sock.close()
                case 2:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_WR)
                    held.append(sock)
                case _:
                    held.append(sock)
            if number % 50 == 0:
                await asyncio.sleep(0)
        assert await exchange(address[1], 1) > 0
        for sock in held:
            sock.close()
        await until(lambda: made.open_connections == 0)
        assert made.budget.used == 1


@asynccontextmanager
async def process(to: Endpoint, limit: int = 0) -> AsyncIterator[tuple[int, list[int]]]:
    """A process that only proxies: its id, and the ports of its two Services."""
    child = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "tests.support.processes.userspace_child",
            str(to.port),
            str(limit),
        ),
        stdout=-1,
        stdin=-1,
    )
    try:
        assert child.stdout is not None
        yield child.pid, [int(port) for port in (await child.stdout.readline()).split()]
    finally:
        child.kill()
        await child.wait()


async def test_memory_of_an_idle_connection() -> None:
    """At most 20 kB each, in a process that does nothing else."""
    async with (
        endpoint(digest) as one,
        process(one) as (pid, (port, _)),
        contextlib.AsyncExitStack() as stack,
    ):
        await exchange(port, 1)  # so that everything is there that the first one needs
        before = _resident(pid)
        for _ in range(IDLE):
            reader, writer = await asyncio.open_connection(LOCAL, port)
            stack.callback(writer.close)
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
        each = (_resident(pid) - before) / IDLE
    assert each <= 20_000, f"{each:.0f} bytes"


async def test_idle_connections_of_one_client_do_not_block_others() -> None:
    """Neither clients of another Service nor other clients of the same one."""
    async with (
        endpoint(answering(b"1")) as one,
        process(one, limit=300) as (_, ports),
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(600):
            greedy = stack.enter_context(socket.create_connection((LOCAL, ports[0])))
        await until(lambda: _is_reset(greedy))
        for port in ports * 20:
            reader, writer = await asyncio.open_connection(LOCAL, port, local_addr=("127.0.0.2", 0))
            stack.callback(writer.close)
            async with asyncio.timeout(60):
                assert await reader.readexactly(1) == b"1"


def _is_reset(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
