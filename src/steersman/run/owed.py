"""Changes owed to the kernel: they were seen, and are not known to be in force. Pure.

Theory. A change passes four places, and is a debt until the kernel has it:

    Store --take--> changed --plan--> unrendered --render--> ledger (dirty) --write--> kernel

Nothing leaves a place before it is in the next one, so an exception or a cancelled task at any
await leaves the debt where it was, and the next run goes on from there. Two more facts describe our
knowledge of the kernel; only a run clears them:

    unread      a write is under way or failed, or nothing was read yet: read everything
    suspected   others may have touched our objects: compare the fingerprint, then decide

`unread` is set before a write begins and cleared after it succeeded, so no kind of failure needs
code of its own. Retry, drift, reload and restart are all the same: run until nothing is owed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from steersman.compile.planner import PlanChange
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import ServicePlan
from steersman.source.store import MOST_TRIGGERS, Changes


class Owed:
    """The account of one Sync; `nothing` says whether everything is paid."""

    def __init__(self) -> None:
        """Start with everything owed: nothing was planned, rendered or read yet."""
        self.changed: set[ObjectName] = set()
        """Services that changed and are not planned."""
        self.unplanned: set[ObjectName] = set()
        """Services that a defect kept from being planned: the next comparison retries them."""
        self.replan = True
        """The settings of the node, or a new Planner, are not planned."""
        self.node = False
        """The node's own part is planned and not rendered."""
        self.unrendered: dict[PlanKey, ServicePlan | None] = {}
        """Plans that are not rendered; None for a removed one."""
        self.unread = True
        """The kernel may differ from the ledger."""
        self.suspected = False
        """Others may have changed our objects."""
        self.failed = False
        """The last run failed."""
        self._changes = Changes()
        self._plans = PlanChange()

    @property
    def nothing(self) -> bool:
        """Whether the kernel has everything, apart from objects it rejects."""
        return not (
            self.changed
            or self.replan
            or self.node
            or self.unrendered
            or self.unread
            or self.suspected
        )

    # Changes, from the Store to the ledger

    def take(self, changes: Changes) -> None:
        """Add the changes that the Store has gathered since the last call."""
        self.changed |= changes.services
        self.replan |= changes.node
        self._changes = _united(self._changes, changes)

    def planned(self, change: PlanChange) -> None:
        """Move changed Services to unrendered plans, by the result of a Planner."""
        self.changed.clear()
        self.unplanned |= change.failed
        self.node |= change.settings_changed
        self.unrendered.update(dict.fromkeys(change.removed))
        self.unrendered.update(change.changed)
        self._plans = _followed(self._plans, change)

    def retry_unplanned(self) -> None:
        """Plan Services again that a defect kept from being planned."""
        self.changed |= self.unplanned
        self.unplanned.clear()

    # The kernel

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write to the kernel; unless the block succeeds, everything has to be read again."""
        before, self.unread = self.unread, True
        yield
        self.unread = before

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Compare with the kernel; a suspicion that is raised during the block remains."""
        before, self.suspected = self.suspected, False
        try:
            yield
        except BaseException:
            self.suspected |= before
            raise

    # The reports

    @property
    def unreported(self) -> Iterable[PlanKey]:
        """Keys of plans that the next report adds or changes."""
        return self._plans.changed.keys()

    def take_report(self) -> tuple[Changes, PlanChange]:
        """Return all changes and plans since the last call: they are in force now."""
        report = self._changes, self._plans
        self._changes, self._plans = Changes(), PlanChange()
        self.failed = False
        return report


def _followed(one: PlanChange, other: PlanChange) -> PlanChange:
    """Return two successive changes of a plan as one."""
    if not (one.changed or one.removed or one.settings_changed):
        return other
    changed = {key: plan for key, plan in one.changed.items() if key not in other.removed}
    removed = one.removed.difference(other.changed)
    return PlanChange(
        one.settings_changed or other.settings_changed,
        {**changed, **other.changed},
        removed | other.removed,
    )


def _united(one: Changes, other: Changes) -> Changes:
    """Return two batches of changes as one."""
    if not (one or one.trigger_times):
        return other
    times = dict(one.trigger_times)
    for name, more in other.trigger_times.items():
        times[name] = (*times.get(name, ()), *more)[:MOST_TRIGGERS]
    return Changes(
        services=one.services | other.services,
        service_objects=one.service_objects | other.service_objects,
        endpoints=one.endpoints | other.endpoints,
        node=one.node or other.node,
        trigger_times=times,
        received=one.received if one.received is not None else other.received,
    )
