"""What a process says of itself: its state in a few hundred bytes, and a sample of its counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from steersman.model.drift import Drift
from steersman.model.findings import Finding, Severity
from steersman.model.world import Condition, ProcessStatus, SourceStatus


class NodeState(msgspec.Struct, frozen=True, rename="camel"):
    """A running process, as it describes itself to pages. Times are seconds since 1970."""

    node: str
    """Name of the node."""
    mode: str
    variant: str = ""
    """Tool or flavour of the mode, such as `legacy`."""
    version: str = ""
    """Version of steersman."""
    pid: int = 0
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


class RunRequest(msgspec.Struct, frozen=True):
    """A command that a page asks a node to run: `POST /run`."""

    command: str
    """doctor, dump, explain or trace."""
    arguments: tuple[str, ...] = ()
    """Its names and flags, such as `shop/web` and `--from=outside`."""


class RunLine(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A line of the answer to a RunRequest. The last one has an exit code."""

    running: float = 0.0
    """Seconds that the command has run so far."""
    exit_code: int | None = None
    """0 fine, 1 something is wrong, 2 the question could not be answered."""
    answer: Any = None
    """What the command prints with `-o json`."""
    error: str = ""
    """Why there is no answer; "" if there is one."""


# -- What `steersman top` shows: a sample of the state and the counters ----------------------------


class TopRow(msgspec.Struct, frozen=True, rename="camel"):
    """The counts of a ServicePort, or of one of its endpoints. None: the mode does not know."""

    name: str
    """`shop/web:http`, or the address and port of an endpoint."""
    protocol: str = "TCP"
    endpoints: int = 0
    """Endpoints that clients can be sent to."""
    connections: int | None = None
    """So far."""
    rate: float | None = None
    """New connections per second."""
    failures: int | None = None
    """Failed dials of endpoints so far."""
    failure_rate: float | None = None
    """Failed dials per second."""
    latency: float | None = None
    """Seconds until an endpoint answered, on average since the last sample; None also if no
    connection was made."""


class TopSample(msgspec.Struct, frozen=True, rename="camel"):
    """A summary of the running process, the busiest ServicePorts, and their counts."""

    status: ProcessStatus
    mode: str
    node: str = ""
    services: int = 0
    """Number of Services that are served."""
    service_ports: int = 0
    findings: tuple[Finding, ...] = ()
    """The first of them, errors first."""
    finding_counts: Mapping[str, int] = {}
    """Number of all Findings, by severity."""
    drift: int = 0
    """How often changes by other programs were repaired."""
    last_drift: str = ""
    last_drift_at: float = 0.0
    """Seconds since 1970."""
    counted: bool = False
    """Whether the mode counts connections."""
    total: TopRow = TopRow("all")
    """The sums over all ServicePorts."""
    open_connections: int | None = None
    """Connections open now; None if the mode does not know."""
    interval: float = 0.0
    """Seconds between the two counts that rates are from; 0 if there was only one."""
    matching: int = 0
    """Number of ServicePorts (or endpoints) that match; `rows` has the first of them."""
    rows: tuple[TopRow, ...] = ()
    problem: str = ""
    """Why connections cannot be counted now."""
