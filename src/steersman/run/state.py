"""The State of the daemon, replaced as a whole after each sync; all others only read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from steersman.compile.planner import PlanChange
from steersman.model.findings import Finding, Severity
from steersman.model.inputs import Snapshot
from steersman.model.plan import NodePlan, NodeSettings
from steersman.model.ruleset import Diff
from steersman.source.store import Changes


class SyncResult(msgspec.Struct, frozen=True):
    """The work of one sync."""

    revision: int = 0
    reason: str = ""
    """Why the sync ran: `changes`, `start`, `drift`, `retry`."""
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
        """Return the sentence for the log."""
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


class SyncReport(msgspec.Struct, frozen=True):
    """A successful sync, for the observers (run/observers.py)."""

    state: State
    result: SyncResult | None
    """None if the kernel already had everything these changes ask for."""
    changes: Changes
    """Changes that the sources delivered since the last report."""
    plans: PlanChange
    """Plans that changed since the last report."""
    written: Diff
    """Objects written into the kernel by this sync."""
    compared: bool
    """The kernel was read and compared as a whole, not only updated by the changes."""
    refused_batches: RefusedBatches = RefusedBatches()
    """Whole batches that the kernel refused since the last report."""
