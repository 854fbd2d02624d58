"""Every metric, as tables: upstream's by name, type, labels and buckets (behaviour 14), and ours.

Nothing else counts anything. Each `Metrics` has a registry of its own, so that several can live in
one process; what is known elsewhere (conntrack, kernel counters) is asked for when scraped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from steersman import __version__
from steersman.model.names import Family
from steersman.run.exposition import exposition

SYNC_BUCKETS = tuple(0.001 * 2**k for k in range(15))
PROGRAMMING_BUCKETS = (
    0.25,
    0.5,
    *(float(n) for n in range(1, 60)),
    *(float(n) for n in range(60, 116, 5)),
    *(float(n) for n in range(120, 301, 30)),
)
_PHASE_BUCKETS = tuple(0.0001 * 4**k for k in range(10))

Kind = Literal["counter", "gauge", "histogram"]
AnyMetric = Counter | Gauge | Histogram
MetricT = TypeVar("MetricT", Counter, Gauge, Histogram)


class Row(NamedTuple):
    """One metric."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SYNC_BUCKETS
    modes: tuple[str, ...] = ()
    """The modes that have it; () for all."""
    refusals: Literal["", "all", "partial"] = ""
    """Counts the batches that the kernel refused: all of them, or those of only what changed."""


_F = ("ip_family",)
_SYNCED = ("iptables", "nftables")
_TABLES = ("iptables", "ipvs")

UPSTREAM: tuple[Row, ...] = (
    Row("sync_proxy_rules_duration_seconds", "histogram", "Seconds that a sync took.", _F),
    Row(
        "sync_full_proxy_rules_duration_seconds",
        "histogram",
        "Seconds that a full sync took.",
        _F,
        modes=_SYNCED,
    ),
    Row(
        "sync_partial_proxy_rules_duration_seconds",
        "histogram",
        "Seconds that a sync of only the changes took.",
        _F,
        modes=_SYNCED,
    ),
    Row(
        "network_programming_duration_seconds",
        "histogram",
        "Seconds from the change of an endpoint (its trigger time) until it is in force.",
        _F,
        PROGRAMMING_BUCKETS,
    ),
    Row(
        "sync_proxy_rules_last_timestamp_seconds",
        "gauge",
        "Unix time of the last successful sync.",
        _F,
    ),
    Row(
        "sync_proxy_rules_last_queued_timestamp_seconds",
        "gauge",
        "Unix time at which a sync was last queued.",
        _F,
    ),
    Row(
        "sync_proxy_rules_endpoint_changes_pending",
        "gauge",
        "Number of endpoint changes not yet synced.",
    ),
    Row("sync_proxy_rules_endpoint_changes_total", "counter", "Number of endpoint changes seen."),
    Row(
        "sync_proxy_rules_service_changes_pending",
        "gauge",
        "Number of Service changes not yet synced.",
    ),
    Row("sync_proxy_rules_service_changes_total", "counter", "Number of Service changes seen."),
    Row(
        "sync_proxy_rules_iptables_total",
        "gauge",
        "Number of rules in the kernel that belong to the proxy.",
        ("table", *_F),
        modes=_TABLES,
    ),
    Row(
        "sync_proxy_rules_iptables_last",
        "gauge",
        "Number of rules that the last sync wrote.",
        ("table", *_F),
        modes=_TABLES,
    ),
    Row(
        "sync_proxy_rules_iptables_restore_failures_total",
        "counter",
        "Number of iptables-restore runs that failed.",
        _F,
        modes=_TABLES,
        refusals="all",
    ),
    Row(
        "sync_proxy_rules_iptables_partial_restore_failures_total",
        "counter",
        "Number of iptables-restore runs that failed while only changes were written.",
        _F,
        modes=("iptables",),
        refusals="partial",
    ),
    Row(
        "sync_proxy_rules_nftables_sync_failures_total",
        "counter",
        "Number of nftables transactions that the kernel refused.",
        _F,
        modes=("nftables",),
        refusals="all",
    ),
    Row(
        "sync_proxy_rules_nftables_cleanup_failures_total",
        "counter",
        "Number of removals of leftovers that the kernel refused.",
        _F,
        modes=("nftables",),
    ),
    Row(
        "sync_proxy_rules_no_local_endpoints_total",
        "gauge",
        "Number of ServicePorts with a Local policy that have endpoints, but none on this node.",
        ("traffic_policy", *_F),
    ),
    Row("proxy_healthz_total", "counter", "Number of answers of /healthz.", ("code",)),
    Row("proxy_livez_total", "counter", "Number of answers of /livez.", ("code",)),
    Row(
        "conntrack_reconciler_sync_duration_seconds",
        "histogram",
        "Seconds that a conntrack clean-up took.",
        _F,
    ),
    Row(
        "conntrack_reconciler_deleted_entries_total",
        "counter",
        "Number of stale conntrack entries deleted.",
        _F,
    ),
)
"""Upstream's metrics; the prefix `kubeproxy_` is left out here."""

OURS: tuple[Row, ...] = (
    Row(
        "findings",
        "gauge",
        "Number of current problems with objects or configuration.",
        ("severity",),
    ),
    Row(
        "sync_phase_seconds",
        "histogram",
        "Seconds that a phase of a sync took.",
        ("phase",),
        _PHASE_BUCKETS,
    ),
    Row("syncs_total", "counter", "Number of syncs by reason and outcome.", ("reason", "outcome")),
    Row("kernel_objects", "gauge", "Number of kernel objects of the proxy in force."),
    Row("kernel_writes_total", "counter", "Number of kernel objects written.", ("change",)),
    Row("refused_service_ports", "gauge", "Number of ServicePorts that the kernel refuses."),
    Row(
        "mode_fallback", "gauge", "1 if another mode than the wanted one runs.", ("wanted", "used")
    ),
)
"""Beyond upstream, with the prefix `steersman_`."""


class Metrics:
    """The metrics of one process in one mode."""

    def __init__(self, mode: str, families: Sequence[Family] = tuple(Family)) -> None:
        """Make all that the mode has, at zero.

        Args:
            mode: name of the mode.
            families: those served; their series exist from the start.
        """
        disable_created_metrics()  # type: ignore[no-untyped-call]  # upstream has no *_created series
        self.registry = CollectorRegistry()
        self._by_name: dict[str, AnyMetric] = {}
        self._series: dict[tuple[str, tuple[str, ...]], AnyMetric] = {}
        for prefix, rows in (("kubeproxy_", UPSTREAM), ("steersman_", OURS)):
            for row in rows:
                if not row.modes or mode in row.modes:
                    self._by_name[row.name] = metric = self._make(prefix, row)
                    self._start(row, metric, families)
        build = Gauge(
            "kubernetes_build_info",
            "The version that runs, with the constant value 1.",
            ("git_version",),
            registry=self.registry,
        )
        build.labels(__version__).set(1)
        ProcessCollector(registry=self.registry)

    def _make(self, prefix: str, row: Row) -> AnyMetric:
        name = prefix + row.name
        match row.kind:
            case "counter":
                return Counter(name, row.help, row.labels, registry=self.registry)
            case "gauge":
                return Gauge(name, row.help, row.labels, registry=self.registry)
            case "histogram":
                return Histogram(
                    name, row.help, row.labels, registry=self.registry, buckets=row.buckets
                )

    @staticmethod
    def _start(row: Row, metric: AnyMetric, families: Sequence[Family]) -> None:
        """Make the series that are there before anything happens; a gauge would say something."""
        if row.labels == _F and row.kind != "gauge":
            for family in families:
                metric.labels(family.kubernetes)

    def has(self, name: str) -> bool:
        """Return whether this mode has a metric (its name without prefix)."""
        return name in self._by_name

    def add(self, name: str, *labels: str, amount: float = 1) -> None:
        """Increase a counter.

        Raises:
            KeyError: this mode has no such metric.
        """
        self._find(name, labels, Counter).inc(amount)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge; raises KeyError if this mode has no such metric."""
        self._find(name, labels, Gauge).set(value)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add a value to a histogram; raises KeyError if this mode has no such metric."""
        self._find(name, labels, Histogram).observe(value)

    def count_refusal(self, family: Family, *, partial: bool) -> None:
        """Count a batch that the kernel refused in the mode's own failure metrics.

        Args:
            family: the family that was synced.
            partial: whether the batch held only what had changed.
        """
        for row in UPSTREAM:
            if row.name in self._by_name and (
                row.refusals == "all" or (partial and row.refusals == "partial")
            ):
                self.add(row.name, family.kubernetes)

    def _find(self, name: str, labels: tuple[str, ...], kind: type[MetricT]) -> MetricT:
        series = self._series.get((name, labels))
        if series is None:  # to look one up by its labels takes a lock and several calls
            metric = self._by_name[name]
            series = self._series[name, labels] = metric.labels(*labels) if labels else metric
        if not isinstance(series, kind):
            raise TypeError(f"{name} is not a {kind.__name__}")
        return series

    def ask(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Have something collected at each scrape."""
        self.registry.register(_Asked(collect))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return everything as text, and the content type. Call it off the event loop."""
        pieces, content_type = exposition(self.registry.collect(), accept)
        return b"".join(pieces), content_type


class _Asked(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()

    def describe(self) -> Iterable[Metric]:
        return ()  # so that registering asks nobody yet


def conntrack_usage(usage: Callable[[], tuple[int, int]]) -> Callable[[], Iterator[Metric]]:
    """Return a collection of how full the conntrack table is.

    Args:
        usage: returns entries and maximum; an OSError leaves the metrics out of this scrape.
    """

    def collect() -> Iterator[Metric]:
        try:
            entries, maximum = usage()
        except OSError:
            return
        name = "steersman_conntrack_entries"
        yield GaugeMetricFamily(name, "Number of entries in the conntrack table.", entries)
        yield GaugeMetricFamily(
            f"{name}_limit", "Number of entries that the conntrack table can hold.", maximum
        )

    return collect


NFACCT = {
    "ct_state_invalid_dropped_pkts": (
        "kubeproxy_iptables_ct_state_invalid_dropped_packets_total",
        "Number of packets that were dropped because conntrack found them invalid.",
    ),
    "localhost_nps_accepted_pkts": (
        "kubeproxy_iptables_localhost_nodeports_accepted_packets_total",
        "Number of packets accepted on node ports of loopback addresses.",
    ),
}
"""nfacct objects of the iptables mode, and the metrics that show them."""


def nfacct_packets(packets: Callable[[], Mapping[str, int]]) -> Callable[[], Iterator[Metric]]:
    """Return a collection of the iptables mode's nfacct counters.

    Args:
        packets: returns packets by object; the ones that are not there are left out.
    """

    def collect() -> Iterator[Metric]:
        counts = packets()
        for name, (metric, text) in NFACCT.items():
            if name in counts:
                yield CounterMetricFamily(metric, text, counts[name])

    return collect
