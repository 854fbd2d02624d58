"""Switches of the mode, one at a time, and the modes that were left.

The steps of a switch are in switching.py, which is loaded by the first one: most processes never
switch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from steersman.model.errors import BusyError
from steersman.model.switch import SwitchRequest, SwitchResult, Tell
from steersman.modes.base import Mode, release
from steersman.run.process.mode_transition import remove_leftovers

if TYPE_CHECKING:
    from steersman.run.process.canary import Dial
    from steersman.run.process.switching import Switchable

log = logging.getLogger("steersman")

_PAUSE = 1.0  # seconds between two looks at whether rules are in force


class Retiring(NamedTuple):
    """A mode that has been left, and still carries connections."""

    mode: Mode
    drain: float
    """Seconds that its connections get."""
    task: asyncio.Task[None]


class Switcher:
    """Switches the mode, one switch at a time."""

    def __init__(self, daemon: Switchable) -> None:
        self._daemon = daemon
        self.dial: Dial | None = None
        """Opens the connections that are watched; None for those of canary.py."""
        self.running = ""
        """The mode of the switch that is under way; "" if none is."""
        self.began = asyncio.Event()
        """A switch is under way: nothing else may remove objects of modes."""
        self.ended = asyncio.Event()
        """No switch is under way."""
        self._retiring: dict[str, Retiring] = {}
        self._closing: dict[asyncio.Task[None], Mode] = {}

    @property
    def retiring(self) -> frozenset[str]:
        """Modes that were left, and are removed once their connections have ended."""
        return frozenset(self._retiring)

    async def switch(self, request: SwitchRequest, tell: Tell) -> SwitchResult:
        """Switch as asked for, and `tell` each step as soon as it is done.

        Raises:
            BusyError: another switch is under way.
        """
        if self.running:
            raise BusyError(
                f"another switch is under way, to {self.running} mode; wait until it has ended"
            )
        self.running = request.to
        self.ended.clear()
        self.began.set()
        try:
            left = False
            if (retiring := self._retiring.pop(request.to, None)) is not None:
                # It is to serve again: nobody removes it any more. Connections that it carries in
                # this process go on beside those of its successor.
                retiring.task.cancel()
                await asyncio.gather(retiring.task, return_exceptions=True)
                left = bool(await retiring.mode.worker.do(retiring.mode.read))
                closing = asyncio.create_task(self._close(retiring.mode, retiring.drain))
                self._closing[closing] = retiring.mode
                closing.add_done_callback(self._closing.pop)
            from steersman.run.process.switching import Switch  # noqa: PLC0415 - rare

            return await Switch(self._daemon, request, tell, self.retire, left, self.dial).run()
        finally:
            self.running = ""
            self.began.clear()
            self.ended.set()

    def retire(
        self,
        old: Mode,
        current: Mode,
        drain: float,
        in_force: Callable[[], bool] = lambda: True,
    ) -> None:
        """Remove a mode in the background once its connections have ended.

        Args:
            drain: seconds that connections get.
            in_force: whether the rules of the mode that serves are: nothing is removed before.
        """

        async def retire() -> None:
            while not in_force():  # noqa: ASYNC110 - a Sync does not notify
                await asyncio.sleep(_PAUSE)
            await remove_leftovers([(old.name, old)], drain, current)
            await self._close(old, drain)
            self._retiring.pop(old.name, None)

        self._retiring[old.name] = Retiring(old, drain, asyncio.create_task(retire()))

    async def _close(self, mode: Mode, drain: float) -> None:
        if cut := await release(mode, drain):
            log.warning("%d connections through %s mode were cut", cut, mode.name)

    async def aclose(self, drain: float) -> int:
        """Release all modes that were left, whose connections get some seconds to end.

        Returns:
            The number of connections that were cut.
        """
        left = dict(self._closing) | {each.task: each.mode for each in self._retiring.values()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return sum(await asyncio.gather(*(release(mode, drain) for mode in left.values())))
