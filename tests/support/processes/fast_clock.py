"""Time that runs faster than the real one."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

from steersman.source.pace import Timing

SPEED = 60.0
"""Seconds of ours in a real one."""


@dataclass
class FastClock:
    """A clock and a sleep for `Timing`; somebody may set the clock."""

    dice: random.Random
    step: float = 0.0
    """Seconds by which it was set forward, or back."""
    begun: float = field(default_factory=time.monotonic)

    def now(self) -> float:
        return 10_000.0 + (time.monotonic() - self.begun) * SPEED + self.step

    def wall(self) -> float:
        return 1_800_000_000.0 + self.now()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / SPEED)

    def timing(self) -> Timing:
        """The true delays in our time; time-outs, which asyncio measures, in real time."""
        return Timing(
            now=self.now,
            sleep=self.sleep,
            random=self.dice.random,
            connect=3.0,
            answer=3.0,
            initial_idle_timeout=2.0,
            initial_total=5.0,
            watch_shortest=300 / SPEED,
            watch_longest=600 / SPEED,
            idle_timeout=180 / SPEED,
            grace=2.0,
        )
