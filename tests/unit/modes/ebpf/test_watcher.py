"""What the ebpf mode does between syncs, whatever else goes on."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest

from steersman.host.netlink import AnswersLostError, DumpInterruptedError
from steersman.host.nlmsg import Message
from steersman.host.worker import KernelWorker
from steersman.modes.ebpf import watcher
from steersman.modes.ebpf.datapath import Datapath
from steersman.modes.ebpf.nat_hooks import NatHookGuard
from steersman.modes.ebpf.watcher import DeviceWatcher

NEW_DEVICE = Message(16, 0, 0, b"")


class Node:
    """A Datapath, Subscription and NatHookGuard of a node; a byte is a notification."""

    tables: object = object()

    def __init__(self) -> None:
        self.looked = asyncio.Event()
        self.followed = 0
        self.subscribed = 0
        self.fails: list[Exception] = []
        """What following devices ends with, the last one first."""
        self.told: list[Sequence[Message] | None] = []
        self.attached: list[int] = []
        self.lost = False
        self._ours, self._kernel = socket.socketpair()
        self._ours.setblocking(False)
        self._kernel.setblocking(False)
        self._loop = asyncio.get_running_loop()

    def notify(self) -> None:
        with suppress(BlockingIOError):  # enough of them wait
            self._kernel.send(b"!")

    def device_changes(self) -> Node:
        self.subscribed += 1
        return self

    def close(self) -> None:
        """Stay open for the next subscription."""

    def end(self) -> None:
        self._ours.close()
        self._kernel.close()

    def fileno(self) -> int:
        return self._ours.fileno()

    def waiting(self) -> list[Message]:
        try:
            self._ours.recv(1 << 16)
        except BlockingIOError:
            return []
        if self.lost:
            self.lost = False
            raise AnswersLostError(errno.ENOBUFS, "lost")
        return [NEW_DEVICE]

    def write_devices(self, news: Sequence[Message] | None = None) -> list[int]:
        self.followed += 1
        if self.fails:
            raise self.fails.pop()
        self.told.append(news)
        return [7] if news else []

    def attach_devices(self, numbers: Iterable[int]) -> Generator[None, None, None]:
        self.attached += numbers
        yield

    def while_open(self, work: Callable[[Any], Any]) -> Any:
        return work(self)

    def expire(self) -> Generator[None, None, None]:
        yield
        self._loop.call_soon_threadsafe(self.looked.set)

    def remove(self) -> None:
        """No hooks are held."""


@asynccontextmanager
async def watching(node: Node) -> AsyncIterator[tuple[DeviceWatcher, KernelWorker]]:
    worker = KernelWorker()
    made = DeviceWatcher(cast(Datapath, node), cast(NatHookGuard, node))
    await worker.do(worker.keep, made.run())
    try:
        async with asyncio.timeout(60):
            yield made, worker
    finally:
        await worker.close()
        assert not made.running
        node.end()


async def until(true: Callable[[], object]) -> None:
    while not true():  # noqa: ASYNC110 - it happens in a thread
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "_SETTLE", 0.0)
    monkeypatch.setattr(watcher, "_RETRY", 0.0)


async def test_old_connections_are_forgotten_where_devices_never_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watcher, "_COLLECT", 0.02)
    node = Node()
    async with watching(node):
        while not (node.looked.is_set() and node.followed > 1):
            node.notify()
            await asyncio.sleep(0)


async def test_a_list_that_changes_while_it_is_read_is_read_again_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    node = Node()
    node.fails = [DumpInterruptedError(errno.EINTR, "the list changed while it was read")] * 9
    async with watching(node):
        await until(lambda: node.told)
    assert node.followed == 10
    assert caplog.messages == []


async def test_devices_that_cannot_be_followed_are_tried_again_without_a_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = Node()
    node.fails = [OSError(errno.ENOMEM, "no memory") for _ in range(3)]
    async with watching(node):
        await until(lambda: node.told)
    assert node.told == [None]
    assert caplog.messages == ["ebpf: [Errno 12] no memory; retrying"]


async def test_a_change_that_cannot_be_carried_out_makes_all_be_listed() -> None:
    node = Node()
    async with watching(node):
        await until(lambda: node.told)
        node.fails = [OSError(errno.ENOMEM, "no memory")]
        node.notify()
        await until(lambda: len(node.told) == 2)
    assert node.told == [None, None]


async def test_lost_notifications_make_all_be_listed() -> None:
    node = Node()
    async with watching(node):
        await until(lambda: node.told)
        node.lost = True
        node.notify()
        await until(lambda: len(node.told) == 2)
    assert node.told == [None, None]


async def test_a_notification_that_comes_while_connections_are_looked_at_is_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watcher, "_COLLECT", 0.05)

    class Busy(Node):
        def expire(self) -> Generator[None, None, None]:
            if not self.looked.is_set():
                self.notify()
            return super().expire()

    node = Busy()
    async with watching(node):
        await until(lambda: node.attached)
    assert node.attached == [7]


async def test_it_ends_when_everything_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    async with watching(node) as (task, _):
        await until(lambda: node.told)
        node.tables = None
        node.notify()
        await until(lambda: not task.running)
    assert node.told == [None], "nothing is opened again"


async def test_a_watch_that_ends_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    node.fails = [ValueError("a defect")]
    async with watching(node):
        await until(lambda: node.told)
    assert node.subscribed == 2
    assert caplog.messages == ["ebpf: a defect; retrying"]


async def test_ports_are_held_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The table of connections is busy at first."""
    monkeypatch.setattr(watcher, "_COLLECT", 0.0)
    held = 0

    class Retiring(Node):
        def hold_ports(self) -> Generator[None, None, None]:
            nonlocal held
            held += 1
            if held == 1:
                raise OSError(errno.ENOMEM, "no memory")
            yield

    node = Retiring()
    async with watching(node) as (task, worker):
        await node.looked.wait()
        assert not held, "not before the mode is left"
        await worker.do(task.hold_ports)
        await until(lambda: held >= 3)
    assert caplog.messages == ["ebpf: [Errno 12] no memory; retrying"]


async def test_syncs_do_not_wait_for_programs_on_new_devices() -> None:
    attaching, possible = threading.Event(), threading.Event()

    class Growing(Node):
        def attach_devices(self, numbers: Iterable[int]) -> Generator[None, None, None]:
            attaching.set()
            while not possible.is_set():  # a device in each step
                yield
            self.attached += numbers

    node = Growing()
    async with watching(node) as (_, worker):
        await until(lambda: node.told)
        node.notify()
        await until(attaching.is_set)
        assert not await worker.do(lambda: node.attached), "as a sync does"
        possible.set()
        await until(lambda: node.attached)
    assert node.told == [None, [NEW_DEVICE]]


async def test_syncs_do_not_wait_while_connections_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watcher, "_COLLECT", 0.0)
    looking, ends = threading.Event(), threading.Event()

    class Crowded(Node):
        def expire(self) -> Generator[None, None, None]:
            looking.set()
            while not ends.is_set():
                yield
            self._loop.call_soon_threadsafe(self.looked.set)

    node = Crowded()
    async with watching(node) as (_, worker):
        await until(looking.is_set)
        assert not await worker.do(node.looked.is_set), "as a sync does"
        ends.set()
        await node.looked.wait()
