"""The pages: how fast they load with 10,000 Services, and what stays live for minutes costs."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

from playwright.async_api import CDPSession, Page

from benchmarks.figures import Figure, figure
from tests.support.browser import browser, chromium, simulated, tab

_NODES, _SERVICES, _CHANGES = 1000, 10_000, 50
PAGES = {
    "cluster": "/",
    "services": "/services",
    "service": "/services/shop-07/web-00007",
    "problems": "/problems",
    "time": "/time?node=node-0001",
    "plan": "/plan",
    "map": "/map",
}
_LIVE = {"cluster": "/?sort=sync", "problems": "/problems"}
"""Rows of the first change their order with each update."""
_LOADED = """() => {
  const entry = performance.getEntriesByType('navigation')[0];
  return [entry.responseEnd - entry.requestStart, entry.loadEventEnd, entry.decodedBodySize];
}"""


async def _loads(page: Page, url: str, runs: int) -> tuple[float, float, float]:
    """Medians of a page: ms until the HTML has come, ms until it is loaded; and its size in kB."""
    seen: list[list[float]] = []
    for _ in range(runs):
        await page.goto(url, wait_until="load")
        await page.wait_for_function("performance.getEntriesByType('navigation')[0].loadEventEnd")
        seen.append(await page.evaluate(_LOADED))
    first, whole, size = map(statistics.median, zip(*seen, strict=True))
    return first, whole, size / 1000


async def _heap(session: CDPSession) -> tuple[float, float]:
    """MB of JavaScript objects of a tab after a collection, and the number of its DOM nodes."""
    for _ in range(3):  # a node may be in use by an update just now
        await session.send("HeapProfiler.collectGarbage")
        await asyncio.sleep(0.3)
    metrics = {
        each["name"]: each["value"]
        for each in (await session.send("Performance.getMetrics"))["metrics"]
    }
    return metrics["JSHeapUsedSize"] / 1e6, metrics["Nodes"]


def _resident(pid: int) -> float:
    """MB of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _cpu(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _measure(quick: bool) -> list[Figure]:
    figures: list[Figure] = []

    def note(what: str, page: str, value: float, unit: str, before: float | None = None) -> None:
        figures.append(figure(what, page, _SERVICES, (value, unit), before))

    flags = [f"--nodes={_NODES}", f"--services={_SERVICES}", "--trouble"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with (
            simulated(folder, *flags) as served,
            browser() as chrome,
            tab(chrome, served.url) as opened,
        ):
            await asyncio.sleep(10)  # all nodes are connected by then
            for page, path in PAGES.items():
                first, whole, size = await _loads(opened.page, served.url + path, 5)
                note("HTML complete", page, first, "ms")
                note("page loaded", page, whole, "ms")
                note("size of the HTML", page, size, "kB")
        flags.append(f"--changes={_CHANGES}")
        async with simulated(folder, *flags) as served, browser() as chrome:
            for page, path in _LIVE.items():
                async with tab(chrome, served.url) as opened:
                    await opened.open(path)
                    session = await opened.page.context.new_cdp_session(opened.page)
                    await session.send("Performance.enable")
                    await asyncio.sleep(20)  # caches are full now
                    heap, nodes = await _heap(session)
                    memory, used, began = _resident(served.pid), _cpu(served.pid), time.monotonic()
                    await asyncio.sleep(20 if quick else 180)
                    share = (_cpu(served.pid) - used) / (time.monotonic() - began)
                    later, later_nodes = await _heap(session)
                    note("live: JavaScript heap, and before", page, later, "MB", heap)
                    note("live: DOM nodes, and before", page, later_nodes, "", nodes)
                    note("live: server, and before", page, _resident(served.pid), "MB", memory)
                    note("live: CPU of the server", page, share, "cores")
    return figures


def run(quick: bool) -> list[Figure]:
    """Load each page; then keep the live ones open while nodes change 50 times a second."""
    if not chromium():
        print("ui: left out, no Chromium is installed")
        return []
    return asyncio.run(_measure(quick))
