"""What it costs a node to be watched by pages: CPU of `/node?watch=1`, idle and under changes."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import aiohttp

from benchmarks import world
from benchmarks.figures import Figure, figure
from benchmarks.footprint import objects
from benchmarks.node import Netns
from benchmarks.process import api_server, steersman, wait_ready
from benchmarks.scrape import cpu
from steersman.host.peers import CONTROL
from tests.support.apiserver.remote import control

_RATE = 50
"""Changes a second."""
_LISTENERS = (0, 1, 10)


def run(quick: bool) -> list[Figure]:
    """Measure 10,000 Services (300 when quick), for some seconds each, the cases in turn."""
    services, seconds, rounds = (300, 3.0, 1) if quick else (10_000, 10.0, 3)
    found = []
    with ExitStack() as stack:
        netns = Netns()
        stack.callback(netns.close)
        netns.enter()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(api_server(objects(services), folder))
        process = stack.enter_context(steersman("--master", url, "--proxy-mode", "nftables"))
        wait_ready(process)
        spent: dict[tuple[int, int], list[float]] = {}
        lines: dict[tuple[int, int], int] = {}
        for _ in range(rounds):
            for rate in (0, _RATE):
                for listeners in _LISTENERS:
                    share, number = asyncio.run(
                        watched(process.pid, url, services, seconds, listeners=listeners, rate=rate)
                    )
                    spent.setdefault((rate, listeners), []).append(share)
                    lines[rate, listeners] = number
        for (rate, listeners), shares in spent.items():
            name = f"{rate} changes/s, {listeners} listeners: CPU"
            value = (100 * sorted(shares)[len(shares) // 2], "%")
            found.append(figure(name, "nftables", services, value))
            made = (lines[rate, listeners] / max(1, listeners) / seconds, "/s")
            found.append(figure("  lines to each", "nftables", services, made))
    return found


async def watched(
    pid: int, url: str, services: int, seconds: float, *, listeners: int, rate: int
) -> tuple[float, int]:
    """Return the share of a core that the process takes, and the lines that all listeners got."""
    lines = 0

    async def listen(session: aiohttp.ClientSession) -> None:
        nonlocal lines
        async with session.get("/node?watch=1") as answer:
            while await answer.content.readline():
                lines += 1

    connector = aiohttp.UnixConnector(f"\0{CONTROL}")
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        "http://steersman", connector=connector, timeout=timeout
    ) as session:
        tasks = [asyncio.create_task(listen(session)) for _ in range(listeners)]
        while lines < listeners:  # noqa: ASYNC110 - each has its first line
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # the digests are made when the first one asks
        begun, at, sent, lines = cpu(pid), time.monotonic(), 0, 0
        while (now := time.monotonic()) < at + seconds:
            if rate and sent < (now - at) * rate:
                sent += 1
                number = int(at * 7 + sent) % services
                slice_ = json.loads(world.endpoint_slice(number, world.pods(number, sent)))
                change = {"kind": "EndpointSlice", **slice_}
                await asyncio.to_thread(control, url, "apply", object=change)
            else:
                await asyncio.sleep(0.005)
        share, number = (cpu(pid) - begun) / (time.monotonic() - at), lines
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return share, number
