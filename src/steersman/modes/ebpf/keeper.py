"""What goes on between syncs: devices are followed, old connections forgotten."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence

from steersman.host.netlink import AnswersLostError, DumpInterruptedError, Subscription
from steersman.host.nlmsg import Message
from steersman.modes.ebpf.engine import Engine
from steersman.modes.ebpf.follow import Concern
from steersman.modes.ebpf.hold import Hold
from steersman.modes.ebpf.tracking import Expired

_SETTLE = 0.02  # seconds; a new device makes several notifications
_COLLECT = 30.0  # seconds between two looks for connections that are over
_RETRY = 1.0  # seconds after which work that failed is tried again
_ATTEMPTS = 5  # at once, when a list changes while the kernel sends it
log = logging.getLogger("steersman.ebpf")


class Keeper:
    """A task on the loop that applies Diffs, for as long as that runs."""

    def __init__(self, engine: Engine, hold: Hold, lock: asyncio.Lock) -> None:
        """Make it without a task; `lock` keeps it apart from syncs."""
        self._engine = engine
        self._hold = hold
        self._lock = lock
        self._task: asyncio.Task[None] | None = None
        self._failure = ""
        """What was logged last; the same failure is not logged again."""

    def keep_going(self) -> None:
        """Have the task run; another loop gets another one."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._keep(), name="ebpf devices and connections")

    def stop(self) -> None:
        """End the task."""
        if self._task and not self._task.get_loop().is_closed():
            self._task.cancel()
        self._task = None

    async def _keep(self) -> None:
        clock = asyncio.get_running_loop().time
        with self._engine.news() as subscription:
            collect, follow = clock() + _COLLECT, clock()  # for what came before we listened
            while self._engine.tables is not None:
                news = await _news(subscription, min(collect, follow))
                concern = Concern.LIST if news is None else self._engine.concern(news)
                if concern is Concern.LIST or clock() >= follow:
                    done = await self._follow(None)
                    follow = math.inf if done else clock() + _RETRY
                elif concern is Concern.CHANGE and not await self._follow(news):
                    follow = clock() + _RETRY
                if clock() >= collect:
                    await self._collect()
                    await self._hold.let_go()
                    collect = clock() + _COLLECT

    async def _follow(self, news: Sequence[Message] | None) -> bool:
        """Follow devices; False if that failed. Syncs do not wait for programs on new devices."""
        fresh: list[int] = []
        work = lambda: fresh.extend(self._engine.follow_devices(news))  # noqa: E731
        if not await self._do(work, at_once=news is not None):
            return False
        if not fresh:
            return True
        return await self._tried(lambda: asyncio.to_thread(self._engine.attach_devices, fresh))

    async def _collect(self) -> None:
        """Forget old connections; syncs do not wait while all are looked at."""
        expired: list[Expired] = []

        async def expire() -> None:
            async with self._lock:
                tracking = self._engine.tracking
                work = tracking.expiring() if tracking else None
            if work:
                expired.append(await asyncio.to_thread(work))

        def count() -> None:
            if self._engine.tracking:
                self._engine.tracking.collect(expired[0])

        if await self._tried(expire) and expired:
            await self._do(count)

    async def _do(self, work: Callable[[], object], *, at_once: bool = False) -> bool:
        """Do something while no sync runs, in a thread unless `at_once`; False if it failed."""

        async def alone() -> None:
            async with self._lock:
                if self._engine.tables is None:
                    return
                if at_once:
                    work()
                else:
                    await asyncio.to_thread(_uninterrupted, work)

        return await self._tried(alone)

    async def _tried(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Do something; False, and a line in the log, if it failed."""
        try:
            await work()
        except DumpInterruptedError as error:
            log.debug("ebpf: %s %d times; retrying in %gs", error, _ATTEMPTS, _RETRY)
            return False
        except OSError as error:
            if str(error) != self._failure:
                log.warning("ebpf: %s; retrying", error)
            self._failure = str(error)
            return False
        self._failure = ""
        return True


def _uninterrupted(work: Callable[[], object]) -> None:
    """Do something again at once if a list changed while it was read."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            work()
        except DumpInterruptedError as error:
            log.debug("ebpf: %s; retrying at once", error)
            if attempt == _ATTEMPTS:
                raise
        else:
            return


async def _news(subscription: Subscription, until: float) -> list[Message] | None:
    """Wait for changes of devices; none if there are none until then, None if some were lost."""
    try:
        async with asyncio.timeout_at(until):
            news = await subscription.receive()
        await asyncio.sleep(_SETTLE)
        return news + subscription.waiting()
    except AnswersLostError:
        return None
    except TimeoutError:
        return []
