"""The counters of the mode as metrics: sums for the node, and series by Service on request.

A scrape reads the mode's counters (`Mode.node_totals`, `Mode.stats`) and does not depend on them:
if the mode is busy or fails, `/metrics` lacks these series. One collection runs at a time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Iterator

from steersman.model.errors import ApplyError, BusyError
from steersman.model.plan import ServicePlan
from steersman.model.stats import ConnectionStats, NodeTotals
from steersman.modes.base import Mode
from steersman.run.observe.prometheus import Described, Metric
from steersman.run.observe.service_metrics import (
    Column,
    Counts,
    Ledger,
    Name,
    ServiceFilter,
    Table,
    Values,
    View,
)

_TIMEOUT = 5.0  # seconds that a page waits for a busy mode
_BOTH_WAYS = ("to_endpoint", "to_client")


def _both_ways(metric: str, text: str) -> tuple[Column, Column]:
    return Column(metric, text, _BOTH_WAYS[0]), Column(metric, text, _BOTH_WAYS[1])


_CONNECTIONS = Column("steersman_connections_total", "Number of connections made to an endpoint.")
_BYTES = _both_ways("steersman_proxied_bytes_total", "Number of bytes passed on for an endpoint.")
_BY_ENDPOINT = Table(
    "endpoint",
    (
        _CONNECTIONS,
        *_both_ways("steersman_proxied_packets_total", "Number of packets of an endpoint."),
        *_BYTES,
    ),
)
_BY_FRONTEND = Table(
    "frontend",
    (
        Column("steersman_frontend_connections_total", "Number of connections to a destination."),
        *_both_ways("steersman_frontend_packets_total", "Number of packets of a destination."),
        *_both_ways("steersman_frontend_bytes_total", "Number of bytes of a destination."),
    ),
)
_PROXIED = Table(
    "endpoint",
    (
        _CONNECTIONS,
        Column("steersman_dial_failures_total", "Number of dials refused or not answered."),
        Column("steersman_endpoint_dial_seconds_total", "Seconds until an endpoint answered."),
        *_BYTES,
    ),
)
TABLES = (_BY_ENDPOINT, _BY_FRONTEND, _PROXIED)
"""All series by Service."""

FORWARDED_CONNECTIONS = Described(
    "counter",
    "steersman_forwarded_connections_total",
    "Number of connections to endpoints of all Services.",
)
FORWARDED_PACKETS = Described(
    "counter",
    "steersman_forwarded_packets_total",
    "Number of packets passed on for all Services.",
    ("direction",),
)
FORWARDED_BYTES = Described(
    "counter",
    "steersman_forwarded_bytes_total",
    "Number of bytes passed on for all Services.",
    ("direction",),
)
FAILED_DIALS = Described(
    "counter", "steersman_failed_dials_total", "Number of dials refused or not answered."
)
DIAL_SECONDS = Described(
    "histogram", "steersman_dial_seconds", "Seconds until an endpoint answered."
)
PROXIED = Described("gauge", "steersman_proxied_connections", "Number of open connections.")
REFUSED = Described(
    "counter",
    "steersman_refused_connections_total",
    "Number of connections and datagrams refused for want of descriptors.",
)
MODE_EVENTS = Described(
    "counter",
    "steersman_mode_events_total",
    "Number of times that something happened to packets and sockets.",
    ("event",),
)
TABLE_ENTRIES = Described(
    "gauge",
    "steersman_mode_table_entries",
    "Number of entries in a table of connections.",
    ("table",),
)
TABLE_CAPACITY = Described(
    "gauge",
    "steersman_mode_table_capacity",
    "Number of entries that a table of connections can hold.",
    ("table",),
)
SUMS = (
    *(FORWARDED_CONNECTIONS, FORWARDED_PACKETS, FORWARDED_BYTES),
    *(FAILED_DIALS, DIAL_SECONDS, PROXIED, REFUSED),
    *(MODE_EVENTS, TABLE_ENTRIES, TABLE_CAPACITY),
)
"""All sums over Services; modes have some of them (`ModeSpec.sums`)."""


class ModeMetrics:
    """Collects the counters of the mode."""

    def __init__(
        self,
        mode: Mode,
        plans: Callable[[], Collection[ServicePlan]],
        per_service: Callable[[], bool],
    ) -> None:
        """Create it; nothing is read before a page is requested.

        Args:
            mode: the mode whose counters are read.
            plans: returns the plans that are in force.
            per_service: returns whether `/metrics` shows all Services (`--metrics-per-service`).
        """
        self._mode = mode
        self._plans = plans
        self._per_service = per_service
        self._ledger = Ledger()
        self._one = asyncio.Lock()

    def use_mode(self, mode: Mode) -> None:
        """Read the counters of another mode from now on; its counts begin at zero."""
        self._mode = mode

    async def default(self) -> list[Metric]:
        """Return the metrics for `/metrics`, without those that a busy mode cannot read now."""
        found: list[Metric] = []
        try:
            async with asyncio.timeout(_TIMEOUT):
                found += _node_totals(await self._mode.node_totals())
        except (OSError, ApplyError, BusyError):  # TimeoutError is an OSError
            pass
        # Series by Service: of all if configured, else of those with the annotation.
        plans: Iterable[ServicePlan] = tuple(self._plans())
        if not self._per_service():
            plans = [plan for plan in plans if plan.metrics]
        try:
            if plans:
                found += await self._services(plans, lambda ledger: ledger.default)
        except (OSError, ApplyError, BusyError):
            pass
        return found

    async def services(self, which: ServiceFilter) -> list[Metric]:
        """Return the series of the Services that match a filter.

        Raises:
            OSError, ApplyError, BusyError: they cannot be read now.
        """
        return await self._services(tuple(self._plans()), lambda ledger: ledger.view(which))

    async def _services(
        self, listed: Iterable[ServicePlan], view: Callable[[Ledger], View]
    ) -> list[Metric]:
        """Collect when no other collection runs; after a timeout, it goes on without the client."""
        async with asyncio.timeout(_TIMEOUT):
            await self._one.acquire()
            task = asyncio.create_task(self._collect(listed, view))

            def done(task: asyncio.Task[list[Metric]]) -> None:
                self._one.release()
                if not task.cancelled():
                    task.exception()  # mark it as retrieved: the client may have gone

            task.add_done_callback(done)
            return await asyncio.shield(task)

    async def _collect(
        self, listed: Iterable[ServicePlan], view: Callable[[Ledger], View]
    ) -> list[Metric]:
        stats = await self._mode.stats(tuple(self._plans()))

        def collect() -> list[Metric]:
            self._ledger.update({} if stats is None else counts_of(stats))
            return list(view(self._ledger).metrics(listed, self._ledger.counts))

        return await asyncio.to_thread(collect)


def counts_of(stats: ConnectionStats) -> Counts:
    """Return the counters of a mode as rows: connections, packets and bytes as far as counted."""
    if stats.dials is not None:  # a proxy in this process counts bytes, but no packets
        traffic = stats.traffic_by_endpoint
        rows = {
            name: (stats.endpoints[name], *dials, *traffic[name][2:])
            for name, dials in stats.dials.items()
        }
        return {_PROXIED: rows}
    counts: dict[Table, dict[Name, Values]] = {}
    for table, connections, by_name in (
        (_BY_ENDPOINT, stats.endpoints, stats.traffic_by_endpoint),
        (_BY_FRONTEND, stats.frontends, stats.traffic_by_frontend),
    ):
        counts[table] = {name: (n, *by_name.get(name, ())) for name, n in connections.items()}
    return counts


def _node_totals(totals: NodeTotals) -> Iterator[Metric]:
    if totals.connections is not None:
        yield FORWARDED_CONNECTIONS.at(totals.connections)
        moved = totals.traffic or ()
        # A proxy in this process counts bytes, but no packets.
        packets = moved[:2] if totals.proxy is None else ()
        for metric, counts in ((FORWARDED_PACKETS, packets), (FORWARDED_BYTES, moved[2:])):
            if counts:
                yield metric.of(((way,), n) for way, n in zip(_BOTH_WAYS, counts, strict=True))
    if (proxy := totals.proxy) is not None:  # only a proxy in this process has these
        yield FAILED_DIALS.at(proxy.failures)
        ends = [end for end, _ in proxy.buckets if not math.isinf(end)]
        sizes = [size for _, size in proxy.buckets]
        yield DIAL_SECONDS.buckets([((), ends, sizes, proxy.seconds)])
        yield PROXIED.at(proxy.open_connections)
        yield REFUSED.at(proxy.refused)
    if totals.events:
        yield MODE_EVENTS.of(((event,), count) for event, count in totals.events.items())
    if totals.tables:
        rows = totals.tables.items()
        yield TABLE_ENTRIES.of(((table,), entries) for table, (entries, _) in rows)
        yield TABLE_CAPACITY.of(((table,), capacity) for table, (_, capacity) in rows)
