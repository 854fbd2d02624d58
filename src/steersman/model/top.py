"""What `steersman top` shows: the state of a process, and counts of ServicePorts."""

from __future__ import annotations

import msgspec

from steersman.model.node_state import NodeState


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
    """The state of the running process, the busiest ServicePorts, and their counts."""

    status: NodeState
    """With more Findings than its own page has."""
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
