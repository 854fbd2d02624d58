"""Services that clients cannot use on this node: kept up to date by the plans that changed."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Mapping

from steersman.compile.trouble import Trouble, service_trouble, trouble_of
from steersman.model.findings import Finding, Severity, worst
from steersman.model.names import ObjectName, PlanKey
from steersman.run.sync.in_force import InForce

_MOST, _LONGEST = 50, 16_000
"""Number and characters of those that a state lists."""
_SLICE = 1000
"""Plans that are looked at before other tasks may run; about 3 ms."""


class TroubleLog:
    """Follows the plans in force."""

    def __init__(self, in_force: InForce) -> None:
        self._plans = in_force.plans
        self._cursor = in_force.log.cursor()
        self._ports: dict[ObjectName, dict[PlanKey, Trouble]] = {}
        self._worst_of: dict[ObjectName, Trouble] = {}
        """The worst trouble of each of these Services."""
        self._counts: Counter[Severity] = Counter()
        self._listed: tuple[Finding, ...] | None = ()
        """Those that a state lists; None if they have to be made again."""

    async def observe(self, _: object = None) -> None:
        """Look at the plans that changed; yields to the loop."""
        names, revision = self._cursor.changed()
        for number, key in enumerate(names, 1):
            if isinstance(key, PlanKey):
                self._look(key)
            if number % _SLICE == 0:
                await asyncio.sleep(0)
        self._cursor.move(revision)

    def _look(self, key: PlanKey) -> None:
        plan, name = self._plans.get(key), key.name.object_name
        trouble = trouble_of(plan) if plan is not None else None
        ports = self._ports.get(name, {})
        if ports.get(key) == trouble:
            return
        if (before := self._worst_of.pop(name, None)) is not None:
            self._counts[before.severity] -= 1
        if trouble is not None:
            self._ports.setdefault(name, ports)[key] = trouble
        else:
            del ports[key]
        if ports:
            now = self._worst_of[name] = min(ports.values())
            self._counts[now.severity] += 1
        else:
            del self._ports[name]
        self._listed = None

    @property
    def state(self) -> tuple[Mapping[Severity, int], tuple[Finding, ...]]:
        """The number of Services by severity, and the worst of them."""
        if self._listed is None:
            ranked = ((each.rank, name) for name, each in self._worst_of.items())
            first = heapq.nsmallest(_MOST, ranked)
            found = (service_trouble(name, self._ports[name]) for _, name in first)
            self._listed = worst(found, _MOST, _LONGEST)
        return +self._counts, self._listed
