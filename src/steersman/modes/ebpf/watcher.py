"""Work between syncs: devices that come and go, connections that end."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar

from steersman.host.netlink import AnswersLostError, DumpInterruptedError, Subscription
from steersman.host.nlmsg import Message
from steersman.host.worker import Changes, KernelWorker
from steersman.model.errors import BusyError
from steersman.modes.ebpf.counts import Tracking
from steersman.modes.ebpf.datapath import Datapath
from steersman.modes.ebpf.nat_hooks import NatHookGuard

T = TypeVar("T")
log = logging.getLogger("steersman.ebpf")
_SETTLE = 0.02  # seconds; a new device brings several notifications
_COLLECT = 30.0  # seconds between two passes over all connections
_RETRY = 1.0  # seconds before failed work is repeated
_ATTEMPTS = 5  # at once, if a list changes while the kernel sends it


class DeviceWatcher:
    """A task on the event loop that applies Diffs, as long as that loop runs.

    What touches the kernel runs in the worker's thread, which also reads the notifications: those
    that have arrived stay here until they are carried out, whatever is cancelled meanwhile.
    """

    def __init__(self, datapath: Datapath, guard: NatHookGuard, worker: KernelWorker) -> None:
        """Start no task yet."""
        self._datapath = datapath
        self._guard = guard
        self._worker = worker
        self._task: asyncio.Task[None] | None = None
        self._subscription: Subscription | None = None
        self._news: list[Message] = []
        """Notifications to carry out."""
        self._lists_all = True
        """Whether to list all devices instead: at first, after a failure or lost notifications."""
        self._failure = ""
        """The last failure that was logged; the same one is not logged again."""
        self._holds_ports = False

    def ensure_running(self) -> None:
        """Start the task unless it runs on this event loop."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._run(), name="ebpf devices and connections")

    async def stop(self) -> None:
        """Cancel the task, and wait for its end."""
        task, self._task = self._task, None
        if task and not task.get_loop().is_closed():
            task.cancel()
            if task.get_loop() is asyncio.get_running_loop():
                await asyncio.wait([task])

    async def _run(self) -> None:
        """Watch until everything is removed, whatever goes wrong."""
        while self._datapath.tables is not None:
            try:
                await self._watch()
            except Exception as error:
                self._log(error)
                await asyncio.sleep(_RETRY)

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        try:
            await self._worker.do(self._subscribe)
            self._lists_all = True  # devices may have come before we subscribed
            collect_at, retry_at = clock() + _COLLECT, -math.inf
            while self._datapath.tables is not None:
                # An answer that is due is not waited for, but neither hurried.
                until = min(collect_at, retry_at) if self._lists_all else collect_at
                if not self._news and clock() < until:
                    await self._wait(until)
                if (self._news or self._lists_all) and clock() >= retry_at:
                    done = await self._try(self._update_devices())
                    retry_at = -math.inf if done else clock() + _RETRY
                    self._lists_all |= not done
                # Every 30 s, however restless the devices are.
                if clock() >= collect_at:
                    await self._try(self._slowly(lambda tracking: tracking.expire()))
                    await self._guard.remove()
                    if self._holds_ports:
                        await self.hold_ports()
                    collect_at = clock() + _COLLECT
        finally:
            await self._worker.do(self._unsubscribe)

    def _subscribe(self) -> None:
        self._subscription = self._datapath.device_changes()

    def _unsubscribe(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
        self._subscription = None

    async def _wait(self, until: float) -> None:
        """Wait for a notification, until a deadline."""
        assert self._subscription is not None
        changes = Changes(self._subscription.fileno(), self._take)
        try:
            async with asyncio.timeout_at(until):
                await self._worker.wait_for(changes)
                # A new device brings several messages: wait for the rest of them.
                await asyncio.sleep(_SETTLE)
        except TimeoutError:
            pass

    def _take(self) -> bool:
        """Take the notifications that have arrived; return whether there is something to do."""
        assert self._subscription is not None
        try:
            self._news += self._subscription.waiting()
        except AnswersLostError:
            self._lists_all = True
        return bool(self._news) or self._lists_all

    async def _update_devices(self) -> None:
        """Carry out notifications, or list all devices; attach programs while syncs may go on."""

        def write() -> list[int]:
            self._take()
            news, self._news = self._news, []
            change = None if self._lists_all else self._datapath.device_change(news)
            if change is not None and change.before == change.after:
                return []
            fresh = until_consistent(lambda: self._datapath.write_devices(change))
            self._lists_all = False
            return fresh

        if fresh := await self._worker.do(write):
            await self._worker.do_slowly(self._datapath.attach_devices(fresh))

    async def hold_ports(self) -> None:
        """Keep netfilter from choosing the ports of masqueraded connections, from now on."""
        self._holds_ports = True
        await self._try(self._slowly(lambda _: self._datapath.hold_ports()))

    async def _slowly(self, work: Callable[[Tracking], Generator[None, None, T]]) -> None:
        await self._worker.do_slowly(self._datapath.while_open(work))

    async def _try(self, work: Awaitable[None]) -> bool:
        """Do something; log a failure and return False."""
        try:
            await work
        except DumpInterruptedError as error:
            log.debug("ebpf: %s (%d times); retrying in %gs", error, _ATTEMPTS, _RETRY)
            return False
        except (OSError, BusyError) as error:
            self._log(error)
            return False
        self._failure = ""
        return True

    def _log(self, error: Exception) -> None:
        if str(error) != self._failure:
            expected = isinstance(error, OSError | BusyError)
            log.warning("ebpf: %s; retrying", error, exc_info=None if expected else error)
        self._failure = str(error)


def until_consistent(work: Callable[[], T]) -> T:
    """Repeat what lists something as long as the list changes while the kernel sends it."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return work()
        except DumpInterruptedError as error:
            log.debug("ebpf: %s; retrying at once", error)
    return work()
