"""The clocks of the module `time`, replaced for a whole process by those of the simulation.

`replace` has to run before anything is imported that takes a clock by name.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

START = 1_000.0
"""Seconds since boot at the beginning of each universe."""
_BOOT = 1_800_000_000.0
"""Seconds since 1970 at boot."""


@dataclass
class Clock:
    """What time it is in the universe of now."""

    now: float = START
    ahead: float = _BOOT

    def reset(self) -> None:
        self.now, self.ahead = START, _BOOT

    @property
    def wall(self) -> float:
        return self.now + self.ahead


CLOCK = Clock()
cpu_time = time.process_time


def replace() -> None:
    """Have `time` tell the simulation's time from now on."""
    time.monotonic = time.perf_counter = time.thread_time = lambda: CLOCK.now
    time.monotonic_ns = time.perf_counter_ns = lambda: int(CLOCK.now * 1e9)
    time.time = lambda: CLOCK.wall
    time.time_ns = lambda: int(CLOCK.wall * 1e9)
