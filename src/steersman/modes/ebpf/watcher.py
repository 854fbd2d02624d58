"""Work between syncs: devices that come and go, connections that end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable

from steersman.host.netlink import AnswersLostError, DumpInterruptedError, Subscription
from steersman.host.nlmsg import Message
from steersman.host.threads import to_thread_to_end
from steersman.modes.ebpf.counts import Expired
from steersman.modes.ebpf.datapath import Datapath
from steersman.modes.ebpf.devices import Change
from steersman.modes.ebpf.nat_hooks import NatHookGuard

log = logging.getLogger("steersman.ebpf")
_SETTLE = 0.02  # seconds; a new device brings several notifications
_COLLECT = 30.0  # seconds between two passes over all connections
_RETRY = 1.0  # seconds before failed work is repeated
_ATTEMPTS = 5  # at once, if a list changes while the kernel sends it


class DeviceWatcher:
    """A task on the event loop that applies Diffs, as long as that loop runs."""

    def __init__(self, datapath: Datapath, guard: NatHookGuard, lock: asyncio.Lock) -> None:
        """Start no task yet; `lock` excludes syncs."""
        self._datapath = datapath
        self._guard = guard
        self._lock = lock
        self._task: asyncio.Task[None] | None = None
        # The last failure that was logged; the same one is not logged again.
        self._failure = ""
        self._holds_ports = False

    def ensure_running(self) -> None:
        """Start the task unless it runs on this event loop."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._watch(), name="ebpf devices and connections")

    def stop(self) -> None:
        """Cancel the task."""
        if self._task and not self._task.get_loop().is_closed():
            self._task.cancel()
        self._task = None

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        with self._datapath.device_changes() as subscription:
            collect_at = clock() + _COLLECT
            list_at = clock()  # devices may have come before we subscribed
            while self._datapath.tables is not None:
                change = await self._next_change(subscription, min(collect_at, list_at))
                # Messages were lost, the first pass, or a failure to repeat: list everything.
                if change is None or clock() >= list_at:
                    done = await self._update_devices(None)
                    list_at = math.inf if done else clock() + _RETRY
                elif change.before != change.after and not await self._update_devices(change):
                    list_at = clock() + _RETRY
                # Every 30 s, however restless the devices are.
                if clock() >= collect_at:
                    await self._collect()
                    await self._guard.remove()
                    if self._holds_ports:
                        await self.hold_ports()
                    collect_at = clock() + _COLLECT

    async def hold_ports(self) -> None:
        """Keep netfilter from choosing the ports of masqueraded connections, from now on."""
        self._holds_ports = True

        async def hold() -> None:
            async with self._lock:
                work = self._datapath.prepare_port_hold()
            await asyncio.to_thread(work)  # 14 us for each connection

        await self._try(hold)

    async def _next_change(self, subscription: Subscription, until: float) -> Change | None:
        """Wait for a change of devices, until a deadline; None if all must be listed."""
        try:
            news: list[Message] = []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    news = await subscription.receive()
            change = self._datapath.device_change(news)
            # A new device brings several messages: wait for the rest of them.
            if change and change.before != change.after:
                await asyncio.sleep(_SETTLE)
                if more := subscription.waiting():
                    change = self._datapath.device_change([*news, *more])
        except AnswersLostError:
            return None
        return change

    async def _update_devices(self, change: Change | None) -> bool:
        """Write a change, or everything; then attach programs, while syncs may go on."""
        fresh: list[int] = []
        work = lambda: fresh.extend(self._datapath.write_devices(change))  # noqa: E731
        if not await self._run_alone(work, inline=change is not None):
            return False
        if not fresh:
            return True
        return await self._try(lambda: to_thread_to_end(self._datapath.attach_devices, fresh))

    async def _collect(self) -> None:
        """Delete expired connections; syncs may go on during the pass over all of them."""
        expired: list[Expired] = []

        async def expire() -> None:
            async with self._lock:
                tracking = self._datapath.tracking
                work = tracking.prepare_expiry() if tracking else None
            if work:
                expired.append(await asyncio.to_thread(work))

        def note() -> None:
            if self._datapath.tracking:
                self._datapath.tracking.note_expired(expired[0])

        if await self._try(expire) and expired:
            await self._run_alone(note)

    async def _run_alone(self, work: Callable[[], object], *, inline: bool = False) -> bool:
        """Do something while no sync runs, in a thread unless `inline`; False if it failed."""

        def until_consistent() -> None:
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    work()
                except DumpInterruptedError as error:
                    log.debug("ebpf: %s; retrying at once", error)
                    if attempt == _ATTEMPTS:
                        raise
                else:
                    return

        async def locked() -> None:
            async with self._lock:
                if self._datapath.tables is None:
                    return
                if inline:
                    work()
                else:
                    await to_thread_to_end(until_consistent)

        return await self._try(locked)

    async def _try(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Do something; log a failure and return False."""
        try:
            await work()
        except DumpInterruptedError as error:
            log.debug("ebpf: %s (%d times); retrying in %gs", error, _ATTEMPTS, _RETRY)
            return False
        except OSError as error:
            if str(error) != self._failure:
                log.warning("ebpf: %s; retrying", error)
            self._failure = str(error)
            return False
        self._failure = ""
        return True
