"""What a mode does about hand-over: begins with what the process before had, steps back at the end.

serving ── sockets given away ──> lending ── the successor serves ──> over
   ^                                 │                                 │
   └─────────────── the successor has gone ──────────────┴─────────────┘
"""

from __future__ import annotations

import asyncio
import logging
from enum import Enum

from steersman.model.errors import BusyError
from steersman.model.ruleset import Diff
from steersman.modes.userspace.names import left_without_endpoints, listeners_of
from steersman.proxy.engine import Proxy
from steersman.proxy.handoff import HandoffChannel
from steersman.proxy.listeners import LISTENER
from steersman.proxy.sockets import Sockets

log = logging.getLogger(__name__)
_REST = 10.0
"""Seconds until sockets that no listener wants are closed: a refused batch comes in parts."""


class Stage(Enum):
    """Who serves."""

    SERVING = "this process"
    LENDING = "this process, until the one that has its sockets says that it does"
    OVER = "another process"


class SocketHandoff:
    """Keeps one process at a time in charge of rules and new listeners."""

    def __init__(self, name: str, proxy: Proxy) -> None:
        """Prepare to take over what has this name; "" for nothing, ever."""
        self._proxy = proxy
        self._handover = HandoffChannel(name, self) if name else None
        self._begun = self._served = False
        self._rest: asyncio.TimerHandle | None = None
        self._resumed = asyncio.Event()
        self._succeeded = asyncio.Event()
        self.stage = Stage.SERVING

    async def begin(self) -> None:
        """Before the first listener is started: take those that there are."""
        if self._handover is not None and not self._begun:
            self._begun = True
            sockets = await asyncio.to_thread(self._handover.take)
            self._proxy.inherit(sockets)
            if sockets:
                log.info("took over %d listening sockets", len(sockets))

    async def serve(self) -> None:
        """Once listeners are started: let go of what nobody wants, and be the one to ask."""
        if self._handover is not None and not self._served:
            self._served = True
            loop = asyncio.get_running_loop()
            self._rest = loop.call_later(_REST, self._proxy.inherit, {})
            await self._handover.wait()

    async def follow(self, change: Diff) -> None:
        """Change the plans of those that still accept, while clients come to both processes.

        Raises:
            BusyError: rules and new listeners have to wait until it is clear who serves.
        """
        have = self._proxy.listeners
        wanted = {k: plan for k, plan in listeners_of(change).items() if k in have}
        same = {k: p for k, p in wanted.items() if (p.bind, p.port) == (have[k].bind, have[k].port)}
        await self._proxy.start(same)
        self._proxy.cut(left_without_endpoints(change))
        if self.stage is Stage.LENDING:
            raise BusyError("another process is taking over")
        gone = {key for key in change.removed if key[0] == LISTENER} - wanted.keys()
        self._proxy.stop(self._proxy.take(gone))

    async def resumed(self) -> None:
        """Return when another process that was in charge has gone: the rules may be different."""
        await self._resumed.wait()
        self._resumed.clear()

    async def succeeded(self) -> None:
        """Return once another process is in charge, at once if there is nothing to hand over."""
        if self._served:
            await self._succeeded.wait()

    # What the HandoffChannel calls

    def offer(self) -> Sockets:
        """Give all sockets away, and go on serving until the other process does."""
        self.stage = Stage.LENDING
        return self._proxy.sockets()

    def retire(self) -> None:
        """Leave rules and new listeners to the other process."""
        self.stage = Stage.OVER
        self._succeeded.set()
        self._proxy.retire()

    def resume(self) -> None:
        """Be in charge again."""
        self.stage = Stage.SERVING
        self._succeeded.clear()
        self._proxy.resume()
        self._resumed.set()

    def close(self) -> None:
        """Be asked no more."""
        if self._rest is not None:
            self._rest.cancel()
        self._proxy.inherit({})
        if self._handover is not None:
            self._handover.close()
