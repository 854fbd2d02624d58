"""Connections that the kernel counted, as metrics: asked of the mode at each scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from steersman.model.names import ServicePortName
from steersman.model.plan import ServicePlan
from steersman.modes.base import ApplyError, BusyError, Counting, Made, Moved
from steersman.run.exposition import Series
from steersman.run.metrics import Connections, connections

_PATIENCE = 5.0  # seconds that a scrape waits for a sync to end


def counted(
    mode: Counting,
    plans: Callable[[], Collection[ServicePlan]],
    loop: asyncio.AbstractEventLoop,
) -> Callable[[], Iterator[Metric]]:
    """Return a collection of connections by endpoint and by frontend; left out where it cannot
    be had now.

    Args:
        mode: who counts.
        plans: returns what is in force.
        loop: where the mode lives; the collection is made in another thread.
    """

    async def ask() -> Made:
        return await mode.made(tuple(plans()))  # on the loop, where nobody changes them meanwhile

    def collect() -> Iterator[Metric]:
        future = asyncio.run_coroutine_threadsafe(ask(), loop)
        try:
            made = future.result(_PATIENCE)
        except (OSError, CancelledError, ApplyError, BusyError):  # TimeoutError is an OSError
            future.cancel()
            return
        rows = (Connections(*name, end, count) for (name, end), count in made.endpoints.items())
        yield from connections(lambda: rows)()
        yield Series(
            "steersman_frontend_connections_total",
            "Connections to a destination",
            ("namespace", "service", "port", "protocol", "frontend"),
            (((*name, frontend), count) for (name, frontend), count in made.frontends.items()),
        )
        yield from _moved(made.moved_by_endpoint, "endpoint", "proxied")
        yield from _moved(made.moved_by_frontend, "frontend", "frontend")
        yield from _happened(made)

    return collect


def _happened(made: Made) -> Iterator[Metric]:
    """What a mode with programs and tables of its own says of them."""
    if made.events:
        events = CounterMetricFamily(
            "steersman_mode_events_total", "What happened to packets and sockets", labels=("event",)
        )
        for event, count in made.events.items():
            events.add_metric((event,), count)
        yield events
    if made.tables:
        names = ("steersman_mode_table_entries", "steersman_mode_table_capacity")
        used = GaugeMetricFamily(names[0], "Entries of a table of connections", labels=("table",))
        most = GaugeMetricFamily(names[1], "How many it can have", labels=("table",))
        for table, (entries, capacity) in made.tables.items():
            used.add_metric((table,), entries)
            most.add_metric((table,), capacity)
        yield from (used, most)


def _moved(
    counts: Mapping[tuple[ServicePortName, str], Moved], label: str, word: str
) -> Iterator[Metric]:
    """Packets and bytes, where the mode counts them."""
    if not counts:
        return
    labels = ("namespace", "service", "port", "protocol", label, "direction")
    name = f"steersman_{word}"
    packets = ((name, count[:2]) for name, count in counts.items())
    yield Series(f"{name}_packets_total", "Packets passed on", labels, _both_ways(packets))
    moved = ((name, count[2:]) for name, count in counts.items())
    yield Series(f"{name}_bytes_total", "Bytes passed on", labels, _both_ways(moved))


def _both_ways(
    counts: Iterable[tuple[tuple[ServicePortName, str], tuple[int, ...]]],
) -> Iterator[tuple[tuple[str, ...], int]]:
    for (name, end), (there, back) in counts:
        yield (*name, end, "to_endpoint"), there
        yield (*name, end, "to_client"), back
