"""Virtual time: one heap of events for the whole world, and an event loop per simulated process.

Nothing here waits. `Universe.run` takes the next thing that is due, moves the clock to it and runs
it: an event of the world (a packet arrives, a pod starts), or one callback of one process. All
choices come from one seeded generator, so a seed replays exactly.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import random
import re
import signal
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from tests.sim.clocks import CLOCK, START
from tests.sim.network import Network

_STEP = 20e-6
"""Seconds that a callback takes, beside what it is charged for."""
_NEVER = float("inf")
_MOST_TURNS = 40_000
"""Events and callbacks in a second of a small node's life, at most."""


class Spinning(AssertionError):
    """Something goes round and round."""


class SimTask(asyncio.Task[Any]):
    """A task that hashes by its number: sets of tasks have the same order in each replay."""

    number = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        SimTask.number += 1
        self._hash = SimTask.number
        self._log_destroy_pending = False  # kill -9 destroys them
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._hash


class SimLoop(asyncio.BaseEventLoop):
    """The event loop of one process; `Universe.run` drives it."""

    _ready: deque[Any]
    _scheduled: list[Any]
    _timer_cancelled_count: int
    _closed: bool

    def __init__(self, universe: Universe, name: str) -> None:
        super().__init__()
        self.universe = universe
        self.name = name
        self.signals: dict[int, Callable[[], object]] = {}
        self.threads = 0
        self.set_task_factory(lambda loop, coro, **more: SimTask(coro, loop=loop, **more))

    # Time and callbacks

    def time(self) -> float:
        return self.universe.now

    def due(self) -> float:
        """When this loop has something to run."""
        if self._ready:
            return 0.0
        scheduled = self._scheduled
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(scheduled)._scheduled = False
        if self._timer_cancelled_count > 100:  # as asyncio does
            scheduled[:] = [each for each in scheduled if not each._cancelled]
            heapq.heapify(scheduled)
            self._timer_cancelled_count = 0
        return scheduled[0]._when if scheduled else _NEVER

    def run_once(self) -> None:
        """Run one callback that is due."""
        scheduled, ready, now = self._scheduled, self._ready, self.universe.now
        while scheduled and scheduled[0]._when <= now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        if not ready:
            return
        if (
            len(ready) > 1
            and self.universe.dice.random() < 0.1
            and all(map(_is_task, (ready[0], ready[1])))
        ):
            ready[0], ready[1] = ready[1], ready[0]  # two tasks: either may be first
        chosen: Any = ready.popleft()
        if not chosen._cancelled:
            chosen._run()

    def _write_to_self(self) -> None:
        """Nobody sleeps here."""

    def _process_events(self, _events: object) -> None:
        """There is no selector."""

    # Threads: one step of the world each, at some time later

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()
        self.threads += 1

        def settle(result: Any, error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def work() -> None:
            self.threads -= 1
            try:
                self.call_soon(settle, func(*args), None)
            except Exception as error:
                self.call_soon(settle, None, error)

        self.universe.after(self.universe.dice.uniform(5e-5, 2e-3), self.alive(work))
        return future

    def alive(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return a call that does nothing once this process is dead."""
        return lambda: None if self._closed else self.universe.inside(self, call)

    # Signals and sockets

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Callable[..., Any], *args: Any
    ) -> None:
        self.signals[sig] = lambda: self.call_soon(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        return self.signals.pop(sig, None) is not None

    async def sock_accept(self, sock: Any) -> tuple[Any, Any]:
        return await sock.accept(), ("192.0.2.250", 40000)

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        fd.reader = lambda: callback(*args)

    def remove_reader(self, fd: Any) -> bool:
        fd.reader = None
        return True

    async def connect_accepted_socket(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], sock: Any, **_: Any
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        protocol = protocol_factory()
        transport = sock.transport(protocol)
        await transport.made
        return transport, protocol

    async def sock_connect(self, sock: Any, address: Any) -> None:
        await self.universe.network.reachable(self, (address[0], address[1]))
        self.universe.network.connecting[sock.fileno()] = (address[0], address[1])

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], *, sock: socket.socket, **_: Any
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        network = self.universe.network
        address = network.connecting.pop(sock.fileno())
        sock.close()
        protocol = protocol_factory()
        transport = network.connect(self, protocol, address)
        await transport.made
        return transport, protocol

    async def sock_recv(self, sock: Any, _size: int) -> bytes:
        received: bytes = await sock.received(self)
        return received


def _is_task(handle: Any) -> bool:
    return isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)


class Universe:
    """The clock, the dice, the events to come, and the processes."""

    def __init__(self, seed: int) -> None:
        CLOCK.reset()
        self.dice = random.Random(seed)
        self.network = Network(self)
        self.loops: list[SimLoop] = []
        self.graveyard: list[object] = []
        self.history: deque[str] = deque(maxlen=400)
        self.steps = 0
        self.charged = 0.0
        self.longest_step = 0.0
        self._hash = hashlib.blake2b(digest_size=8)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._second, self._turns = self.now, 0

    @property
    def now(self) -> float:
        """Seconds since boot, which `time.monotonic` tells."""
        return CLOCK.now

    def step_wall_clock(self, seconds: float) -> None:
        """Set the wall clock forwards or back."""
        CLOCK.ahead += seconds

    # Events

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Have something happen later."""
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, call))

    def note(self, text: str) -> None:
        """Write a line of history, which is part of the trace."""
        line = f"{self.now - START:12.6f} {text}"
        self.history.append(line)
        # Names of temporary folders are chosen at random.
        self._hash.update(re.sub(r"/tmp\w{8}/", "/", line).encode())

    @property
    def digest(self) -> str:
        """Tell one history from another."""
        return f"{self._hash.hexdigest()}-{self.steps}"

    def charge(self, seconds: float) -> None:
        """Account for work that holds the running loop."""
        self.charged += seconds

    def run(self, seconds: float) -> None:
        """Let this much time pass.

        Raises:
            Spinning: the same second does not end.
        """
        clock, events = CLOCK, self._events
        until = clock.now + seconds
        while True:
            self._turns += 1
            if clock.now > self._second + 1.0:
                self._second, self._turns = clock.now, 0
            if self._turns > _MOST_TURNS:
                raise Spinning(f"more than {_MOST_TURNS} events in a second")
            event = events[0][0] if events else _NEVER
            loop, due = self._next_loop()
            when = max(event if event < due else due, clock.now)
            if when > until:
                clock.now = until
                return
            clock.now = when
            if event <= when:
                heapq.heappop(events)[2]()
            elif loop is not None:
                self._step(loop)

    def _next_loop(self) -> tuple[SimLoop | None, float]:
        chosen, soonest = None, _NEVER
        for loop in self.loops:
            due = loop.due()
            if due < soonest:
                chosen, soonest = loop, due
        return chosen, soonest

    def _step(self, loop: SimLoop) -> None:
        self.steps += 1
        self.charged = 0.0
        self.inside(loop, loop.run_once)
        self.longest_step = max(self.longest_step, self.charged)
        CLOCK.now += _STEP + self.charged

    def inside(self, loop: SimLoop, call: Callable[[], object]) -> None:
        """Run something as part of a process."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(loop)
        try:
            call()
        finally:
            asyncio._set_running_loop(before)


class Process:
    """A process that runs one coroutine, as `asyncio.run` would."""

    number = 0

    def __init__(
        self, universe: Universe, main: Callable[[], Coroutine[Any, Any, None]], name: str = ""
    ) -> None:
        Process.number += not name
        self.name = name or f"p{Process.number}"
        self.universe = universe
        self.loop = SimLoop(universe, self.name)
        self.ended: BaseException | str | None = None
        """Why it ended; "" if in order."""
        self.on_end: Callable[[], None] = lambda: None
        universe.loops.append(self.loop)
        self._main: asyncio.Task[Any] | None = None
        universe.inside(self.loop, lambda: self._begin(main))

    def _begin(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._main = self.loop.create_task(main())
        self._main.add_done_callback(lambda _task: self.loop.create_task(self._finish()))

    async def _finish(self) -> None:
        """Cancel the remaining tasks, as asyncio.run does."""
        assert self._main is not None
        left = [task for task in asyncio.all_tasks(self.loop) if task is not asyncio.current_task()]
        for task in sorted(left, key=hash):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self.loop.shutdown_asyncgens()
        if self.ended is None:
            self.ended = "" if self._main.cancelled() else self._main.exception() or ""
            self._gone()

    @property
    def running(self) -> bool:
        return self.ended is None

    @property
    def tasks(self) -> int:
        return len(asyncio.all_tasks(self.loop))

    def signal(self, number: int) -> None:
        """Deliver a signal: to its handler, or with the default effect."""
        handler = self.loop.signals.get(number)
        if not self.running:
            return
        self.universe.note(f"{self.name}: signal {signal.Signals(number).name}")
        if handler is not None:
            self.universe.inside(self.loop, handler)
        else:
            self.kill()

    def kill(self) -> None:
        """End it as kill -9 does: not one more line of it runs, its sockets are closed."""
        if self.running:
            self.ended = "killed"
            self._gone()

    def _gone(self) -> None:
        if self.name != "oracle":
            self.universe.note(f"{self.name}: ended: {self.ended!r:.200}")
        self.universe.network.close_all(self.loop)
        if self.loop in self.universe.loops:
            self.universe.loops.remove(self.loop)
        left = (*self.loop._ready, *self.loop._scheduled, *asyncio.all_tasks(self.loop))
        self.universe.graveyard.append(left)  # or their `finally` would run now
        self.loop._ready.clear()
        self.loop._scheduled.clear()
        self.loop._closed = True
        self.on_end()
