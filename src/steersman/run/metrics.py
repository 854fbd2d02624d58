"""Every metric, as tables: upstream's by name, type, labels and buckets (SPEC 14), and ours.

Nothing else counts anything. Each `Metrics` has a registry of its own, so that several can live in
one process; what is known elsewhere (conntrack, kernel counters) is asked for when scraped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

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
from steersman.run.exposition import Series, exposition

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


class Row(NamedTuple):
    """One metric."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SYNC_BUCKETS
    modes: tuple[str, ...] = ()
    """The modes that have it; () for all."""


_F = ("ip_family",)
_SYNCED = ("iptables", "nftables")
_TABLES = ("iptables", "ipvs")

UPSTREAM: tuple[Row, ...] = (
    Row("sync_proxy_rules_duration_seconds", "histogram", "Duration of a sync", _F),
    Row("sync_full_proxy_rules_duration_seconds", "histogram", "Of a full one", _F, modes=_SYNCED),
    Row(
        "sync_partial_proxy_rules_duration_seconds",
        "histogram",
        "Of a sync of what changed",
        _F,
        modes=_SYNCED,
    ),
    Row(
        "network_programming_duration_seconds",
        "histogram",
        "From the change of an endpoint (its trigger time) until it is in force",
        _F,
        PROGRAMMING_BUCKETS,
    ),
    Row("sync_proxy_rules_last_timestamp_seconds", "gauge", "When a sync last succeeded", _F),
    Row("sync_proxy_rules_last_queued_timestamp_seconds", "gauge", "When one was last queued", _F),
    Row("sync_proxy_rules_endpoint_changes_pending", "gauge", "Endpoint changes not yet synced"),
    Row("sync_proxy_rules_endpoint_changes_total", "counter", "Endpoint changes seen"),
    Row("sync_proxy_rules_service_changes_pending", "gauge", "Service changes not yet synced"),
    Row("sync_proxy_rules_service_changes_total", "counter", "Service changes seen"),
    Row(
        "sync_proxy_rules_iptables_total",
        "gauge",
        "Rules of ours in the kernel",
        ("table", *_F),
        modes=_TABLES,
    ),
    Row(
        "sync_proxy_rules_iptables_last",
        "gauge",
        "Rules that the last sync wrote",
        ("table", *_F),
        modes=_TABLES,
    ),
    Row(
        "sync_proxy_rules_iptables_restore_failures_total",
        "counter",
        "iptables-restore runs that failed",
        _F,
        modes=_TABLES,
    ),
    Row(
        "sync_proxy_rules_iptables_partial_restore_failures_total",
        "counter",
        "Those of them that wrote only what changed",
        _F,
        modes=("iptables",),
    ),
    Row(
        "sync_proxy_rules_nftables_sync_failures_total",
        "counter",
        "Syncs that the kernel refused",
        _F,
        modes=("nftables",),
    ),
    Row(
        "sync_proxy_rules_nftables_cleanup_failures_total",
        "counter",
        "Removals of leftovers that the kernel refused",
        _F,
        modes=("nftables",),
    ),
    Row(
        "sync_proxy_rules_no_local_endpoints_total",
        "gauge",
        "ServicePorts with endpoints elsewhere, none here, and a Local policy",
        ("traffic_policy", *_F),
    ),
    Row("proxy_healthz_total", "counter", "Answers of /healthz", ("code",)),
    Row("proxy_livez_total", "counter", "Answers of /livez", ("code",)),
    Row("conntrack_reconciler_sync_duration_seconds", "histogram", "Of conntrack cleanups", _F),
    Row("conntrack_reconciler_deleted_entries_total", "counter", "Stale entries deleted", _F),
)
"""Upstream's metrics; the prefix `kubeproxy_` is left out here."""

OURS: tuple[Row, ...] = (
    Row("findings", "gauge", "Things wrong with objects or configuration now", ("severity",)),
    Row("sync_phase_seconds", "histogram", "Of a phase of a sync", ("phase",), _PHASE_BUCKETS),
    Row("syncs_total", "counter", "Syncs by outcome", ("reason", "outcome")),
    Row("kernel_objects", "gauge", "Kernel objects of ours in force"),
    Row("kernel_writes_total", "counter", "Kernel objects written", ("change",)),
    Row("refused_service_ports", "gauge", "ServicePorts that the kernel refuses"),
    Row("mode_fallback", "gauge", "1 where another mode than wanted runs", ("wanted", "used")),
)
"""Beyond upstream, with the prefix `steersman_`."""


class Connections(NamedTuple):
    """How many connections the kernel has made to an endpoint of a ServicePort."""

    namespace: str
    service: str
    port: str
    protocol: str
    endpoint: str
    made: int


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
        for prefix, rows in (("kubeproxy_", UPSTREAM), ("steersman_", OURS)):
            for row in rows:
                if not row.modes or mode in row.modes:
                    self._by_name[row.name] = metric = self._make(prefix, row)
                    self._start(row, metric, families)
        build = Gauge(
            "kubernetes_build_info", "What runs", ("git_version",), registry=self.registry
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
        """Whether this mode has a metric (its name without prefix)."""
        return name in self._by_name

    def add(self, name: str, *labels: str, amount: float = 1) -> None:
        """Increase a counter; nothing where the mode does not have it."""
        metric = self._find(name, labels)
        if isinstance(metric, Counter):
            metric.inc(amount)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge; nothing where the mode does not have it."""
        metric = self._find(name, labels)
        if isinstance(metric, Gauge):
            metric.set(value)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Put a value into a histogram; nothing where the mode does not have it."""
        metric = self._find(name, labels)
        if isinstance(metric, Histogram):
            metric.observe(value)

    def _find(self, name: str, labels: tuple[str, ...]) -> AnyMetric | None:
        metric = self._by_name.get(name)
        return metric.labels(*labels) if metric is not None and labels else metric

    def ask(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Have something collected at each scrape."""
        self.registry.register(_Asked(collect))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Write all of it, and the content type. Call it off the event loop."""
        pieces, content_type = self.pieces(accept)
        return b"".join(pieces), content_type

    def pieces(self, accept: str = "") -> tuple[Iterator[bytes], str]:
        """Write it piece by piece, likewise."""
        return exposition(self.registry, accept)


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
        yield GaugeMetricFamily(name, "Entries in the conntrack table", entries)
        yield GaugeMetricFamily(f"{name}_limit", "Entries that it can hold", maximum)

    return collect


NFACCT = {
    "ct_state_invalid_dropped_pkts": (
        "kubeproxy_iptables_ct_state_invalid_dropped_packets_total",
        "Packets dropped because conntrack found them invalid",
    ),
    "localhost_nps_accepted_pkts": (
        "kubeproxy_iptables_localhost_nodeports_accepted_packets_total",
        "Packets to node ports on loopback",
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


def connections(counts: Callable[[], Iterable[Connections]]) -> Callable[[], Iterator[Metric]]:
    """Return a collection of connections by ServicePort and endpoint, where the mode counts them.

    Args:
        counts: returns the counts; they must never go down while an endpoint is known.
    """
    labels = ("namespace", "service", "port", "protocol", "endpoint")

    def collect() -> Iterator[Metric]:
        rows = ((row[:5], row.made) for row in counts())
        text = "Connections made to an endpoint"
        yield Series("steersman_connections_total", text, labels, rows)

    return collect
