"""A headless Chromium for tests, and pages that note whatever a reader would not want to happen."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from playwright.async_api import (
    Browser,
    ConsoleMessage,
    Page,
    Request,
    Response,
    async_playwright,
    expect,
)

from tests.support.http import free_port

_ROOT = Path(__file__).parents[2]
_AXE = Path(__file__).parents[1] / "browser" / "axe" / "axe.min.js"
_RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
WAIT = 60.0
"""Seconds within which a condition must become true; the machine may be busy."""
expect.set_options(timeout=WAIT * 1000)


@cache
def chromium() -> str:
    """Path of the browser that is installed; "" if there is none."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), "")


@asynccontextmanager
async def browser(*arguments: str) -> AsyncIterator[Browser]:
    """Run the browser. No name resolves in it, so it reaches nothing but addresses of loopback."""
    flags = ["--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", *arguments]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium refuses to run as root with it
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=chromium(), args=flags)
        try:
            yield running
        finally:
            await running.close()


class Tab:
    """A page in a browser context of its own. `complaints` must be empty at the end of a test."""

    def __init__(self, page: Page, base: str) -> None:
        self.page = page
        self._base = base
        self.complaints: list[str] = []
        """Errors on the console (a breach of the content security policy is one), exceptions,
        requests to anywhere but the server, and answers of 400 and above."""
        page.set_default_timeout(WAIT * 1000)
        page.on("console", self._note_console)
        page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        page.on("request", self._note_request)
        page.on("response", self._note_response)

    def _note_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"console: {message.text}")

    def _note_request(self, request: Request) -> None:
        if not request.url.startswith((self._base, "data:", "blob:")):
            self.complaints.append(f"request to {request.url}")

    def _note_response(self, response: Response) -> None:
        if response.status >= 400:
            self.complaints.append(f"{response.url}: {response.status}")

    async def open(self, path: str) -> None:
        """Go to an address of the server and wait until its scripts have run."""
        await self.page.goto(self._base + path, wait_until="load")

    async def look(self, dark: bool = False, width: int = 1280) -> None:
        """Choose the colour scheme and the width of the window."""
        await self.page.emulate_media(color_scheme="dark" if dark else "light")
        await self.page.set_viewport_size({"width": width, "height": 900})

    async def barriers(self) -> list[str]:
        """What axe-core finds on the page as it looks now: rule, element and advice."""
        if not await self.page.evaluate("'axe' in window"):
            await self.page.evaluate(_AXE.read_text())
        code = "async tags => (await axe.run({runOnly: tags})).violations"
        found: list[dict[str, Any]] = await self.page.evaluate(code, list(_RULES))
        return [
            f"{each['id']}: {node['html'][:200]}: {node['failureSummary']}"
            for each in found
            for node in each["nodes"]
        ]

    async def overflow(self) -> int:
        """Pixels by which the document is wider than the window."""
        code = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return int(await self.page.evaluate(code))


@asynccontextmanager
async def tab(running: Browser, base: str, javascript: bool = True) -> AsyncIterator[Tab]:
    """Open a tab with a profile of its own on a server such as `http://127.0.0.1:8080`."""
    context = await running.new_context(java_script_enabled=javascript, locale="en-GB")
    try:
        yield Tab(await context.new_page(), base)
    finally:
        await context.close()


class Served(NamedTuple):
    """A server of pages in a process of its own."""

    url: str
    pid: int


@asynccontextmanager
async def _running(
    *argv: str, until: bytes
) -> AsyncIterator[tuple[asyncio.subprocess.Process, bytes]]:
    """Run a program of Python's; give it, and the line it has printed that contains a text."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *argv,
        cwd=_ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    printed = []
    rest: asyncio.Task[bytes] | None = None
    try:
        async with asyncio.timeout(4 * WAIT):
            async for line in process.stdout:
                printed.append(line)
                if until in line:
                    break
            else:
                raise RuntimeError(b"".join(printed).decode())
        rest = asyncio.create_task(process.stdout.read())  # or the pipe would fill
        yield process, line
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        async with asyncio.timeout(2 * WAIT):
            await process.wait()
            if rest is not None:
                await rest


@asynccontextmanager
async def pages_of(*nodes: str) -> AsyncIterator[Served]:
    """Run `steersman ui` with flags that name nodes."""
    port = free_port()
    argv = ("-m", "steersman", "ui", *nodes, "--listen", f"127.0.0.1:{port}")
    async with _running(*argv, until=b"http://") as (process, _):
        yield Served(f"http://127.0.0.1:{port}", process.pid)


@asynccontextmanager
async def simulated(folder: Path, *flags: str) -> AsyncIterator[Served]:
    """Run `steersman ui` on simulated nodes, which another process serves (see fleet.py)."""
    file = folder / "nodes"
    argv = ("-m", "tests.support.fleet", "--file", str(file), *flags)
    async with _running(*argv, until=b"listening on"), pages_of(f"--nodes-file={file}") as served:
        yield served


@asynccontextmanager
async def demo() -> AsyncIterator[str]:
    """Run `make demo-ui`; the URL of its pages. Two real nodes, pods and traffic (root)."""
    async with _running("scripts/demo_ui.py", "--port=0", until=b"Open http://") as (_, line):
        yield line.decode().split()[1].rstrip("/")
