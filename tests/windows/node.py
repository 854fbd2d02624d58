"""A node in a network namespace whose programs are Windows', with endpoints and clients beside."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import windows

from steersman.model.plan import Endpoint
from tests.support.builders import kube
from tests.support.lab.namespace import in_namespace, sh
from tests.windows import netsh

HOST, HOST6 = "192.0.2.2", "2001:db8::2"
VIP, OTHER = "10.96.0.10", "10.96.0.11"
ROOT = windows.ROOT


def world(end: Endpoint, address: str = VIP) -> list[dict[str, object]]:
    """Return a Service with one endpoint, and its slice."""
    web = kube.service("web", address, ports=[{"name": "http", "port": 80}])
    return [
        web,
        kube.endpoint_slice("web-1", "web", end.ip, ports=[{"name": "http", "port": end.port}]),
    ]


def windows_path(path: Path) -> str:
    """Return what Windows' programs call a path; Wine has Linux' root as drive Z:."""
    return "Z:" + str(path).replace("/", "\\")


CONTROLLED = (windows_path(ROOT / "tests" / "windows" / "controlled.py"),)
"""A program for Node.steersman that can be told what to do."""


class Process:
    """A running program of Windows, and what it has said."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log = ""
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        # Through a pipe: Python cannot use a file that Wine has not opened itself.
        assert self.process.stdout
        while data := await self.process.stdout.read(1 << 16):
            self.log += data.decode(errors="replace")

    async def said(self, text: str, times: int = 1, limit: float = 240.0) -> None:
        """Wait until it has said something so often; `limit` is in seconds: Wine starts slowly."""
        try:
            async with asyncio.timeout(limit):
                while self.log.count(text) < times:
                    assert self.process.returncode is None, self.log
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"{text!r} is not in the log:\n{self.log}") from None

    def tell(self, what: str) -> None:
        """Write a line to its standard input; see controlled.py."""
        assert self.process.stdin
        self.process.stdin.write(f"{what}\n".encode())

    async def ended(self, minutes: float = 4.0) -> int:
        """Wait for its end; return its status."""
        async with asyncio.timeout(minutes * 60):
            # `wait` would also wait for the pipe.
            while (status := self.process.returncode) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        # All that it said is in the pipe, which Wine's services may hold for longer.
        await asyncio.wait([self._reader], timeout=5)
        return status

    async def kill(self) -> None:
        """End it with no chance to do anything."""
        if self.process.returncode is None:
            self.process.kill()
        await self.ended()


class Node:
    """Starts programs of Windows."""

    def __init__(self, folder: Path, answers: netsh.Netsh) -> None:
        self.folder = folder
        self.netsh = answers
        self.environment = windows.environment(folder / "wine")
        sources = (ROOT / "src", ROOT)
        self.environment["PYTHONPATH"] = ";".join(map(windows_path, sources))

    @asynccontextmanager
    async def python(self, *words: str) -> AsyncIterator[Process]:
        """Run Python, which is killed at the end."""
        started = await asyncio.create_subprocess_exec(
            *(windows.wine(), str(windows.HOME / "python" / "python.exe"), *words),
            env=self.environment,
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        process = Process(started)
        try:
            yield process
        finally:
            await process.kill()

    @asynccontextmanager
    async def steersman(
        self, *flags: str, program: Sequence[str] = ("-m", "steersman")
    ) -> AsyncIterator[Process]:
        """Run the daemon on the manifests of `folder`."""
        mode = ("--proxy-mode=winuserspace", "--hostname-override=win-1", *flags)
        if not any(flag.startswith("--kubeconfig") for flag in flags):
            mode = (*mode, f"--manifests={windows_path(self.folder / 'manifests')}")
        async with self.python(*program, "run", *mode) as process:
            yield process

    async def commands(self, *each: str) -> list[tuple[int, str]]:
        """Run commands, whose words are separated by blanks; return their statuses and outputs."""
        script = windows_path(ROOT / "tests" / "windows" / "commands.py")
        async with self.python(script, *" then ".join(each).split()) as process:
            assert await process.ended() == 0, process.log
        found = re.findall(r"(.*?)^exit status (\d+)\s", process.log, re.DOTALL | re.MULTILINE)
        return [(int(status), text) for text, status in found]

    @property
    def drive(self) -> Path:
        """Return what Windows calls C:."""
        return self.folder / "wine" / "drive_c"

    def service_addresses(self) -> set[str]:
        """Return the addresses of the interface for Services."""
        found = {address for address, _ in netsh.addresses("hns0")}
        return {a for a in found if not a.startswith("fe80") and a != "172.20.0.1"}


def on_a_node(folder: Path, body: Callable[[Node], Awaitable[None]]) -> None:
    """Run a test on a node; it is skipped with a reason where Windows' Python cannot be had."""
    try:
        windows.lay_out()
    except windows.MissingError as reason:
        pytest.skip(f"Windows' Python cannot be had: {reason}")
    # A prefix has a server, which makes all sockets: so each namespace has a prefix of its own.
    prefix = folder / "wine"
    shutil.copytree(windows.HOME / "wine", prefix, copy_function=os.link, symlinks=True)
    for registry in prefix.glob("*.reg"):
        text = registry.read_bytes()
        registry.unlink()
        registry.write_bytes(text)

    async def inside() -> None:
        for device in ("eth0", "hns0"):
            sh(f"ip link add {device} type bridge && ip link set {device} up")
        sh(f"ip address add {HOST}/24 dev eth0 && ip address add {HOST6}/64 dev eth0 nodad")
        sh("ip address add 172.20.0.1/16 dev hns0 && ip route add default dev eth0")
        async with netsh.serving(prefix / "drive_c") as answers:
            node = Node(folder, answers)
            try:
                await body(node)
            finally:
                server = Path(windows.wine()).with_name("wineserver64")
                for what in ("--kill", "--wait"):  # the first one fails if it has ended already
                    ending = await asyncio.create_subprocess_exec(
                        server, what, env=node.environment
                    )
                    await ending.wait()

    in_namespace(inside)
