"""What a consumer of a change log sees: of a Store, and of a Planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from steersman.compile.planner import Planner
from steersman.model.inputs import HostFacts, Snapshot
from steersman.model.names import NODE, ObjectName, PlanKey
from steersman.model.plan import ServicePlan
from steersman.source.store import EJECTIONS, Store


class Changed(NamedTuple):
    """Names that changed in a Store."""

    service_objects: frozenset[ObjectName] = frozenset()
    endpoints: frozenset[ObjectName] = frozenset()
    ejections: frozenset[ObjectName] = frozenset()
    node: bool = False
    """Whether something changed that is about no Service."""

    @property
    def services(self) -> frozenset[ObjectName]:
        return self.service_objects | self.endpoints | self.ejections

    def __bool__(self) -> bool:
        return bool(self.services or self.node)


class StoreFollower:
    """A consumer of a Store that succeeds each time."""

    def __init__(self, store: Store) -> None:
        """Complete its lists, and follow it from now on: before, the lists are one change."""
        if not store.synced:
            slices = chain.from_iterable(store.snapshot.slices.values())
            names = {each.metadata.object_name for each in slices}
            store.retain("Service", (*store.snapshot.services, *store.unserved))
            store.retain("EndpointSlice", names)
        self._cursor = store.log.cursor()
        self.take()

    def take(self) -> Changed:
        """Return what changed since the last call."""
        changes, revision = self._cursor.changed()
        self._cursor.move(revision)

        def of(kind: str) -> frozenset[ObjectName]:
            return frozenset(each.name for each in changes if each.kind == kind)

        node = any(not each.of_service for each in changes)
        return Changed(of("Service"), of("EndpointSlice"), of(EJECTIONS), node)


class Planned(NamedTuple):
    """What an update of a Planner touched."""

    settings_changed: bool
    changed: Mapping[PlanKey, ServicePlan]
    removed: frozenset[PlanKey]


def update(
    planner: Planner, snapshot: Snapshot, facts: HostFacts, dirty: Iterable[ObjectName] = ()
) -> Planned:
    """Update a Planner, and return what it touched."""
    cursor = planner.log.cursor()
    cursor.move(planner.log.revision)
    planner.update(snapshot, facts, dirty)
    owners, _ = cursor.changed()
    keys = [owner for owner in owners if isinstance(owner, PlanKey)]
    plans = planner.services
    return Planned(
        NODE in owners,
        {key: plans[key] for key in keys if key in plans},
        frozenset(key for key in keys if key not in plans),
    )
