"""Connections that the kernel counted, as metrics: asked of the mode at each scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import CancelledError

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from steersman.model.names import ServicePortName
from steersman.model.plan import ServicePlan
from steersman.modes.base import BusyError, Counting, Made, Moved
from steersman.run.metrics import Connections, connections

_PATIENCE = 5.0  # seconds that a scrape waits for a sync to end


def counted(
    mode: Counting,
    plans: Callable[[], Collection[ServicePlan]],
    loop: asyncio.AbstractEventLoop,
) -> Callable[[], Iterator[Metric]]:
    """Return a collection of connections by endpoint and by frontend; left out while busy.

    Args:
        mode: who counts.
        plans: returns what is in force.
        loop: where the mode lives; the collection is made in another thread.
    """

    def collect() -> Iterator[Metric]:
        future = asyncio.run_coroutine_threadsafe(mode.made(plans()), loop)
        try:
            made = future.result(_PATIENCE)
        except (TimeoutError, CancelledError, BusyError):
            future.cancel()
            return
        rows = [Connections(*name, end, count) for (name, end), count in made.endpoints.items()]
        yield from connections(lambda: rows)()
        labels = ("namespace", "service", "port", "protocol", "frontend")
        family = CounterMetricFamily(
            "steersman_frontend_connections_total", "Connections to a destination", labels=labels
        )
        for (name, frontend), count in made.frontends.items():
            family.add_metric((*name, frontend), count)
        yield family
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
    packets = CounterMetricFamily(
        f"steersman_{word}_packets_total", "Packets passed on", labels=labels
    )
    moved = CounterMetricFamily(f"steersman_{word}_bytes_total", "Bytes passed on", labels=labels)
    for (name, end), count in counts.items():
        packets.add_metric((*name, end, "to_endpoint"), count.packets_in)
        packets.add_metric((*name, end, "to_client"), count.packets_out)
        moved.add_metric((*name, end, "to_endpoint"), count.bytes_in)
        moved.add_metric((*name, end, "to_client"), count.bytes_out)
    yield from (packets, moved)
