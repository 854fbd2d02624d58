"""One thread that touches the kernel on behalf of the event loop.

Theory. Netlink sockets, bpf maps and programs block for as long as somebody else holds the kernel's
locks, and two callers must not use one of them at the same time. So each mode has a KernelWorker,
and every call of it that touches the kernel runs in that thread. A job is a generator:

    do          returns at once      one call after the other: writes, and what a sync waits for
    do_slowly   yields None          one step at a time while no call waits: scrapes, long lists
                yields a Pause       goes on when its descriptor is readable, between two calls
    keep        yields both          work of the mode's own that nobody waits for

A step that would wait long in the kernel without using what calls use runs `apart`, in a thread of
its own. The worker's thread sleeps until something is due. It ends what it has begun, as a system
call cannot be cancelled, and a cancelled caller waits for that end. (A program that hangs is
killed: exec.py.) So once no task is left, nothing is written any more, and nobody uses a descriptor
that is about to be closed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from steersman.host.exec import caller
from steersman.host.threads import DaemonThreads

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)

_INLINE = 1000
"""Values up to which a computation on them is not worth a thread."""


class Pause(NamedTuple):
    """What a job waits for: that something can be read, or that a time has come."""

    fd: int = -1
    """A descriptor; -1 for none."""
    until: float = math.inf
    """By `time.monotonic`."""


def finish(steps: Generator[object, None, T]) -> T:
    """Do all steps of a generator in the calling thread; return its value."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def measured(steps: Generator[None, None, T]) -> Generator[None, None, tuple[T, float]]:
    """Do the steps of a generator; return its value, and the CPU seconds that they took."""
    seconds = 0.0
    while True:
        began = time.thread_time()
        try:
            next(steps)
        except StopIteration as end:
            return end.value, seconds + time.thread_time() - began
        seconds += time.thread_time() - began
        yield


def apart(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Generator[Pause, None, T]:
    """Call a function in a thread of its own, so that calls do not wait while the kernel waits.

    It must not use what calls use, unless it holds a lock. The thread is in the worker's network
    namespace. Whoever closes the generator waits for the end of the function.

    Raises:
        OSError: no thread can be started, and whatever the function raises.
    """
    ended, ending = socket.socketpair()
    with ended, ending:
        try:
            future = DaemonThreads().submit(call, *args, **kwargs)
        except RuntimeError as error:
            raise OSError(f"no thread can be started: {error}") from error
        future.add_done_callback(lambda _: ending.send(b"!"))
        try:
            yield Pause(ended.fileno())
        finally:
            ended.recv(1)
    return future.result()


class Changes(NamedTuple):
    """A descriptor that becomes readable when others may have changed something."""

    fd: int
    judge: Callable[[], bool]
    """Read what has arrived, without blocking; return whether it concerns the one who waits."""


class _Job(Generic[T]):
    """A generator that runs in the thread."""

    def __init__(self, steps: Generator[Pause | None, None, T]) -> None:
        self.steps = steps
        self.begun = False
        self.cancelled = False
        self.result: T
        self.error: BaseException | None = None

    def end(self) -> None:
        """Report the end, in the thread; here nobody waits for it."""
        if self.error is not None:
            log.error("work beside the calls of a mode has ended", exc_info=self.error)


class _Awaited(_Job[T]):
    """A job whose end a task waits for."""

    def __init__(self, steps: Generator[Pause | None, None, T]) -> None:
        super().__init__(steps)
        self.loop = asyncio.get_running_loop()
        self.ended = False
        self._waiter: asyncio.Future[None] | None = None

    def end(self) -> None:
        """Wake the task."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._has_ended)

    def _has_ended(self) -> None:
        self.ended = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait for the end; after a cancellation the wait can begin again."""
        if not self.ended:
            # A future for each wait: with asyncio.shield the loop turns once more for each call.
            self._waiter = self.loop.create_future()
            await self._waiter


class KernelWorker:
    """A thread that the first job starts, and `close` ends."""

    def __init__(self, netns: Path | None = None) -> None:
        """Create it without a thread.

        Args:
            netns: a network namespace for the thread, and so for what it opens and runs; None for
                that of the process.
        """
        self._netns = netns
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        """Held while a job begins or is dropped."""
        self._calls: deque[_Job[Any]] = deque()
        self._slow: deque[_Job[Any]] = deque()
        self._waiting: dict[_Job[Any], Pause] = {}
        self._closing = False
        self._loop: asyncio.AbstractEventLoop
        self._selector: selectors.BaseSelector
        self._alarm: tuple[socket.socket, socket.socket]
        """A byte that is sent to the second one wakes the thread."""

    # On the event loop

    async def do(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in the thread, after all calls before it.

        When cancelled, drop a call that has not begun, and wait for the end of one that has.

        Raises:
            OSError: no thread can be started, and whatever the function raises.
        """

        def work() -> Generator[Pause | None, None, T]:
            return call(*args, **kwargs)
            yield

        return await self._end_of(_Awaited(work()), self._calls)

    async def compute(self, work: Callable[[], T], size: int) -> T:
        """Run a pure computation in the thread, or at once if it is about few values.

        It has always ended when this returns or raises, so that no other task meets it half done.
        """
        return work() if size <= _INLINE else await self.do(work)

    async def do_slowly(self, steps: Generator[Pause | None, None, T]) -> T:
        """Run a generator in the thread, one step at a time, while no call waits.

        A call waits for the end of a step, so one should take a few milliseconds at most. When
        cancelled, the generator is closed in the thread, and this waits for it.

        Returns:
            What the generator returns.
        """
        return await self._end_of(_Awaited(steps), self._slow)

    async def wait_for(self, changes: Changes) -> None:
        """Return once the judge has found something that concerns us; it is asked at once.

        The descriptor may be closed after that. What arrives then is found by the next wait.
        """

        def judge() -> Generator[Pause | None, None, None]:
            while not changes.judge():
                yield Pause(changes.fd)

        await self.do_slowly(judge())

    async def close(self) -> None:
        """End the thread after all calls; cancel the other jobs. A later call starts another."""
        if self._thread is not None:
            await self.do(self._stop)
            self._thread.join()
            self._thread = None
            self._selector.close()
            for end in self._alarm:
                end.close()

    async def _end_of(self, job: _Awaited[T], queue: deque[_Job[Any]]) -> T:
        """Queue a job, and return its result."""
        self._start()
        self._loop = job.loop
        queue.append(job)
        self._wake()
        try:
            await job.wait()
        except asyncio.CancelledError:
            with self._lock:
                job.cancelled = True
            self._wake()
            while job.begun and not job.ended:
                with suppress(asyncio.CancelledError):  # once more
                    await job.wait()
            raise
        if job.cancelled:
            raise asyncio.CancelledError
        if job.error is not None:
            error, job.error = job.error, None  # no cycle of the job and its traceback
            raise error
        return job.result

    def _start(self) -> None:
        """Start the thread if there is none."""
        if self._thread is not None:
            return
        # Unlike epoll, poll takes no descriptor.
        self._selector = getattr(selectors, "PollSelector", selectors.DefaultSelector)()
        self._alarm = receiver, sender = socket.socketpair()
        for end in self._alarm:
            end.setblocking(False)
        self._selector.register(receiver, selectors.EVENT_READ)
        self._closing = False
        thread = threading.Thread(target=self._run, daemon=True, name="kernel")
        try:
            thread.start()
        except RuntimeError as error:
            self._selector.close()
            receiver.close()
            sender.close()
            raise OSError(f"no thread can be started: {error}") from error
        self._thread = thread

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # enough of them are on their way
            self._alarm[1].send(b"!")

    # In the thread

    def on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop of the last caller, and wait for its end."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def keep(self, steps: Generator[Pause | None, None, None]) -> None:
        """Run a generator beside all calls, until its end or that of the thread.

        Call it in the thread, which closes the generator if it ends first.
        """
        self._slow.append(_Job(steps))

    def _run(self) -> None:
        """Do all jobs until `close`."""
        if self._netns is not None:
            from steersman.host.netns import enter  # noqa: PLC0415 - not on Windows

            enter(self._netns)
        while not self._closing or self._calls:
            while (job := self._next(self._calls)) is not None:
                self._advance(job)
            readable = [key.data for key, _ in self._selector.select(self._patience())]
            if None in readable:
                self._alarm[0].recv(4096)
            now = time.monotonic()
            for job, pause in list(self._waiting.items()):
                if job.cancelled or job in readable or pause.until <= now:
                    self._go_on(job)
            if (job := self._next(self._slow)) is not None:
                self._advance(job)
        for job in (*self._waiting, *self._slow):
            job.cancelled = True
        for job in list(self._waiting):
            self._go_on(job)
        while (job := self._next(self._slow)) is not None:
            self._advance(job)

    def _patience(self) -> float | None:
        """Return the seconds until something is due, unless a descriptor is readable before."""
        if self._slow or self._closing:
            return 0
        until = min((pause.until for pause in self._waiting.values()), default=math.inf)
        return None if until == math.inf else max(until - time.monotonic(), 0)

    def _next(self, queue: deque[_Job[Any]]) -> _Job[Any] | None:
        """Return the first job of a queue that is not dropped; it begins."""
        with self._lock:
            while queue:
                job = queue.popleft()
                if job.begun or not job.cancelled:
                    job.begun = True
                    return job
        return None

    def _go_on(self, job: _Job[Any]) -> None:
        """Continue a job that waited."""
        pause = self._waiting.pop(job)
        if pause.fd >= 0:
            self._selector.unregister(pause.fd)
        self._advance(job)

    def _advance(self, job: _Job[Any]) -> None:
        """Run a job up to where it waits, or to its end."""
        caller.is_cancelled = lambda: job.cancelled
        try:
            if job.cancelled:
                job.steps.close()
            else:
                pause = next(job.steps)
                if pause is None:
                    self._slow.append(job)
                else:
                    if pause.fd >= 0:
                        self._selector.register(pause.fd, selectors.EVENT_READ, job)
                    self._waiting[job] = pause
                return
        except StopIteration as end:
            job.result = end.value
        except BaseException as error:
            job.error = error
        job.end()

    def _stop(self) -> None:
        self._closing = True
