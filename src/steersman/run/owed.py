"""What is owed to the kernel: changes that were seen and are not known to be in force. Pure.

Theory. A change passes four places, and is a debt until the kernel has it:

    Store --take--> changed --plan--> unrendered --render--> Holdings (dirty) --write--> kernel

Nothing leaves a place before it is in the next one, so that an exception or a cancelled task at any
await leaves the debt where it was, and the next run goes on from there. Beside the changes there is
what we believe about the kernel, as two facts that only a run clears:

    unread      a write is under way or did not end well, or nothing was read yet: read everything
    suspected   somebody else may have touched our objects: compare the fingerprint, then decide

`unread` is set before a write begins and cleared after it succeeded, so that no kind of failure has
to be thought of. Retry, drift, reload and restart are all the same: run until nothing is owed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from steersman.compile.plan import PlanChange
from steersman.model.names import ObjectName, PlanKey
from steersman.model.plan import ServicePlan
from steersman.source.store import MOST_TRIGGERS, Changes


class Owed:
    """The account of one Sync; `nothing` says whether it is settled."""

    def __init__(self) -> None:
        """Start with everything owed: nothing was planned, rendered or read yet."""
        self.changed: set[ObjectName] = set()
        """Services that changed and are not planned."""
        self.unplanned: set[ObjectName] = set()
        """Services that a defect kept from being planned: tried again with the next comparison."""
        self.replan = True
        """The settings of the node, or a new Planner, are not planned."""
        self.node = False
        """The node's own part is planned and not rendered."""
        self.unrendered: dict[PlanKey, ServicePlan | None] = {}
        """Plans that are not rendered; None for one that is gone."""
        self.unread = True
        """It is not known whether the kernel has what Holdings say."""
        self.suspected = False
        """Somebody else may have changed objects of ours."""
        self.failed = False
        """The last run failed."""
        self._changes = Changes()
        self._plans = PlanChange()

    @property
    def nothing(self) -> bool:
        """Whether the kernel has everything, as far as rendered objects are concerned."""
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
        """Add what the Store has gathered since the last call."""
        self.changed |= changes.services
        self.replan |= changes.node
        self._changes = _united(self._changes, changes)

    def planned(self, change: PlanChange) -> None:
        """Move what changed to what is not rendered: this is what a Planner made of it."""
        self.changed.clear()
        self.unplanned |= change.failed
        self.node |= change.settings_changed
        self.unrendered.update(dict.fromkeys(change.removed))
        self.unrendered.update(change.changed)
        self._plans = _followed(self._plans, change)

    def retry_unplanned(self) -> None:
        """Plan again what a defect kept from being planned."""
        self.changed |= self.unplanned
        self.unplanned.clear()

    # The kernel

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write to the kernel: unless the block ends well, everything is to be read again."""
        before, self.unread = self.unread, True
        yield
        self.unread = before

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look whether somebody touched the kernel: what is suspected meanwhile stays so."""
        before, self.suspected = self.suspected, False
        try:
            yield
        except BaseException:
            self.suspected |= before
            raise

    # The reports

    @property
    def unreported(self) -> Iterable[PlanKey]:
        """Plans that the next report adds or changes."""
        return self._plans.changed.keys()

    def settle(self) -> tuple[Changes, PlanChange]:
        """Return everything taken and planned since the last call: it is in force now."""
        settled = self._changes, self._plans
        self._changes, self._plans = Changes(), PlanChange()
        self.failed = False
        return settled


def _followed(one: PlanChange, other: PlanChange) -> PlanChange:
    """Return two changes of a plan, one after the other, as one."""
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
    )
