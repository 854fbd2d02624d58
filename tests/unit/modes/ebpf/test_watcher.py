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
from steersman.host.rtnetlink import Interface
from steersman.modes.ebpf import watcher
from steersman.modes.ebpf.counts import Expired
from steersman.modes.ebpf.datapath import Datapath
from steersman.modes.ebpf.devices import Change, Inventory
from steersman.modes.ebpf.flows import Collected
from steersman.modes.ebpf.nat_hooks import NatHookGuard
from steersman.modes.ebpf.watcher import DeviceWatcher

NOTHING_EXPIRED = Expired(0, Collected(0, 0))
NEW_DEVICE = Message(16, 0, 0, b"")
EMPTY = Inventory((), {})
NO_CHANGE = Change(EMPTY, EMPTY)
A_CHANGE = Change(EMPTY, Inventory((Interface(7, "veth7", 1, 0),), {}))


class Restless:
    """A Datapath, Subscription and NatHookGuard of a node whose devices change without end."""

    tables = object()

    def __init__(self) -> None:
        self.tracking = self
        self.looked = asyncio.Event()
        self.followed = 0
        self.fails: list[OSError] = []
        """What following devices ends with, the last one first."""
        self._loop = asyncio.get_running_loop()

    def device_changes(self) -> Restless:
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

    def device_change(self, _: Sequence[Message]) -> Change | None:
        return None

    def write_devices(self, _: Change | None = None) -> list[int]:
        self.followed += 1
        if self.fails:
            raise self.fails.pop()
        return []

    def prepare_expiry(self) -> Callable[[], Expired]:
        return lambda: NOTHING_EXPIRED

    def note_expired(self, expired: Expired) -> None:
        assert expired is NOTHING_EXPIRED
        self._loop.call_soon_threadsafe(self.looked.set)

    async def remove(self) -> None:
        """No hooks are held."""


async def test_old_connections_are_forgotten_where_devices_never_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watcher, "_COLLECT", 0.02)
    monkeypatch.setattr(watcher, "_SETTLE", 0.0)
    node = Restless()
    task = DeviceWatcher(cast(Datapath, node), cast(NatHookGuard, node), asyncio.Lock())
    task.ensure_running()
    try:
        async with asyncio.timeout(60):
            await node.looked.wait()
    finally:
        task.stop()
    assert node.followed


class Quiet(Restless):
    """A node whose devices do not change at all."""

    def device_change(self, _: Sequence[Message]) -> Change | None:
        return NO_CHANGE

    async def receive(self) -> list[Message]:
        await asyncio.Event().wait()
        return []


async def follows(node: Quiet, count: int) -> None:
    """Keep going until devices were followed so often."""
    task = DeviceWatcher(cast(Datapath, node), cast(NatHookGuard, node), asyncio.Lock())
    task.ensure_running()
    try:
        async with asyncio.timeout(60):
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
    monkeypatch.setattr(watcher, "_SETTLE", 0.0)
    monkeypatch.setattr(watcher, "_RETRY", 0.0)
    node = Quiet()
    node.fails = [DumpInterruptedError(errno.EINTR, "the list changed while it was read")] * 9
    await follows(node, 10)
    assert caplog.messages == []


async def test_devices_that_cannot_be_followed_are_tried_again_without_a_change(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watcher, "_SETTLE", 0.0)
    monkeypatch.setattr(watcher, "_RETRY", 0.0)
    node = Quiet()
    node.fails = [OSError(errno.ENOMEM, "no memory") for _ in range(3)]
    await follows(node, 4)
    assert caplog.messages == ["ebpf: [Errno 12] no memory; retrying"]


class Retiring(Quiet):
    """A node that another mode serves now; its table of connections is busy at first."""

    def __init__(self) -> None:
        super().__init__()
        self.held = 0

    def prepare_port_hold(self) -> Callable[[], None]:
        def hold() -> None:
            self.held += 1
            if self.held == 1:
                raise OSError(errno.ENOMEM, "no memory")

        return hold


async def test_ports_are_held_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watcher, "_COLLECT", 0.0)
    node = Retiring()
    task = DeviceWatcher(cast(Datapath, node), cast(NatHookGuard, node), asyncio.Lock())
    task.ensure_running()
    try:
        async with asyncio.timeout(60):
            await node.looked.wait()
            assert not node.held, "not before the mode is left"
            await task.hold_ports()
            while node.held < 3:  # noqa: ASYNC110 - it happens in a thread
                await asyncio.sleep(0)
    finally:
        task.stop()
    assert caplog.messages == ["ebpf: [Errno 12] no memory; retrying"]


class Growing(Quiet):
    """A node that gets one device, to which programs cannot be attached yet."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Change | None] = []
        self.attached: list[int] = []
        self.grown = asyncio.Event()
        self.attaching = asyncio.Event()
        self.possible = threading.Event()

    def device_change(self, news: Sequence[Message]) -> Change | None:
        return A_CHANGE if news else NO_CHANGE

    async def receive(self) -> list[Message]:
        await self.grown.wait()
        self.grown.clear()
        return [NEW_DEVICE]

    def write_devices(self, change: Change | None = None) -> list[int]:
        self.told.append(change)
        return [7] if change else []

    def attach_devices(self, numbers: Sequence[int]) -> None:
        self._loop.call_soon_threadsafe(self.attaching.set)
        self.possible.wait()
        self.attached += numbers


async def test_syncs_do_not_wait_for_programs_on_a_new_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watcher, "_SETTLE", 0.0)
    node, lock = Growing(), asyncio.Lock()
    task = DeviceWatcher(cast(Datapath, node), cast(NatHookGuard, node), lock)
    task.ensure_running()
    try:
        async with asyncio.timeout(60):
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
    assert node.told == [None, A_CHANGE]


class Crowded(Quiet):
    """A node with so many connections that to look at them takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.looking = asyncio.Event()
        self.ends = threading.Event()

    def prepare_expiry(self) -> Callable[[], Expired]:
        def expire() -> Expired:
            self._loop.call_soon_threadsafe(self.looking.set)
            self.ends.wait()
            return NOTHING_EXPIRED

        return expire


async def test_syncs_do_not_wait_while_connections_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watcher, "_COLLECT", 0.0)
    node, lock = Crowded(), asyncio.Lock()
    task = DeviceWatcher(cast(Datapath, node), cast(NatHookGuard, node), lock)
    task.ensure_running()
    try:
        async with asyncio.timeout(60):
            await node.looking.wait()
            async with lock:  # as a sync does
                assert not node.looked.is_set()
            node.ends.set()
            await node.looked.wait()
    finally:
        node.ends.set()
        task.stop()
