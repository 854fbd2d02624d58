"""The one State of the daemon: swapped by reference after each sync, only read by everyone else."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from steersman.compile.plan import PlanChange
from steersman.model.findings import Finding, Severity
from steersman.model.inputs import Snapshot
from steersman.model.plan import NodePlan, NodeSettings
from steersman.model.ruleset import Diff
from steersman.source.store import Changes


class SyncResult(msgspec.Struct, frozen=True):
    """What one sync did."""

    revision: int = 0
    reason: str = ""
    """Why it ran: `changes`, `start`, `drift`, `retry`."""
    dirty: int = 0
    """ServicePorts that were planned and rendered again."""
    added: int = 0
    removed: int = 0
    changed: int = 0
    phases: Mapping[str, float] = {}
    """Seconds spent, by phase: plan, render, read, diff, apply."""
    refused: int = 0
    """Owners whose objects the kernel refuses; each has a Finding."""

    @property
    def wrote(self) -> bool:
        """Whether anything in the kernel changed."""
        return bool(self.added or self.removed or self.changed)

    @property
    def seconds(self) -> float:
        """How long it took altogether."""
        return sum(self.phases.values())

    def __str__(self) -> str:
        """The sentence that is logged."""
        wrote = f"{self.added} added, {self.changed} changed, {self.removed} removed"
        phases = ", ".join(f"{name} {secs * 1e3:.1f}" for name, secs in self.phases.items())
        refused = f"; {self.refused} refused by the kernel" if self.refused else ""
        return (
            f"sync {self.revision} ({self.reason}): {self.dirty} ServicePorts planned, "
            f"kernel objects {wrote} in {self.seconds * 1e3:.1f} ms ({phases}){refused}"
        )


class State(msgspec.Struct, frozen=True):
    """Everything that is reported: health, metrics, explain and dashboards read only this."""

    revision: int = 0
    mode: str = ""
    snapshot: Snapshot = Snapshot()
    plan: NodePlan = NodePlan(NodeSettings(), {})
    result: SyncResult | None = None
    """Of the last sync that reached the kernel; None before the first."""
    findings: tuple[Finding, ...] = ()
    """From sources, compile and kernel."""
    unlisted: Mapping[Severity, int] = {}
    """How many Findings there are beyond those, by severity."""
    objects: int = 0
    """Kernel objects in force."""
    slices: int = 0
    """EndpointSlices that are known."""
    at: float = 0.0
    """When the last sync reached the kernel, in seconds since 1970."""


class Synced(msgspec.Struct, frozen=True):
    """What a successful sync brought into force, for those who tell the world (run/effects.py)."""

    state: State
    result: SyncResult | None
    """None if nothing was to be done for these changes: the kernel has what they ask for."""
    changes: tuple[Changes, ...]
    """What the sources said since the last success; several where a sync failed in between."""
    plans: tuple[PlanChange, ...]
    """What was planned anew, likewise."""
    written: Diff
    """What was written into the kernel."""
    whole: bool
    """The kernel was read and everything compared, not only what changed."""
