"""Services that clients cannot use on this node: kept up to date by the plans that changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from steersman.compile.trouble import Trouble, service_trouble, trouble_of
from steersman.model.findings import Finding, Severity, worst
from steersman.model.names import ObjectName, PlanKey
from steersman.run.sync.in_force import InForce

_LISTED = (50, 16_000)
"""Number and characters of those that a state lists."""


class TroubleLog:
    """Follows the plans in force."""

    def __init__(self, in_force: InForce) -> None:
        self._plans = in_force.plans
        self._cursor = in_force.log.cursor()
        self._ports: dict[ObjectName, dict[PlanKey, Trouble]] = {}
        self._counts: Mapping[Severity, int] = {}
        self._worst: tuple[Finding, ...] = ()

    def observe(self, _: object = None) -> None:
        """Look at the plans that changed."""
        names, revision = self._cursor.changed()
        changed = False
        for key in names:
            if isinstance(key, PlanKey):
                plan, name = self._plans.get(key), key.name.object_name
                trouble = trouble_of(plan) if plan is not None else None
                ports = self._ports.get(name, {})
                changed |= ports.get(key) != trouble
                if trouble is not None:
                    self._ports.setdefault(name, ports)[key] = trouble
                elif ports.pop(key, None) is not None and not ports:
                    del self._ports[name]
        self._cursor.move(revision)
        if changed:
            found = [service_trouble(*each) for each in self._ports.items()]
            self._counts = Counter(each.severity for each in found)
            self._worst = worst(found, *_LISTED)

    @property
    def state(self) -> tuple[Mapping[Severity, int], tuple[Finding, ...]]:
        """The number of Services by severity, and the worst of them."""
        return self._counts, self._worst
