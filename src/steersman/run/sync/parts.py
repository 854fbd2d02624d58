"""Renders owed plans, all of them or in the parts that fill an empty kernel; what comes first.

Where a mode's tool takes long to read its input, it reads while the rest is rendered: on a node
with two cores the first rules are in force after the longer of the two times instead of their sum
(`Renderer.parts`, Mode.fill).

Writing tens of thousands of objects takes the kernel a quarter of a second and more, and the
clients of the Services that are used wait meanwhile. Few of a cluster's Services are: so where a
mode counts connections and can write in parts, the node's own objects and the Services with the
most new connections come first after another program has removed all rules (Mode.apply_parts).
The counters are gone with the rules, so they are read every few minutes, one pass over them each
time. A Service's score is the number of its new connections since the last time, plus half of the
score that it had.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from itertools import islice

from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import Diff, Ruleset
from steersman.model.stats import ConnectionStats
from steersman.modes.base import Mode
from steersman.run.sync.ledger import NODE, ObjectLedger, Owed, Owner

log = logging.getLogger(__name__)

# -- Rendering -------------------------------------------------------------------------------------

_SLICE = 48
"""ServicePorts rendered before other tasks may run, a few milliseconds."""
_FIRST_PART = 1000
"""ServicePorts of the first part; each other one is half as large again. The mode's tool reads one
while the next is rendered, which takes a little more than half of the time. More and smaller parts
cost the tool more: it is fastest with objects in order, and they are within a part only."""

_PACKED_FROM = 2000
"""ServicePorts whose objects are packed as soon as they are rendered."""


class Renderer:
    """Renders owed plans into the ledger."""

    def __init__(self, owed: Owed, ledger: ObjectLedger) -> None:
        """Render nothing yet; both are those of the Sync."""
        self._owed = owed
        self._ledger = ledger
        self.broken: dict[Owner, str] = {}
        """The error of each owner whose objects could not be rendered."""
        self._count = 0

    def take_count(self) -> int:
        """Return the number of plans rendered since the last call."""
        count, self._count = self._count, 0
        return count

    def retry(self, plans: Mapping[PlanKey, ServicePlan]) -> None:
        """Render owners again that a defect kept from being rendered."""
        self._owed.node |= NODE in self.broken
        keys = [owner for owner in self.broken if isinstance(owner, PlanKey)]
        self._owed.unrendered.update({key: plans.get(key) for key in keys})

    async def render(self, mode: Mode, settings: NodeSettings) -> None:
        """Render everything that is owed, a few milliseconds at a time."""
        await self._render(mode, settings, [*self._owed.unrendered])
        if self.broken:
            self._ledger.drop_claimed(self.broken)

    async def parts(self, mode: Mode, settings: NodeSettings) -> AsyncGenerator[Ruleset]:
        """Render everything into an empty ledger, and yield it in parts; see `Mode.fill`.

        Raises:
            ApplyError: two owners claim one object; everything is rendered.
        """
        unrendered, size, number = self._owed.unrendered, _FIRST_PART, 0
        keys = [key for key, plan in unrendered.items() if plan is None or mode.comes_first(plan)]
        owners: list[Owner] = [NODE, *keys]
        while owners:
            await self._render(mode, settings, keys)
            part = self._ledger.wanted(owners)
            number += len(part)
            yield part
            keys = list(islice(unrendered, size))
            owners = [*keys]
            size += size // 2
        if len(self._ledger.wanted()) != number:
            raise ApplyError("two Services claim the same kernel object")

    async def _render(self, mode: Mode, settings: NodeSettings, keys: list[PlanKey]) -> None:
        # A plan stays unrendered until its objects are in the ledger, as the run may be cancelled.
        unrendered, cost = self._owed.unrendered, 0
        # Such a mode fills an empty kernel in parts: the objects are never all unpacked.
        packed = mode.writes_in_parts and len(keys) >= _PACKED_FROM
        if self._owed.node:
            self._put(NODE, None, mode, settings)
            self._owed.node = False
        for key in keys:
            plan = unrendered[key]
            self._put(key, plan, mode, settings, packed)
            if plan is not None:
                cost += 1 + len(plan.reachable) // 16
                self._count += 1
            del unrendered[key]
            if cost >= _SLICE:
                cost = 0
                await asyncio.sleep(0)

    def _put(
        self,
        owner: Owner,
        plan: ServicePlan | None,
        mode: Mode,
        settings: NodeSettings,
        packed: bool = False,
    ) -> None:
        """Render an owner: by what differs from its last plan if that is known and the mode can."""
        change: Diff | None = None
        objects: Ruleset = {}
        try:
            if plan is not None:
                lists = self._owed.relisted.get(plan.key)
                if lists is not None and not (self.broken and owner in self.broken):
                    objects = self._ledger.wants(owner)
                    change = mode.render_endpoints(plan, lists, objects)
                if change is None:
                    objects = mode.render_service(plan, settings)
            elif owner == NODE:
                objects = mode.render_node(settings)
        except Exception as error:  # a defect: it must not cost the other Services
            if owner not in self.broken:
                log.exception("cannot render the rules of %s", owner)
            self.broken[owner] = f"{type(error).__name__}: {error}"
            return
        if self.broken:
            self.broken.pop(owner, None)
        if change is None:
            self._ledger.put(owner, objects, packed=packed)
        else:
            self._ledger.amend(owner, objects, change)


# -- What comes first ------------------------------------------------------------------------------

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
