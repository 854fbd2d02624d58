"""The state of a running process in a few hundred bytes: the same value for every page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from steersman.model.drift import Drift
from steersman.model.findings import Finding, Severity


class SourceStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The connection of the running process to the cluster."""

    kind: Literal["apiserver", "manifests"] = "manifests"
    server: str = ""
    """URL of the API server in use."""
    connected: bool = True
    failovers: int = 0
    errors: Mapping[str, int] = {}
    """Failed requests so far, by reason."""
    quiet_seconds: float | None = None
    """Seconds since the API server sent anything; None if it never did."""


ConditionStatus: TypeAlias = Literal["True", "False", "Unknown"]


class Condition(msgspec.Struct, frozen=True):
    """A condition of the running process, as those of Kubernetes objects."""

    type: str
    """Its name; True is good."""
    status: ConditionStatus
    reason: str
    """One word, for programs."""
    message: str
    since: float = 0.0
    """When it got this status, in seconds since 1970; 0 if that is not known."""


class NodeState(msgspec.Struct, frozen=True, rename="camel"):
    """A running process, as it describes itself. Times are seconds since 1970."""

    node: str = ""
    """Name of the node."""
    mode: str = ""
    variant: str = ""
    """Tool or flavour of the mode, such as `legacy`."""
    version: str = ""
    """Version of steersman."""
    pid: int = 0
    """In its own pid namespace."""
    started: float = 0.0
    now: float = 0.0
    """When this state was made, by the node's clock."""
    revision: int = 0
    """Number of the last sync."""
    synced_at: float = 0.0
    """When the last sync reached the kernel; 0 before the first."""
    sync_reason: str = ""
    sync_seconds: float = 0.0
    """Duration of the last sync."""
    phases: Mapping[str, float] = {}
    """The same by phase: plan, render, read, diff, apply."""
    lag: float | None = None
    """Seconds between a change at the source and its rules in force, for the last change."""
    lag_p99: float | None = None
    """The same, 99th percentile of the last minutes."""
    owes: bool = False
    """Whether changes wait for the next sync."""
    waiting: str = ""
    """What the process waits for before it syncs; "" if nothing."""
    failure: str = ""
    """Why the last sync failed; "" if it did not."""
    healthy: bool = True
    """The answer of its health server."""
    source: SourceStatus = SourceStatus()
    conditions: tuple[Condition, ...] = ()
    services: int = 0
    service_ports: int = 0
    endpoint_slices: int = 0
    objects: int = 0
    """Kernel objects in force."""
    refused: int = 0
    """Owners whose objects the kernel refuses."""
    findings: tuple[Finding, ...] = ()
    """The worst Findings, bounded in number."""
    finding_counts: Mapping[Severity, int] = {}
    """The number of all Findings, by severity."""
    troubled: tuple[Finding, ...] = ()
    """Services that clients cannot use here, the worst ones, bounded in number."""
    trouble_counts: Mapping[Severity, int] = {}
    """The number of all of them, by severity."""
    drift: Drift | None = None
    """The last drift that was found; None if there was none."""
    repairs: int = 0
    """How often drift was repaired."""
    cpu: float = 0.0
    """Share of a core that the process and the programs that it ran used in the last seconds."""
    cores: int = 0
    """Cores of the machine."""
    memory: int = 0
    """Resident memory in bytes."""
    connections: float | None = None
    """New connections per second through Services; None if they are not counted now."""
    failed: float | None = None
    """Failed connections per second."""
    digest: str = ""
    """Hash of all Services and endpoints, in hexadecimal: equal on nodes that serve the same.
    "" until it is known."""
    families: tuple[str, ...] = ()
    """`IPv4` and `IPv6`, as served."""
    zone: str = ""
    """Zone of the node; "" if it is not known."""
    sync_period: float = 0.0
    """Seconds after which the kernel is compared without a change."""
    min_sync_period: float = 0.0
    """Least seconds between two syncs."""
