"""Which Services are put back first after another program has removed all rules.

Writing tens of thousands of objects takes the kernel a quarter of a second and more, and the
clients of the Services that are used wait meanwhile. Few of a cluster's Services are: so where a
mode counts connections and can write in parts, the node's own objects and the Services with the
most new connections come first (Mode.apply_parts).

The counters are gone with the rules, so they are read every few minutes, one pass over them each
time. A Service's score is the number of its new connections since the last time, plus half of the
score that it had.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection

from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import ObjectName
from steersman.model.plan import ServicePlan
from steersman.model.stats import ConnectionStats
from steersman.modes.base import Mode

_FIRST, _PERIOD = 30.0, 300.0
"""Seconds until the counters are read for the first time, and between two times."""
_FORGOTTEN = 0.5
"""A score below this is dropped."""


class Usage:
    """How much each Service has been used lately."""

    def __init__(self) -> None:
        """Start without knowing any."""
        self._scores: dict[ObjectName, float] = {}
        self._counts: Counter[ObjectName] = Counter()

    def note(self, stats: ConnectionStats) -> None:
        """Take over the counts of connections so far."""
        counts: Counter[ObjectName] = Counter()
        for (port, _), number in stats.frontends.items():
            counts[port.object_name] += number
        scores = {name: score / 2 for name, score in self._scores.items()}
        for name, number in counts.items():
            if (more := number - self._counts[name]) > 0:
                scores[name] = scores.get(name, 0.0) + more
        self._scores = {name: score for name, score in scores.items() if score >= _FORGOTTEN}
        self._counts = counts

    def busiest(self) -> list[ObjectName]:
        """Return the Services that were used lately, those with most new connections first."""
        return sorted(self._scores, key=lambda name: (-self._scores[name], name))

    async def follow(self, mode: Mode, plans: Callable[[], Collection[ServicePlan]]) -> None:
        """Read the counters of a mode from time to time, until cancelled.

        Args:
            mode: returns at once if it cannot write in parts.
            plans: returns the plans in force.
        """
        if not mode.writes_in_parts:
            return
        pause = _FIRST
        while True:
            await asyncio.sleep(pause)
            pause = _PERIOD
            try:
                stats = await mode.stats(plans())
            except (OSError, ApplyError, BusyError):
                continue  # the order of last time will do
            if stats is not None:
                self.note(stats)
