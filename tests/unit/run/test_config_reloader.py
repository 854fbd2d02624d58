"""When a configuration file counts as changed: on the real file system."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from steersman.config import parse_command_line
from steersman.model.plan import Traits
from steersman.run.process import config_reloader
from steersman.run.process.config_reloader import ConfigReloader, file_changes
from steersman.source.store import Store


class Followed:
    """What was in the file whenever it was told to have changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.texts: list[str] = []
        self._news = asyncio.Event()

    async def follow(self) -> None:
        async for _ in file_changes(self.path):
            self.texts.append(self.path.read_text())
            self._news.set()

    async def until(self, text: str) -> None:
        async with asyncio.timeout(60):
            while text not in self.texts:
                await self._news.wait()
                self._news.clear()


@asynccontextmanager
async def followed(folder: Path) -> AsyncIterator[Followed]:
    path = folder / "config.yaml"
    path.write_text("mode: old\n")
    follower = Followed(path)
    task = asyncio.create_task(follower.follow())
    await follower.until("mode: old\n")  # it watches now
    follower.texts.clear()
    yield follower
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_file_that_is_written_in_parts_is_read_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_reloader, "_WRITER_SECONDS", 60.0)
    async with followed(tmp_path) as changes:
        with changes.path.open("w") as file:  # cut off
            for part in ("mode: new\n", "clusterCIDR: 10.0.0.0/8\n"):
                await turns()
                file.write(part)
                file.flush()
        await changes.until("mode: new\nclusterCIDR: 10.0.0.0/8\n")
        assert len(changes.texts) == 1


async def turns() -> None:
    """Give the follower every chance to look."""
    for _ in range(50):
        await asyncio.sleep(0.001)


async def test_a_file_that_stays_open_is_read_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_reloader, "_WRITER_SECONDS", 0.05)
    async with followed(tmp_path) as changes:
        with changes.path.open("a") as file:
            for text in ("one: 1\n", "two: 2\n"):
                file.write(text)
                file.flush()
                await changes.until(changes.path.read_text())


async def test_a_file_that_is_replaced_is_read_at_once(tmp_path: Path) -> None:
    async with followed(tmp_path) as changes:
        (tmp_path / "new").write_text("mode: new\n")
        os.replace(tmp_path / "new", changes.path)
        await changes.until("mode: new\n")
        assert changes.texts == ["mode: new\n"]


async def test_a_change_before_the_daemon_runs_is_applied(tmp_path: Path) -> None:
    """The process has read the file, and waits: another instance still holds the lock."""
    path = tmp_path / "config.yaml"
    head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
    path.write_text(head)
    parsed = parse_command_line([f"--config={path}"])
    path.write_text(head + "clusterCIDR: 10.0.0.0/8\n")
    reloader = ConfigReloader(parsed, Store(), Traits(), file_changes, lambda *_: None)
    async with asyncio.timeout(60):
        config = await anext(reloader.changes())
    assert config.cluster_cidr == "10.0.0.0/8"
