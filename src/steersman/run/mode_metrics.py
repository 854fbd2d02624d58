"""What a mode counts, as metrics: sums for the node, and series by Service if asked for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from steersman.model.errors import ApplyError, BusyError
from steersman.model.plan import ServicePlan
from steersman.model.stats import ConnectionStats, NodeTotals, ProxyTotals, TrafficCounters
from steersman.modes.base import Mode
from steersman.run.service_metrics import Column, Counts, Filter, Ledger, Name, Table, Values, View

_PATIENCE = 5.0  # seconds that a page waits for a mode that is busy
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


class ModeMetrics:
    """What the mode in force counts."""

    def __init__(
        self,
        mode: Mode,
        plans: Callable[[], Collection[ServicePlan]],
        per_service: Callable[[], bool],
    ) -> None:
        """Take the mode; nothing is read before a page is asked for.

        Args:
            mode: its counters are read.
            plans: returns what is in force.
            per_service: returns whether `/metrics` shows all Services (`--metrics-per-service`).
        """
        self._mode = mode
        self._plans = plans
        self._per_service = per_service
        self._ledger = Ledger()
        self._one = asyncio.Lock()

    async def default(self) -> list[Metric]:
        """Return what `/metrics` shows, without what a busy mode does not tell now."""
        found: list[Metric] = []
        try:
            async with asyncio.timeout(_PATIENCE):
                found += await self._totals()
        except (OSError, ApplyError, BusyError):  # TimeoutError is an OSError
            pass
        plans: Iterable[ServicePlan] = tuple(self._plans())
        if not self._per_service():
            plans = [plan for plan in plans if plan.metrics]
        try:
            if plans:
                found += await self._services(plans, lambda ledger: ledger.default)
        except (OSError, ApplyError, BusyError):
            pass
        return found

    async def services(self, which: Filter) -> list[Metric]:
        """Return the series of the Services that a filter is about.

        Raises:
            OSError, ApplyError, BusyError: they cannot be read now.
        """
        return await self._services(tuple(self._plans()), lambda ledger: ledger.view(which))

    async def _services(
        self, listed: Iterable[ServicePlan], view: Callable[[Ledger], View]
    ) -> list[Metric]:
        """Collect once nobody else does; who loses patience leaves the collection to its end."""
        async with asyncio.timeout(_PATIENCE):
            await self._one.acquire()
            task = asyncio.create_task(self._collect(listed, view))
            task.add_done_callback(self._collected)
            return await asyncio.shield(task)

    def _collected(self, task: asyncio.Task[list[Metric]]) -> None:
        self._one.release()
        if not task.cancelled():
            task.exception()  # nobody may be left who waits for it

    async def _collect(
        self, listed: Iterable[ServicePlan], view: Callable[[Ledger], View]
    ) -> list[Metric]:
        counts = await self._read(tuple(self._plans()))

        def collect() -> list[Metric]:
            self._ledger.update(counts())
            return list(view(self._ledger).metrics(listed, self._ledger.counts))

        return await asyncio.to_thread(collect)

    async def _read(self, plans: Collection[ServicePlan]) -> Callable[[], Counts]:
        stats = await self._mode.stats(plans)
        return dict if stats is None else lambda: counts_of(stats)

    async def _totals(self) -> Iterable[Metric]:
        return _node_totals(await self._mode.node_totals())


def counts_of(made: ConnectionStats) -> Counts:
    """Return what a mode has counted as rows."""
    if made.dials is not None:
        moved = made.traffic_by_endpoint
        return {
            _PROXIED: {
                name: (made.endpoints[name], *dials, *moved[name][2:])
                for name, dials in made.dials.items()
            }
        }
    return {
        _BY_ENDPOINT: _rows(made.endpoints, made.traffic_by_endpoint),
        _BY_FRONTEND: _rows(made.frontends, made.traffic_by_frontend),
    }


def _rows(made: Mapping[Name, int], moved: Mapping[Name, TrafficCounters]) -> dict[Name, Values]:
    """Return rows of connections, and of packets and bytes if the mode counts these."""
    return {name: (count, *moved.get(name, ())) for name, count in made.items()}


def _proxy_totals(totals: ProxyTotals) -> Iterator[Metric]:
    """Return the metrics that only a proxy in this process has."""
    yield CounterMetricFamily(
        "steersman_failed_dials_total", "Number of dials refused or not answered.", totals.failures
    )
    dials = HistogramMetricFamily("steersman_dial_seconds", "Seconds until an endpoint answered.")
    ends = ("+Inf" if math.isinf(end) else str(end) for end, _ in totals.buckets)
    sizes = accumulate(size for _, size in totals.buckets)
    dials.add_metric((), list(zip(ends, sizes, strict=True)), totals.seconds)
    yield dials
    yield GaugeMetricFamily(
        "steersman_proxied_connections", "Number of open connections.", totals.open_connections
    )
    yield CounterMetricFamily(
        "steersman_refused_connections_total",
        "Number of connections and datagrams refused for want of descriptors.",
        totals.refused,
    )


def _node_totals(totals: NodeTotals) -> Iterator[Metric]:
    if totals.connections is not None:
        moved = totals.traffic or ()
        packets = moved[:2] if totals.proxy is None else ()
        yield from _forwarded(totals.connections, packets, moved[2:])
    if totals.proxy is not None:
        yield from _proxy_totals(totals.proxy)
    if totals.events:
        events = CounterMetricFamily(
            "steersman_mode_events_total",
            "Number of times that something happened to packets and sockets.",
            labels=("event",),
        )
        for event, count in totals.events.items():
            events.add_metric((event,), count)
        yield events
    if totals.tables:
        used = GaugeMetricFamily(
            "steersman_mode_table_entries",
            "Number of entries in a table of connections.",
            labels=("table",),
        )
        most = GaugeMetricFamily(
            "steersman_mode_table_capacity",
            "Number of entries that a table of connections can hold.",
            labels=("table",),
        )
        for table, (entries, capacity) in totals.tables.items():
            used.add_metric((table,), entries)
            most.add_metric((table,), capacity)
        yield from (used, most)


def _forwarded(
    connections: int, packets: Sequence[int], moved: Sequence[int]
) -> Iterator[CounterMetricFamily]:
    """Return sums over all Services: connections, and packets and bytes if these are counted."""
    yield CounterMetricFamily(
        "steersman_forwarded_connections_total",
        "Number of connections to endpoints of all Services.",
        connections,
    )
    for what, counts in (("packets", packets), ("bytes", moved)):
        if counts:
            family = CounterMetricFamily(
                f"steersman_forwarded_{what}_total",
                f"Number of {what} passed on for all Services.",
                labels=("direction",),
            )
            for direction, count in zip(_BOTH_WAYS, counts, strict=True):
                family.add_metric((direction,), count)
            yield family
