"""The page of this node for pages of a cluster: its NodeState, once or as a stream of lines.

    report, failure, condition --changed--> listeners (at most 4 times a second) --> newest line

A line is made and encoded once for all listeners. Each listener is a coroutine that waits for a
change, and then sends the newest line: one that reads slowly misses lines, and nothing queues up
for it. Without listeners `changed` does nothing.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

import msgspec

from steersman.model.node_state import Condition, NodeState
from steersman.run.pages.node_state import NodeStates
from steersman.run.serve.http import Answer, Request

MOST_LISTENERS = 16
"""Streams at a time; the local socket keeps room for commands."""
_APART = 0.25
"""Least seconds between two lines of a listener."""
_HEARTBEAT = 5.0
"""Seconds without a change after which the next line is sent."""
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
        """The newest one."""
        self._made_at = float("-inf")
        self._told: asyncio.Event | None = None
        """The change that it was made after."""
        self._change = asyncio.Event()
        """Set at the next change, and replaced by a fresh one."""

    def changed(self, _: object = None) -> None:
        """Send the state soon: a sync has ended or failed, or something else is different."""
        if self._listeners:
            change, self._change = self._change, asyncio.Event()
            change.set()

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
            while True:
                change, sent_at = self._change, self._clock()
                yield self._newest_line()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_HEARTBEAT):
                        await change.wait()
                await asyncio.sleep(max(0.0, sent_at + _APART - self._clock()))
        finally:
            self._listeners.pop(key, None)

    def _newest_line(self) -> bytes:
        now = self._clock()
        if self._told is not self._change or now - self._made_at >= _APART:
            self._told, self._made_at = self._change, now
            self._line = msgspec.json.encode(self.state()) + b"\n"
        return self._line

    def state(self) -> NodeState:
        """Return the state now, with the digest: who watches one node compares it with others."""
        return msgspec.structs.replace(self._states.now(), digest=self._digest())

    def serve_status(self, _: Request) -> Answer:
        """Answer `/status`."""
        state = self._states.now(limits=(sys.maxsize, sys.maxsize))
        return Answer(msgspec.json.encode(state), content_type="application/json")
