"""Every metric that is pushed: upstream's with their types, labels and buckets, and our own.

Each metric is an attribute of `Metrics`, declared once (behaviour 14); the mode declares which of
the optional ones it has. Several `Metrics` can live in one process. Values that are known elsewhere
(conntrack, kernel counters) are collected when scraped (scraped.py): register a function with
`Metrics.on_scrape`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, overload

from steersman import __version__
from steersman.model.names import Family
from steersman.modes.specs import spec_of
from steersman.run.observe.prometheus import (
    Counter,
    Described,
    Gauge,
    Histogram,
    Kind,
    Labelled,
    Metric,
    exposition,
)
from steersman.run.observe.scraped import process_metrics

SYNC_BUCKETS = tuple(0.001 * 2**k for k in range(15))
PROGRAMMING_BUCKETS = (
    0.25,
    0.5,
    *(float(n) for n in range(1, 60)),
    *(float(n) for n in range(60, 116, 5)),
    *(float(n) for n in range(120, 301, 30)),
)
_PHASE_BUCKETS = tuple(0.0001 * 4**k for k in range(10))
_FAMILY = ("ip_family",)
_PROXY, _SYNC = "kubeproxy_", "kubeproxy_sync_proxy_rules_"

MetricT = TypeVar("MetricT", bound=Counter | Gauge | Histogram)

_KINDS: dict[type[Any], Kind] = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}
_BUILD = Described(
    "gauge",
    "kubernetes_build_info",
    "The version that runs, with the constant value 1.",
    ("git_version",),
)


class Declared(Generic[MetricT]):
    """The declaration of a metric: `metrics.NAME(labels)` is its child in one `Metrics`."""

    def __init__(
        self,
        kind: type[MetricT],
        name: str,
        text: str,
        labels: tuple[str, ...] = (),
        *,
        buckets: tuple[float, ...] = SYNC_BUCKETS,
        optional: bool = False,
    ) -> None:
        """Declare a metric.

        Args:
            kind: Counter, Gauge or Histogram.
            name: the full name.
            text: the HELP text, a sentence.
            labels: names of the labels.
            buckets: upper bounds of a histogram.
            optional: only some modes have it.
        """
        self.kind = kind
        self.name = name
        self.text = text
        self.labels = labels
        self.buckets = buckets
        self.optional = optional

    @overload
    def __get__(self, metrics: None, owner: type[Metrics]) -> Declared[MetricT]: ...
    @overload
    def __get__(self, metrics: Metrics, owner: type[Metrics]) -> Labelled[MetricT]: ...
    def __get__(
        self, metrics: Metrics | None, owner: type[Metrics]
    ) -> Declared[MetricT] | Labelled[MetricT]:
        """Return the metric; raise KeyError if the mode does not have it."""
        if metrics is None:
            return self
        labelled: Labelled[MetricT] = metrics.by_name[self.name]
        return labelled

    def create(self, families: Sequence[Family]) -> Labelled[MetricT]:
        """Create the metric at zero."""
        make: Callable[[], Any] = self.kind
        if self.kind is Histogram:
            make = partial(Histogram, self.buckets)
        kind = _KINDS[self.kind]
        metric = Labelled(make, Described(kind, self.name, self.text, self.labels))
        if self.labels == _FAMILY and self.kind is not Gauge:  # a gauge would show a false 0
            for family in families:
                metric(family.kubernetes)
        return metric


class Metrics:
    """The metrics of one process in one mode."""

    # Upstream's

    sync_seconds = Declared(
        Histogram, f"{_SYNC}duration_seconds", "Seconds that a sync took.", _FAMILY
    )
    full_sync_seconds = Declared(
        Histogram,
        f"{_PROXY}sync_full_proxy_rules_duration_seconds",
        "Seconds that a full sync took.",
        _FAMILY,
        optional=True,
    )
    partial_sync_seconds = Declared(
        Histogram,
        f"{_PROXY}sync_partial_proxy_rules_duration_seconds",
        "Seconds that a sync of only the changes took.",
        _FAMILY,
        optional=True,
    )
    programming_seconds = Declared(
        Histogram,
        f"{_PROXY}network_programming_duration_seconds",
        "Seconds from the change of an endpoint (its trigger time) until it is in force.",
        _FAMILY,
        buckets=PROGRAMMING_BUCKETS,
    )
    last_sync_time = Declared(
        Gauge, f"{_SYNC}last_timestamp_seconds", "Unix time of the last successful sync.", _FAMILY
    )
    last_queued_time = Declared(
        Gauge,
        f"{_SYNC}last_queued_timestamp_seconds",
        "Unix time at which a sync was last queued.",
        _FAMILY,
    )
    endpoint_changes_pending = Declared(
        Gauge, f"{_SYNC}endpoint_changes_pending", "Number of endpoint changes not yet synced."
    )
    endpoint_changes = Declared(
        Counter, f"{_SYNC}endpoint_changes_total", "Number of endpoint changes seen."
    )
    service_changes_pending = Declared(
        Gauge, f"{_SYNC}service_changes_pending", "Number of Service changes not yet synced."
    )
    service_changes = Declared(
        Counter, f"{_SYNC}service_changes_total", "Number of Service changes seen."
    )
    iptables_rules = Declared(
        Gauge,
        f"{_SYNC}iptables_total",
        "Number of rules in the kernel that belong to the proxy.",
        ("table", *_FAMILY),
        optional=True,
    )
    iptables_rules_written = Declared(
        Gauge,
        f"{_SYNC}iptables_last",
        "Number of rules that the last sync wrote.",
        ("table", *_FAMILY),
        optional=True,
    )
    iptables_restore_failures = Declared(
        Counter,
        f"{_SYNC}iptables_restore_failures_total",
        "Number of iptables-restore runs that failed.",
        _FAMILY,
        optional=True,
    )
    iptables_partial_restore_failures = Declared(
        Counter,
        f"{_SYNC}iptables_partial_restore_failures_total",
        "Number of iptables-restore runs that failed while only changes were written.",
        _FAMILY,
        optional=True,
    )
    nftables_sync_failures = Declared(
        Counter,
        f"{_SYNC}nftables_sync_failures_total",
        "Number of nf_tables transactions that the kernel refused.",
        _FAMILY,
        optional=True,
    )
    nftables_cleanup_failures = Declared(
        Counter,
        f"{_SYNC}nftables_cleanup_failures_total",
        "Number of removals of leftovers that the kernel refused.",
        _FAMILY,
        optional=True,
    )
    no_local_endpoints = Declared(
        Gauge,
        f"{_SYNC}no_local_endpoints_total",
        "Number of ServicePorts with a Local policy that have endpoints, but none on this node.",
        ("traffic_policy", *_FAMILY),
    )
    healthz = Declared(
        Counter, f"{_PROXY}proxy_healthz_total", "Number of answers of /healthz.", ("code",)
    )
    livez = Declared(
        Counter, f"{_PROXY}proxy_livez_total", "Number of answers of /livez.", ("code",)
    )
    conntrack_seconds = Declared(
        Histogram,
        f"{_PROXY}conntrack_reconciler_sync_duration_seconds",
        "Seconds that a conntrack clean-up took.",
        _FAMILY,
    )
    conntrack_deleted = Declared(
        Counter,
        f"{_PROXY}conntrack_reconciler_deleted_entries_total",
        "Number of stale conntrack entries deleted.",
        _FAMILY,
    )

    # Beyond upstream

    findings = Declared(
        Gauge,
        "steersman_findings",
        "Number of current problems with objects or configuration.",
        ("severity",),
    )
    phase_seconds = Declared(
        Histogram,
        "steersman_sync_phase_seconds",
        "Seconds that a phase of a sync took.",
        ("phase",),
        buckets=_PHASE_BUCKETS,
    )
    syncs = Declared(
        Counter,
        "steersman_syncs_total",
        "Number of syncs by reason and outcome.",
        ("reason", "outcome"),
    )
    kernel_objects = Declared(
        Gauge, "steersman_kernel_objects", "Number of kernel objects of the proxy in force."
    )
    kernel_writes = Declared(
        Counter,
        "steersman_kernel_writes_total",
        "Number of kernel objects written.",
        ("change",),
    )
    refused_service_ports = Declared(
        Gauge,
        "steersman_refused_service_ports",
        "Number of ServicePorts that the kernel refuses.",
    )
    drift_repairs = Declared(
        Counter,
        "steersman_drift_repairs_total",
        "Number of repairs of changes that other programs made to our kernel objects.",
    )
    drift_objects = Declared(
        Counter, "steersman_drift_objects_total", "Number of kernel objects that were repaired."
    )
    drift_pending_since = Declared(
        Gauge,
        "steersman_drift_pending_since_timestamp_seconds",
        "Unix time since which changes by other programs are not repaired; 0 if all are repaired.",
    )
    without_endpoints = Declared(
        Gauge,
        "steersman_service_ports_without_endpoints",
        "Number of ServicePorts that no endpoint serves: connections to them are refused.",
        _FAMILY,
    )
    drift_last = Declared(
        Gauge,
        "steersman_drift_last_timestamp_seconds",
        "When changes by other programs were found last, in seconds since 1970; 0 if never.",
    )
    ejections = Declared(
        Counter,
        "steersman_endpoint_ejections_total",
        "Number of endpoints that were ejected because they did not answer.",
        ("reason",),
    )
    ejected = Declared(
        Gauge,
        "steersman_endpoints_ejected",
        "Number of endpoints that get no new connections now because they do not answer.",
    )
    mode_fallback = Declared(
        Gauge,
        "steersman_mode_fallback",
        "1 if another mode than the wanted one runs.",
        ("wanted", "used"),
    )

    def __init__(self, mode: str, families: Sequence[Family] = tuple(Family)) -> None:
        """Create all metrics of a mode, at zero.

        Args:
            mode: name of the mode.
            families: the families served; their series exist from the start.
        """
        self._families = families
        self.by_name: dict[str, Labelled[Any]] = {}
        self._scraped: list[Callable[[], Iterable[Metric]]] = []
        self.use_mode(mode)

    def use_mode(self, mode: str) -> None:
        """Have the metrics of this mode; those of all modes keep their values."""
        self._spec = spec_of(mode)
        for metric in DECLARED:
            has = not metric.optional or metric.name in self._spec.metrics
            if has and metric.name not in self.by_name:
                self.by_name[metric.name] = metric.create(self._families)
            elif not has and metric.name in self.by_name:
                del self.by_name[metric.name]

    def find(self, metric: Declared[MetricT]) -> Labelled[MetricT] | None:
        """Return an optional metric, given as `Metrics.NAME`; None if the mode does not have it."""
        return self.by_name.get(metric.name)

    def count_refused(self, family: Family, *, full: int, partial: int) -> None:
        """Count batches that the kernel refused in the failure metrics that the mode declares.

        Args:
            family: the family that was synced.
            full: number of batches of the difference to the whole kernel.
            partial: number of batches that held only changes.
        """
        for name, amount in (
            (self._spec.failure_metric, full + partial),
            (self._spec.partial_failure_metric, partial),
        ):
            if name:
                self.by_name[name](family.kubernetes).inc(amount)

    def on_scrape(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Collect further metrics at each scrape."""
        self._scraped.append(collect)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, those of all Kubernetes components and of the process included."""
        for metric in tuple(self.by_name.values()):
            yield metric.collect()
        yield _BUILD.of([((__version__,), 1)])
        yield from process_metrics()
        for collect in self._scraped:
            yield from collect()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return everything as text, and the content type. Call it off the event loop."""
        pieces, content_type = exposition(self.collect(), accept)
        return b"".join(pieces), content_type


DECLARED = tuple(each for each in vars(Metrics).values() if isinstance(each, Declared))
"""Every metric of `Metrics`, in order."""
