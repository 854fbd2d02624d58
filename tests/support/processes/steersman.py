"""Run steersman as a process on a directory of manifests, and read its rules and pages."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.support.apiserver.reading import service, slice_
from tests.support.lab.namespace import sh
from tests.support.modes.iptables_rules import without_comments
from tests.support.waiting import until

NODE = "node-a"


FLAGS = (
    f"--hostname-override={NODE}",
    "--cluster-cidr=10.244.0.0/16",
    "--conntrack-max-per-core=0",
    "--iptables-min-sync-period=0s",
)


class Process:
    """A running steersman."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(60):
            return await self.process.wait()

    async def said(self, text: str, seconds: float = 60.0) -> None:
        async def has_said() -> bool:
            assert self.process.returncode is None or text in self.log, self.log
            return text in self.log

        try:
            await until(has_said, seconds)
        except TimeoutError as error:
            raise AssertionError(f"{text!r} is not in the log:\n{self.log}") from error


async def command(*words: str, through: Sequence[str] = ()) -> tuple[int, str, str]:
    argv = [*through, sys.executable, "-m", "steersman", *words]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


@asynccontextmanager
async def steersman(
    tmp: Path, *flags: str, name: str = "log", through: Sequence[str] = ()
) -> AsyncIterator[Process]:
    """The process, started `through` a command that changes what it may do."""
    log = tmp / name
    words = [*through, sys.executable, "-m", "steersman", "run", *FLAGS, *flags]
    with log.open("w") as file:
        process = await asyncio.create_subprocess_exec(*words, stdout=file, stderr=file)
    running = Process(process, log)
    try:
        yield running
    finally:
        await running.stop(signal.SIGKILL)


async def get(path: str, port: int = 10249) -> tuple[int, str, Mapping[str, str]]:
    url = f"http://127.0.0.1:{port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text(), answer.headers


async def answers(path: str, port: int = 10249, status: int = 200) -> None:
    async def does() -> bool:
        try:
            return (await get(path, port))[0] == status
        except aiohttp.ClientError:
            return False

    await until(does)


def manifests(folder: Path, *objects: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    new = folder / ".new"
    versions = {"EndpointSlice": "discovery.k8s.io/v1"}
    new.write_text(
        yaml.safe_dump_all([{"apiVersion": versions.get(o["kind"], "v1"), **o} for o in objects])
    )
    new.replace(folder / "world.yaml")
    return folder


def rules(table: str = "nat") -> str:
    return without_comments(sh(f"iptables-save -t {table}"))


def world(*addresses: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return service("web"), slice_("web-1", "web", *(addresses or ("10.244.0.5",)))


async def in_rules(text: str) -> bool:
    return text in rules()


async def not_in_rules(text: str) -> bool:
    return text not in rules()


AT_ONCE = 10.0
"""Seconds; a process under load may need more than the 2 s that are promised."""


async def ended(process: Process) -> int:
    async with asyncio.timeout(AT_ONCE):
        return await process.process.wait()


NOBODY = (
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
)
"""Somebody without rights but to read files: ours may be where others cannot look."""


HAS_IPVS = Path("/proc/net/ip_vs").exists() or Path("/sys/module/ip_vs").exists()
