"""What the kernel has, and a log of what changed in it: followed by all observers of syncs.

An Engine is replaced by a switch of the mode; this outlives it. So for an observer a switch is a
sync like any other: it gets the names of the plans that differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from steersman.model.change_log import ChangeLog
from steersman.model.names import NODE, ObjectName, Owner, PlanKey
from steersman.model.plan import ServicePlan
from steersman.source.store import KINDS_OF_SERVICE, Change

Name: TypeAlias = Owner | Change
"""A ServicePort whose plan in force changed, NODE for the node's settings, or a change of the
Store that is in force."""


class InForce:
    """The plans of the last sync that reached the kernel."""

    def __init__(self) -> None:
        self.plans: dict[PlanKey, ServicePlan] = {}
        self.log: ChangeLog[Name] = ChangeLog()
        self.refused: frozenset[ObjectName] = frozenset()
        """Services of which the kernel has another version than the Store: it refuses theirs, or a
        defect keeps them from being planned or rendered."""
        self._writer: object = None
        self._changes = 0
        """The revision of the Store that is in force."""

    def update(
        self,
        writer: object,
        plans: Mapping[PlanKey, ServicePlan],
        owners: Iterable[Owner],
        changes: tuple[Iterable[Change], int],
        refused: frozenset[ObjectName],
    ) -> None:
        """Record a sync.

        Args:
            writer: who made it; all plans are compared if it was somebody else the last time.
            owners: those that changed since the last sync of this writer.
            changes: of the Store, since then, and its revision.
            refused: Services of which an older version stays in force.
        """
        replaced = writer is not self._writer
        if replaced:
            owners = {**dict.fromkeys(owners), **dict.fromkeys(plans), **dict.fromkeys(self.plans)}
            self._writer = writer
        for owner in owners:
            if isinstance(owner, PlanKey):
                # A writer keeps a plan that does not differ, and names each if the settings do.
                before, plan = self.plans.get(owner), plans.get(owner)
                if plan is before:
                    continue
                if plan is not None:
                    self.plans[owner] = plan
                else:
                    del self.plans[owner]
                if replaced and plan == before:
                    continue
            self.log.touch(owner)
        for change in changes[0]:
            self.log.touch(change)
        self._changes = changes[1]
        for name in self.refused - refused:
            self.log.touch(Change("Service", name))
        self.refused = refused

    def has_newest(self, name: ObjectName, log: ChangeLog[Change]) -> bool:
        """Return whether the Store's version of a Service and its endpoints is in force."""
        newest = max(log.revision_of(Change(kind, name)) for kind in KINDS_OF_SERVICE)
        return newest <= self._changes and name not in self.refused


def about_node(names: Iterable[Name]) -> bool:
    """Return whether something changed that is about no Service: the node, its settings."""
    return any(each == NODE or (isinstance(each, Change) and not each.of_service) for each in names)


def services_of(names: Iterable[Name]) -> list[ObjectName]:
    """Return the Services that changes of the Store are about, each once."""
    found = (each.name for each in names if isinstance(each, Change) and each.of_service)
    return [*dict.fromkeys(found)]
