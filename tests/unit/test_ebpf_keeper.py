"""What the ebpf mode does between syncs, whatever else goes on."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from steersman.modes.ebpf import keeper
from steersman.modes.ebpf.engine import Engine
from steersman.modes.ebpf.hold import Hold
from steersman.modes.ebpf.keeper import Keeper


class Restless:
    """A node whose devices change without end, as the mode sees it: Engine, Subscription, Hold."""

    tables = object()

    def __init__(self) -> None:
        self.tracking = self
        self.looked = asyncio.Event()
        self.followed = 0
        self._loop = asyncio.get_running_loop()

    def news(self) -> Restless:
        return self

    def __enter__(self) -> Restless:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    async def receive(self) -> None:
        await asyncio.sleep(0)

    def follow_devices(self) -> None:
        self.followed += 1

    def collect(self) -> None:
        self._loop.call_soon_threadsafe(self.looked.set)

    async def let_go(self) -> None:
        """Nothing is held."""


async def test_old_connections_are_forgotten_where_devices_never_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper, "_COLLECT", 0.02)
    monkeypatch.setattr(keeper, "_SETTLE", 0.0)
    node = Restless()
    task = Keeper(cast(Engine, node), cast(Hold, node), asyncio.Lock())
    task.keep_going()
    try:
        async with asyncio.timeout(5):
            await node.looked.wait()
    finally:
        task.stop()
    assert node.followed
