"""Connections that the kernel counted, as metrics: asked of the mode at each scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import CancelledError

from prometheus_client.metrics_core import CounterMetricFamily, Metric

from steersman.model.names import ServicePortName
from steersman.model.plan import ServicePlan
from steersman.modes.base import BusyError, Counting, Moved
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

    return collect


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
