"""The State of the daemon: replaced as a whole after each sync, only read by all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from steersman.compile.findings import FindingIndex
from steersman.model import codes
from steersman.model.drift import Drift
from steersman.model.findings import Finding, Severity
from steersman.model.inputs import Snapshot
from steersman.model.names import ObjectName, Owner, PlanKey
from steersman.model.plan import NodePlan, NodeSettings
from steersman.model.ruleset import Diff
from steersman.run.sync.ledger import ADOPTED
from steersman.source.store import Arrivals


class SyncResult(msgspec.Struct, frozen=True):
    """The work of one sync."""

    revision: int = 0
    reason: str = ""
    """Why the sync ran: `changes`, `start`, `retry`, `drift` if another program changed the kernel,
    or `comparison` if it looked for that, found nothing and had nothing else to do."""
    dirty: int = 0
    """Number of ServicePorts that were planned and rendered again."""
    added: int = 0
    removed: int = 0
    changed: int = 0
    phases: Mapping[str, float] = {}
    """Seconds spent, by phase: plan, render, read, diff, apply."""
    refused: int = 0
    """Number of owners whose objects the kernel refuses; each has a Finding."""

    @property
    def wrote(self) -> bool:
        """Whether anything in the kernel changed."""
        return bool(self.added or self.removed or self.changed)

    @property
    def seconds(self) -> float:
        """Duration of all phases."""
        return sum(self.phases.values())

    def __str__(self) -> str:
        wrote = f"{self.added} added, {self.changed} changed, {self.removed} removed"
        phases = ", ".join(f"{name} {secs * 1e3:.1f}" for name, secs in self.phases.items())
        refused = f"; {self.refused} refused by the kernel" if self.refused else ""
        return (
            f"sync {self.revision} ({self.reason}): {self.dirty} ServicePorts planned, "
            f"kernel objects {wrote} in {self.seconds * 1e3:.1f} ms ({phases}){refused}"
        )


class State(msgspec.Struct, frozen=True):
    """Everything that is reported: health, metrics and `/state` read only this."""

    revision: int = 0
    mode: str = ""
    snapshot: Snapshot = Snapshot()
    plan: NodePlan = NodePlan(NodeSettings(), {})
    result: SyncResult | None = None
    """Result of the last sync that reached the kernel; None before the first."""
    findings: tuple[Finding, ...] = ()
    """Findings of sources, compile and kernel."""
    unlisted: Mapping[Severity, int] = {}
    """Number of further Findings, by severity."""
    objects: int = 0
    """Number of kernel objects in force."""
    slices: int = 0
    """Number of EndpointSlices."""
    at: float = 0.0
    """Time when the last sync reached the kernel, in seconds since 1970."""


class RefusedBatches(NamedTuple):
    """Number of batches that the kernel refused before they were bisected."""

    full: int = 0
    """Batches of the difference to the whole kernel."""
    partial: int = 0
    """Batches of changes only."""

    def plus(self, partial: bool) -> RefusedBatches:
        """Return the numbers after one more batch."""
        return RefusedBatches(self.full + (not partial), self.partial + partial)


class Written(msgspec.Struct, frozen=True):
    """The kernel objects that a sync wrote: how many, and which if it is known."""

    added: int = 0
    removed: int = 0
    changed: int = 0
    diff: Diff = Diff()
    """Empty if an empty kernel was filled in parts: all of them at once take as much memory as the
    rest of the process."""

    @classmethod
    def by(cls, *steps: Diff) -> Written:
        """Return what was written by Diffs, each after the other."""
        if len(steps) == 1:
            change = steps[0]
        else:
            change = Diff({}, {}, {})
            for step in steps:
                change.include(step)
        return cls(len(change.added), len(change.removed), len(change.changed), change)

    def __len__(self) -> int:
        return self.added + self.removed + self.changed


class SyncReport(msgspec.Struct, frozen=True):
    """A successful sync, for the observers (run/observe/observers.py)."""

    state: State
    result: SyncResult | None
    """None if the kernel already had everything these changes ask for."""
    arrivals: Arrivals
    """When the changes of the Store came that are in force since this sync."""
    written: Written
    """Objects written into the kernel by this sync."""
    compared: bool
    """The kernel was read and compared as a whole, not only updated by the changes."""
    refused_batches: RefusedBatches = RefusedBatches()
    """Whole batches that the kernel refused since the last report."""
    drift: Drift | None = None
    """The changes by other programs that this sync, or failed ones before it, found."""
    refusals: tuple[tuple[str, str], ...] = ()
    """The first owners whose objects are not in the kernel, and why."""
    seen: Mapping[str, int] = {}
    """Number of changes of the Store so far that are in force, by kind."""


def unwritten_findings(
    mode: str, rejected: Mapping[Owner, str], broken: Mapping[Owner, str]
) -> FindingIndex:
    """Return Findings about owners without their objects, bounded as those of plans.

    `rejected` has the errors of the kernel, `broken` those of rendering.
    """
    by_object: dict[ObjectName, list[Finding]] = {}
    reasons = [
        (owner, f"the kernel refuses its rules ({why})" if owner != ADOPTED else why, codes.REFUSED)
        for owner, why in rejected.items()
    ]
    reasons += [
        (owner, f"its rules cannot be rendered ({why}), please report this", codes.DEFECT)
        for owner, why in broken.items()
    ]
    for owner, why, code in reasons:
        name, text = ObjectName("", ""), f"{mode}: {why}; what it had before stays in force"
        if isinstance(owner, PlanKey):
            name, field = owner.name.object_name, f"port {owner}"
            finding = Finding(f"Service {name}", field, text, Severity.ERROR, code)
        elif owner == ADOPTED:
            finding = Finding(ADOPTED, "", f"{mode}: {why}", code=codes.LEFTOVERS)
        else:
            finding = Finding(owner, "", text, Severity.ERROR, code)
        by_object.setdefault(name, []).append(finding)
    index = FindingIndex()
    for name, findings in by_object.items():
        index.put(name, findings)
    return index
