"""What went through the userspace proxy, as metrics per endpoint."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from steersman.modes.userspace.apply import Proxy
from steersman.modes.userspace.traffic import LATENCY_BUCKETS, Tally

_LABELS = ("namespace", "service", "port", "protocol", "endpoint")


def proxied(proxy: Proxy) -> Iterator[Metric]:
    """Collect connections, bytes, failed dials and dial latencies; counts never go down."""
    made = CounterMetricFamily(
        "steersman_connections_total", "Connections made to an endpoint", labels=_LABELS
    )
    moved = CounterMetricFamily(
        "steersman_proxied_bytes_total", "Bytes passed on", labels=(*_LABELS, "direction")
    )
    failed = CounterMetricFamily(
        "steersman_dial_failures_total", "Dials refused or not answered", labels=_LABELS
    )
    dials = HistogramMetricFamily(
        "steersman_dial_seconds", "Time until an endpoint answered", labels=_LABELS
    )
    for owner, endpoint, tally in proxy.traffic:
        name = owner.name
        labels = (name.namespace, name.service, name.port, str(name.protocol), str(endpoint))
        made.add_metric(labels, tally.connections)
        failed.add_metric(labels, tally.failures)
        moved.add_metric((*labels, "to_endpoint"), tally.moved[0])
        moved.add_metric((*labels, "to_client"), tally.moved[1])
        dials.add_metric(labels, _buckets(tally), tally.dial_seconds)
    yield from (made, moved, failed, dials)
    yield GaugeMetricFamily(
        "steersman_proxied_connections", "Connections now", proxy.open_connections
    )
    yield CounterMetricFamily(
        "steersman_refused_connections_total",
        "Connections and datagrams refused for want of descriptors",
        proxy.room.refused,
    )


def _buckets(tally: Tally) -> list[tuple[str, float]]:
    """Cumulative counts by upper end."""
    ends, total = (*map(str, LATENCY_BUCKETS), "+Inf"), 0
    out: list[tuple[str, float]] = []
    for end, count in zip(ends, tally.dial_buckets, strict=True):
        total += count
        out.append((end, total))
    return out
