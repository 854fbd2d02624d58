"""The counters of the mode as metrics: sums for the node, and series by Service on request.

A scrape reads the mode's counters (`Mode.totals`, `Mode.stats`) and does not depend on them:
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
from steersman.run.observe.metric_table import MetricTable
from steersman.run.observe.prometheus import Counter, Declared, Metric
from steersman.run.observe.scraped import nfacct_packets
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


def _both_ways(metric: Declared[Counter]) -> tuple[Column, Column]:
    return Column(metric, _BOTH_WAYS[0]), Column(metric, _BOTH_WAYS[1])


_BY_ENDPOINT = Table(
    "endpoint",
    (
        Column(MetricTable.connections),
        *_both_ways(MetricTable.proxied_packets),
        *_both_ways(MetricTable.proxied_bytes),
    ),
)
_BY_FRONTEND = Table(
    "frontend",
    (
        Column(MetricTable.frontend_connections),
        *_both_ways(MetricTable.frontend_packets),
        *_both_ways(MetricTable.frontend_bytes),
    ),
)
_PROXIED = Table(
    "endpoint",
    (
        Column(MetricTable.connections),
        Column(MetricTable.dial_failures),
        Column(MetricTable.endpoint_dial_seconds),
        *_both_ways(MetricTable.proxied_bytes),
    ),
)


class ModeMetrics:
    """Collects the counters of the mode."""

    def __init__(
        self,
        mode: Mode,
        plans: Callable[[], Collection[ServicePlan]],
        per_service: Callable[[], bool],
    ) -> None:
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
                found += _node_totals(await self._mode.worker.do(self._mode.totals))
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
        stats = await self._mode.worker.do_slowly(self._mode.stats(tuple(self._plans())))

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
        yield MetricTable.forwarded_connections.at(totals.connections)
        moved = totals.traffic or ()
        # A proxy in this process counts bytes, but no packets.
        packets = moved[:2] if totals.proxy is None else ()
        for metric, counts in (
            (MetricTable.forwarded_packets, packets),
            (MetricTable.forwarded_bytes, moved[2:]),
        ):
            if counts:
                yield metric.of(((way,), n) for way, n in zip(_BOTH_WAYS, counts, strict=True))
    if (proxy := totals.proxy) is not None:  # only a proxy in this process has these
        yield MetricTable.failed_dials.at(proxy.failures)
        ends = [end for end, _ in proxy.buckets if not math.isinf(end)]
        sizes = [size for _, size in proxy.buckets]
        yield MetricTable.dial_seconds.histogram([((), ends, sizes, proxy.seconds)])
        yield MetricTable.proxied_connections.at(proxy.open_connections)
        yield MetricTable.refused_connections.at(proxy.refused)
    if totals.events:
        yield MetricTable.mode_events.of(
            ((event,), count) for event, count in totals.events.items()
        )
    yield from nfacct_packets(totals.packets)
    if totals.tables:
        rows = totals.tables.items()
        yield MetricTable.table_entries.of(((table,), entries) for table, (entries, _) in rows)
        yield MetricTable.table_capacity.of(((table,), capacity) for table, (_, capacity) in rows)
