"""The page of this node for pages of a cluster: its NodeState, once or as a stream of lines.

    report, failure, condition --changed--> timer (at most 4 a second) --> one line --> listeners

A line is made and encoded once for all listeners. Each listener is a coroutine that waits for the
newest line: one that reads slowly misses lines, and nothing queues up for it. Without listeners
`changed` does nothing, and there is no timer.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable

import msgspec

from steersman.model.node_state import Condition, NodeState
from steersman.run.pages.node_state import NodeStates
from steersman.run.serve.http import Answer, Request

MOST_LISTENERS = 16
"""Streams at a time; the local socket keeps room for commands."""
_APART = 0.25
"""Least seconds between two lines."""
_HEARTBEAT = 5.0
"""Most seconds between two lines."""
_STUCK = 30.0
"""Seconds after which a listener that reads nothing is dropped."""
_LOOK = 5.0
"""Seconds between two looks at the conditions and the CPU time."""


class NodePage:
    """Serves `/node`, and `/status`: the same with all Findings."""

    def __init__(
        self,
        states: NodeStates,
        digest: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the page; nothing is made before it is asked for.

        Args:
            digest: returns the digest of all Services; "" until it is known.
        """
        self._states = states
        self._digest = digest
        self._clock = clock
        self._listeners: dict[object, Request] = {}
        self._line = b""
        self._made_at = float("-inf")
        self._news = asyncio.Event()
        """Set when there is another line, and replaced by a fresh one."""
        self._timer: asyncio.TimerHandle | None = None
        self._due = float("inf")
        """When the timer fires, by the loop's clock."""

    def changed(self, _: object = None) -> None:
        """Send the state soon: a sync has ended or failed, or something else is different."""
        if self._listeners:
            self._make_at(self._made_at + _APART)

    async def follow(self) -> None:
        """Look at the conditions and the CPU time every few seconds, until cancelled.

        So each condition knows since when it has its status, whether somebody asks or not.
        """
        known: tuple[Condition, ...] = ()
        while True:
            self._states.sample_cpu()
            if (conditions := self._states.now().conditions) != known:
                known = conditions
                self.changed()
            await asyncio.sleep(_LOOK)

    def serve(self, request: Request) -> Answer:
        """Answer `/node`, or `/node?watch=1` with a line now and for every change."""
        if request.query.get("watch", "0") in ("", "0"):
            return Answer(msgspec.json.encode(self.state()), content_type="application/json")
        for key, listener in tuple(self._listeners.items()):
            if listener.gone():
                del self._listeners[key]
        if len(self._listeners) >= MOST_LISTENERS:
            text = f"{MOST_LISTENERS} clients watch this node already; close one of them\n"
            return Answer(text, 503)
        return Answer(
            pieces=self._lines(request),
            content_type="application/x-ndjson",
            more_headers={"Cache-Control": "no-store"},
            patience=_STUCK,
        )

    async def _lines(self, request: Request) -> AsyncGenerator[bytes]:
        """Listen until the client leaves, or takes no line for too long."""
        key = object()
        self._listeners[key] = request
        try:
            if self._clock() - self._made_at >= _APART or not self._line:
                self._make()
            while True:
                news = self._news
                yield self._line
                await news.wait()
        finally:
            self._listeners.pop(key, None)
            if not self._listeners and self._timer is not None:
                self._timer.cancel()
                self._timer, self._due, self._line = None, float("inf"), b""

    def _make_at(self, when: float) -> None:
        """Make the next line at a time, or earlier if it is due earlier."""
        if when >= self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = when
        delay = max(0.0, when - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay, self._make)

    def _make(self) -> None:
        self._made_at, self._due = self._clock(), float("inf")
        self._make_at(self._made_at + _HEARTBEAT)
        self._line = msgspec.json.encode(self.state()) + b"\n"
        news, self._news = self._news, asyncio.Event()
        news.set()

    def state(self) -> NodeState:
        """Return the state now, with the digest: who watches one node compares it with others."""
        return msgspec.structs.replace(self._states.now(), digest=self._digest())

    def serve_status(self, _: Request) -> Answer:
        """Answer `/status`."""
        state = self._states.now(limits=(sys.maxsize, sys.maxsize))
        return Answer(msgspec.json.encode(state), content_type="application/json")
