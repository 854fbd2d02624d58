"""What `steersman top` shows of the running process: a sample of its state and counters."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from steersman.model.findings import Finding
from steersman.model.world import ProcessStatus


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
