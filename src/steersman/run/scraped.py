"""Metrics that are collected when scraped: of values that are known elsewhere.

Each is a row with name, type, labels and meaning, which the reference page (docs/metrics.md) lists.
Metrics that the program counts itself are in metrics.py, series by Service in service_metrics.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from steersman.model.world import ProcessStatus
from steersman.source.base import SourceStats

Samples: TypeAlias = Iterable[tuple[Sequence[str], float]]
"""Values of the labels, and the value of the metric."""
Collect: TypeAlias = Callable[[], Iterator[Metric]]


class Described(NamedTuple):
    """A metric as the reference page lists it."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    """In full, with `_total` if it is a counter."""
    text: str
    """The HELP text, a sentence."""
    labels: tuple[str, ...] = ()

    def of(self, samples: Samples) -> Metric:
        """Return a counter or gauge with these samples."""
        family: CounterMetricFamily | GaugeMetricFamily
        if self.kind == "counter":
            family = CounterMetricFamily(self.name, self.text, labels=self.labels)
        else:
            family = GaugeMetricFamily(self.name, self.text, labels=self.labels)
        for labels, value in samples:
            family.add_metric(labels, value)
        return family

    def at(self, value: float) -> Metric:
        """Return a counter or gauge without labels."""
        return self.of([((), value)])

    def buckets(
        self, rows: Iterable[tuple[Sequence[str], Sequence[tuple[str, float]], float]]
    ) -> Metric:
        """Return a histogram.

        Args:
            rows: values of the labels, cumulated counts by upper bound, and the sum.
        """
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        for labels, counts, total in rows:
            family.add_metric(labels, counts, total)
        return family


CONNTRACK_ENTRIES = Described(
    "gauge", "steersman_conntrack_entries", "Number of entries in the conntrack table."
)
CONNTRACK_LIMIT = Described(
    "gauge",
    "steersman_conntrack_entries_limit",
    "Number of entries that the conntrack table can hold.",
)
NFACCT = {
    "ct_state_invalid_dropped_pkts": Described(
        "counter",
        "kubeproxy_iptables_ct_state_invalid_dropped_packets_total",
        "Number of packets that were dropped because conntrack found them invalid.",
    ),
    "localhost_nps_accepted_pkts": Described(
        "counter",
        "kubeproxy_iptables_localhost_nodeports_accepted_packets_total",
        "Number of packets accepted on node ports of loopback addresses.",
    ),
}
"""nfacct objects of the iptables mode, and the metrics that show them."""
WATCH_ERRORS = Described(
    "counter",
    "steersman_watch_errors_total",
    "Number of failed requests and watches.",
    ("kind", "reason"),
)
SOURCE_CONNECTED = Described(
    "gauge",
    "steersman_source_connected",
    "1 while a watch of this kind of object is open at the API server, else 0.",
    ("kind",),
)
SOURCE_QUIET = Described(
    "gauge",
    "steersman_source_quiet_seconds",
    "Seconds since the API server last sent anything.",
)
CONDITION = Described(
    "gauge",
    "steersman_condition",
    "1 for the status that a condition of the process has (true, false or unknown), else 0.",
    ("condition", "status"),
)
CONDITION_SINCE = Described(
    "gauge",
    "steersman_condition_since_timestamp_seconds",
    "Unix time at which a condition of the process got its status.",
    ("condition",),
)
OLDEST_CHANGE = Described(
    "gauge",
    "steersman_oldest_change_waiting_seconds",
    "Seconds that the oldest change not yet in force has been waiting; 0 if none waits.",
)
SERVICE_PORTS = Described(
    "gauge", "steersman_service_ports", "Number of ServicePorts planned, in both families."
)
SCRAPED = (
    CONNTRACK_ENTRIES,
    CONNTRACK_LIMIT,
    *NFACCT.values(),
    WATCH_ERRORS,
    SOURCE_CONNECTED,
    SOURCE_QUIET,
    CONDITION,
    CONDITION_SINCE,
    OLDEST_CHANGE,
    SERVICE_PORTS,
)
"""The metrics of this module, for the reference page."""


def conntrack_usage(usage: Callable[[], tuple[int, int]]) -> Collect:
    """Return a collection of how full the conntrack table is.

    Args:
        usage: returns entries and maximum; an OSError leaves the metrics out of this scrape.
    """

    def collect() -> Iterator[Metric]:
        try:
            entries, maximum = usage()
        except OSError:
            return
        yield CONNTRACK_ENTRIES.at(entries)
        yield CONNTRACK_LIMIT.at(maximum)

    return collect


def nfacct_packets(packets: Callable[[], Mapping[str, int]]) -> Collect:
    """Return a collection of the iptables mode's nfacct counters.

    Args:
        packets: returns packets by object; the ones that are not there are left out.
    """

    def collect() -> Iterator[Metric]:
        counts = packets()
        for name, metric in NFACCT.items():
            if name in counts:
                yield metric.at(counts[name])

    return collect


def source_state(stats: SourceStats, clock: Callable[[], float]) -> Collect:
    """Return a collection of how the connection to the API server is.

    Args:
        stats: the counters of the source; they are updated while it runs.
        clock: the clock of `stats.last_event`.
    """

    def collect() -> Iterator[Metric]:
        kinds = tuple(stats.kinds.items())
        yield WATCH_ERRORS.of(
            ((kind, reason), count)
            for kind, each in kinds
            for reason, count in tuple(each.errors.items())
        )
        yield SOURCE_CONNECTED.of(((kind,), each.connected) for kind, each in kinds)
        if (last := stats.last_event) is not None:
            yield SOURCE_QUIET.at(max(0.0, clock() - last))

    return collect


def process_state(status: ProcessStatus, waiting: float, service_ports: int) -> Iterator[Metric]:
    """Yield what the process says of itself.

    Args:
        status: the process now, with its conditions.
        waiting: seconds that the oldest change has been waiting.
        service_ports: number of planned ServicePorts.
    """
    conditions = status.conditions
    yield CONDITION.of(
        ((each.type, word.lower()), each.status == word)
        for each in conditions
        for word in ("True", "False", "Unknown")
    )
    yield CONDITION_SINCE.of(((each.type,), each.since) for each in conditions)
    yield OLDEST_CHANGE.at(waiting)
    yield SERVICE_PORTS.at(service_ports)
