"""Renders plans into the ledger, a few milliseconds at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping

from steersman.model.names import NODE, Owner, PlanKey
from steersman.model.plan import NodeSettings, ServicePlan
from steersman.model.ruleset import Ruleset
from steersman.modes.base import Mode
from steersman.run.sync.ledger import ObjectLedger

log = logging.getLogger(__name__)

_SLICE = 48
"""ServicePorts rendered before other tasks may run, a few milliseconds."""
_PACKED_FROM = 2000
"""ServicePorts whose objects are packed as soon as they are rendered."""


class Renderer:
    """Renders the plans of a Planner by a mode, as they are now."""

    def __init__(
        self, mode: Mode, plans: Mapping[PlanKey, ServicePlan], ledger: ObjectLedger
    ) -> None:
        """Render nothing yet; `plans` is a live view of all plans."""
        self._mode = mode
        self._plans = plans
        self._ledger = ledger
        self.broken: dict[Owner, str] = {}
        """The error of each owner whose objects could not be rendered."""
        self.rendered: set[Owner] = set()
        """Plans that were rendered; its reader clears it."""

    async def render(self, owners: Collection[Owner], settings: NodeSettings) -> None:
        """Render the parts of some owners, a few milliseconds at a time."""
        # Such a mode fills an empty kernel in parts: the objects are never all unpacked.
        packed = self._mode.fill is not None and len(owners) >= _PACKED_FROM
        cost = 0
        for owner in owners:
            if cost >= _SLICE:
                cost = 0
                await asyncio.sleep(0)
            plan = self._plans.get(owner) if isinstance(owner, PlanKey) else None
            objects: Ruleset = {}
            try:
                if plan is not None:
                    objects = self._mode.render_service(plan, settings)
                elif owner == NODE:
                    objects = self._mode.render_node(settings)
            except Exception as error:  # a defect: it must not cost the other Services
                if owner not in self.broken:
                    log.exception("cannot render the rules of %s", owner)
                self.broken[owner] = f"{type(error).__name__}: {error}"
                continue
            if self.broken:
                self.broken.pop(owner, None)
            self._ledger.put(owner, objects, packed=packed and owner != NODE)
            if plan is not None:
                cost += 1 + len(plan.reachable) // 16
                self.rendered.add(owner)
        if self.broken:
            self._ledger.drop_claimed(self.broken)
