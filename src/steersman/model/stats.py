"""Counts that a mode reports: connections, packets and bytes, by Service and for the node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import sub
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from steersman.model.addresses import join_host_port
from steersman.model.names import ServicePortName
from steersman.model.plan import Frontend

N = TypeVar("N", int, float)
T = TypeVar("T")
NODE_PORT = "nodePort:"
"""Prefix of the label of a node port, which is the same in both families."""
StatsKey: TypeAlias = tuple[ServicePortName, str]
"""A ServicePort, and one of its endpoints (as printed) or frontends (see `frontend_label`)."""


class TrafficCounters(NamedTuple):
    """Packets and bytes forwarded to endpoints (in) and back to clients (out)."""

    packets_in: int
    packets_out: int
    bytes_in: int
    bytes_out: int


class DialCounters(NamedTuple):
    """Dials of an endpoint by a proxy in this process."""

    failures: int
    """Dials that were refused or timed out."""
    seconds: float
    """Sum of the durations of successful dials."""


class ProxyTotals(msgspec.Struct, frozen=True):
    """Counts of a proxy in this process, over all Services."""

    failures: int
    seconds: float
    """Sum of the durations of successful dials."""
    buckets: tuple[tuple[float, int], ...]
    """Successful dials by duration: an upper bound in seconds, and those above the last one."""
    open_connections: int
    refused: int
    """Connections and datagrams refused because descriptors ran out."""


class ConnectionStats(msgspec.Struct, frozen=True):
    """Connections per frontend and endpoint, monotonic for as long as these are planned.

    Entries that counted nothing may be missing: a node meets few of a cluster's endpoints.
    """

    frontends: Mapping[StatsKey, int]
    endpoints: Mapping[StatsKey, int]
    traffic_by_frontend: Mapping[StatsKey, TrafficCounters] = {}
    """Empty if the mode counts no packets."""
    traffic_by_endpoint: Mapping[StatsKey, TrafficCounters] = {}
    dials: Mapping[StatsKey, DialCounters] | None = None
    """Dials by endpoint; None if the kernel makes the connections."""

    def of_service(self, name: str) -> ConnectionStats:
        """Return the counts of one Service, by `namespace/name`."""

        def ours(counts: Mapping[StatsKey, T]) -> Mapping[StatsKey, T]:
            return {key: n for key, n in counts.items() if str(key[0].object_name) == name}

        return ConnectionStats(
            ours(self.frontends),
            ours(self.endpoints),
            ours(self.traffic_by_frontend),
            ours(self.traffic_by_endpoint),
            None if self.dials is None else ours(self.dials),
        )


TimedStats: TypeAlias = tuple[float, ConnectionStats | None]
"""Counts on the wire: when they were read, in seconds of a clock that only goes forward; None if
the mode does not count connections, which is another answer than no connections so far."""


class NodeTotals(msgspec.Struct, frozen=True):
    """Counts of the whole node. None or empty: the mode does not count this."""

    connections: int | None = None
    """Connections to endpoints of all Services."""
    traffic: TrafficCounters | None = None
    """Packets and bytes of these connections."""
    events: Mapping[str, int] = {}
    """Events of packets and sockets, such as drops by reason."""
    tables: Mapping[str, tuple[int, int]] = {}
    """Entries and capacity of connection tables when they were last walked."""
    proxy: ProxyTotals | None = None
    """None if the kernel makes the connections."""
    packets: Mapping[str, int] = {}
    """Packets that named counters of rules have counted (nfacct)."""


def increase(before: Sequence[N], now: Sequence[N]) -> tuple[N, ...]:
    """Return by how much counters have grown that are read together.

    If one of them is lower than before, or was not read then, all have restarted at zero.
    """
    if len(before) != len(now) or any(new < old for old, new in zip(before, now, strict=True)):
        return tuple(now)
    return tuple(map(sub, now, before))


def frontend_label(frontend: Frontend) -> str:
    """Return the label of a frontend in metrics: `10.96.0.1:80` or `nodePort:30080`."""
    if not frontend.address:
        return f"{NODE_PORT}{frontend.port}"
    return join_host_port(frontend.address, frontend.port)
