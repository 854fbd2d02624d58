"""What the ebpf mode does between syncs, whatever else goes on."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from steersman.host.netlink import DumpInterruptedError
from steersman.host.nlmsg import Message
from steersman.modes.ebpf import keeper
from steersman.modes.ebpf.engine import Engine
from steersman.modes.ebpf.flows import Looked
from steersman.modes.ebpf.follow import Concern
from steersman.modes.ebpf.hold import Hold
from steersman.modes.ebpf.keeper import Keeper
from steersman.modes.ebpf.tracking import Expired

NOTHING_EXPIRED = Expired(0, Looked(0, 0))
NEW_DEVICE = Message(16, 0, 0, b"")


class Restless:
    """A node whose devices change without end, as the mode sees it: Engine, Subscription, Hold."""

    tables = object()

    def __init__(self) -> None:
        self.tracking = self
        self.looked = asyncio.Event()
        self.followed = 0
        self.fails: list[OSError] = []
        """What following devices ends with, the last one first."""
        self._loop = asyncio.get_running_loop()

    def news(self) -> Restless:
        return self

    def __enter__(self) -> Restless:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    async def receive(self) -> list[Message]:
        await asyncio.sleep(0)
        return []

    def waiting(self) -> list[Message]:
        return []

    def concern(self, _: Sequence[Message]) -> Concern:
        return Concern.LIST

    def follow_devices(self, _: Sequence[Message] | None) -> list[int]:
        self.followed += 1
        if self.fails:
            raise self.fails.pop()
        return []

    def expiring(self) -> Callable[[], Expired]:
        return lambda: NOTHING_EXPIRED

    def collect(self, expired: Expired) -> None:
        assert expired is NOTHING_EXPIRED
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


class Quiet(Restless):
    """A node whose devices do not change at all."""

    def concern(self, _: Sequence[Message]) -> Concern:
        return Concern.NOTHING

    async def receive(self) -> list[Message]:
        await asyncio.Event().wait()
        return []


async def follows(node: Quiet, count: int) -> None:
    """Keep going until devices were followed so often."""
    task = Keeper(cast(Engine, node), cast(Hold, node), asyncio.Lock())
    task.keep_going()
    try:
        async with asyncio.timeout(5):
            while node.followed < count:  # noqa: ASYNC110 - it happens in a thread
                await asyncio.sleep(0)
            while node.fails or task._failure:  # noqa: ASYNC110
                await asyncio.sleep(0)
    finally:
        task.stop()


async def test_a_list_that_changes_while_it_is_read_is_read_again_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(keeper, "_SETTLE", 0.0)
    monkeypatch.setattr(keeper, "_RETRY", 0.0)
    node = Quiet()
    node.fails = [DumpInterruptedError(errno.EINTR, "the list changed while it was read")] * 9
    await follows(node, 10)
    assert caplog.messages == []


async def test_devices_that_cannot_be_followed_are_tried_again_without_a_change(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper, "_SETTLE", 0.0)
    monkeypatch.setattr(keeper, "_RETRY", 0.0)
    node = Quiet()
    node.fails = [OSError(errno.ENOMEM, "no memory") for _ in range(3)]
    await follows(node, 4)
    assert caplog.messages == ["ebpf: [Errno 12] no memory; retrying"]


class Growing(Quiet):
    """A node that gets one device, to which programs cannot be attached yet."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Sequence[Message] | None] = []
        self.attached: list[int] = []
        self.grown = asyncio.Event()
        self.attaching = asyncio.Event()
        self.possible = threading.Event()

    def concern(self, news: Sequence[Message]) -> Concern:
        return Concern.CHANGE if news else Concern.NOTHING

    async def receive(self) -> list[Message]:
        await self.grown.wait()
        self.grown.clear()
        return [NEW_DEVICE]

    def follow_devices(self, news: Sequence[Message] | None) -> list[int]:
        self.told.append(news)
        return [7] if news else []

    def attach_devices(self, numbers: Sequence[int]) -> None:
        self._loop.call_soon_threadsafe(self.attaching.set)
        self.possible.wait()
        self.attached += numbers


async def test_syncs_do_not_wait_for_programs_on_a_new_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper, "_SETTLE", 0.0)
    node, lock = Growing(), asyncio.Lock()
    task = Keeper(cast(Engine, node), cast(Hold, node), lock)
    task.keep_going()
    try:
        async with asyncio.timeout(5):
            while not node.told:  # noqa: ASYNC110 - it happens in a thread
                await asyncio.sleep(0)
            node.grown.set()
            await node.attaching.wait()
            async with lock:  # as a sync does
                assert not node.attached
            node.possible.set()
            while not node.attached:  # noqa: ASYNC110 - it happens in a thread
                await asyncio.sleep(0)
    finally:
        node.possible.set()
        task.stop()
    assert node.attached == [7]
    assert node.told == [None, [NEW_DEVICE]]


class Crowded(Quiet):
    """A node with so many connections that to look at them takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.looking = asyncio.Event()
        self.ends = threading.Event()

    def expiring(self) -> Callable[[], Expired]:
        def expire() -> Expired:
            self._loop.call_soon_threadsafe(self.looking.set)
            self.ends.wait()
            return NOTHING_EXPIRED

        return expire


async def test_syncs_do_not_wait_while_connections_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper, "_COLLECT", 0.0)
    node, lock = Crowded(), asyncio.Lock()
    task = Keeper(cast(Engine, node), cast(Hold, node), lock)
    task.keep_going()
    try:
        async with asyncio.timeout(5):
            await node.looking.wait()
            async with lock:  # as a sync does
                assert not node.looked.is_set()
            node.ends.set()
            await node.looked.wait()
    finally:
        node.ends.set()
        task.stop()
