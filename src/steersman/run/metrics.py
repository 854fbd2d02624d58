"""Every metric that is pushed: upstream's with their types, labels and buckets, and our own.

Each metric is an attribute of `Metrics`, declared once (behaviour 14); the mode declares which of
the optional ones it has. Each `Metrics` has a registry of its own, so several can live in one
process. Values that are known elsewhere (conntrack, kernel counters) are collected when scraped
(scraped.py): register a function with `Metrics.on_scrape`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar, cast, overload

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from steersman import __version__
from steersman.model.names import Family
from steersman.modes.specs import spec_of

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

_TOGETHER = 500
"""Series that are encoded at once, some 70 kB."""
_PIECE = 1 << 16
"""Minimum size of a piece in bytes, apart from the last one."""
_HEAD_LINES = 2  # HELP and TYPE
Encoder = Callable[[Collector], bytes]

MetricT = TypeVar("MetricT", bound=Counter | Gauge | Histogram)


class Labelled(Generic[MetricT]):
    """A metric whose children are cached: the client's own lookup takes a lock."""

    __slots__ = ("_children", "metric")

    def __init__(self, metric: MetricT) -> None:
        self.metric = metric
        self._children: dict[tuple[str, ...], MetricT] = {(): metric}

    def __call__(self, *labels: str) -> MetricT:
        """Return the child for values of the labels; the metric itself if it has none."""
        child = self._children.get(labels)
        if child is None:
            child = cast("MetricT", self.metric.labels(*labels))
            self._children[labels] = child
        return child


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

    def create(self, registry: CollectorRegistry, families: Sequence[Family]) -> Labelled[MetricT]:
        """Create the metric at zero."""
        options: dict[str, Any] = {"buckets": self.buckets} if self.kind is Histogram else {}
        metric = self.kind(self.name, self.text, self.labels, registry=registry, **options)
        if self.labels == _FAMILY and self.kind is not Gauge:  # a gauge would show a false 0
            for family in families:
                metric.labels(family.kubernetes)
        return Labelled(metric)


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
        # A new registry for each object, so that several can live in one process.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # upstream has no *_created series
        self.registry = CollectorRegistry()
        self._families = families
        self.by_name: dict[str, Labelled[Any]] = {}
        self.use_mode(mode)
        # Metrics of all Kubernetes components, and of the process.
        build = Gauge(
            "kubernetes_build_info",
            "The version that runs, with the constant value 1.",
            ("git_version",),
            registry=self.registry,
        )
        build.labels(__version__).set(1)
        ProcessCollector(registry=self.registry)

    def use_mode(self, mode: str) -> None:
        """Have the metrics of this mode; those of all modes keep their values."""
        self._spec = spec_of(mode)
        for metric in DECLARED:
            has = not metric.optional or metric.name in self._spec.metrics
            if has and metric.name not in self.by_name:
                self.by_name[metric.name] = metric.create(self.registry, self._families)
            elif not has and metric.name in self.by_name:
                self.registry.unregister(self.by_name.pop(metric.name).metric)

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
        self.registry.register(_OnScrape(collect))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return everything as text, and the content type. Call it off the event loop."""
        pieces, content_type = exposition(self.registry.collect(), accept)
        return b"".join(pieces), content_type


DECLARED = tuple(each for each in vars(Metrics).values() if isinstance(each, Declared))
"""Every metric of `Metrics`, in order."""


class _OnScrape(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()

    def describe(self) -> Iterable[Metric]:
        return ()  # so that registering collects nothing yet


# As text, piece by piece: a cluster has tens of thousands of series


class Series(Metric):
    """A counter whose series are created while they are written: it can be written once."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        rows: Iterable[tuple[Sequence[str], float]],
    ) -> None:
        """Create it of a name with `_total`, and of label values and counts."""
        super().__init__(name.removesuffix("_total"), documentation, "counter")
        made = (Sample(name, dict(zip(labels, values, strict=True)), n) for values, n in rows)
        self.samples: Iterator[Sample] = made  # type: ignore[assignment]


def exposition(metrics: Iterable[Metric], accept: str = "") -> tuple[Iterator[bytes], str]:
    """Encode metrics in the format that a client accepts.

    Args:
        metrics: read while the pieces are consumed; do that off the event loop.
        accept: the Accept header.

    Returns:
        The pieces and the content type.
    """
    encoder, content_type = choose_encoder(accept)

    def pieces() -> Iterator[bytes]:
        waiting: list[bytes] = []
        size = 0
        for part in _parts(metrics, encoder):
            waiting.append(part)
            size += len(part)
            if size >= _PIECE:
                yield b"".join(waiting)
                waiting, size = [], 0
        yield b"".join(waiting)

    return pieces(), content_type


class _Only(NamedTuple):
    """The part of a registry that an encoder needs."""

    metric: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.metric,)


def _parts(metrics: Iterable[Metric], encoder: Encoder) -> Iterator[bytes]:
    """Encode a metric at a time; of Series some at a time, the first ones with the head."""
    end = encoder(CollectorRegistry())  # OpenMetrics has one
    for metric in metrics:
        if not isinstance(metric, Series):
            yield encoder(_Only(metric)).removesuffix(end)
            continue
        head, samples = 0, iter(metric.samples)
        while (some := list(islice(samples, _TOGETHER))) or not head:  # the head, even if empty
            part = Metric(metric.name, metric.documentation, metric.type)
            part.samples = some
            yield encoder(_Only(part)).split(b"\n", head)[-1].removesuffix(end)
            head = _HEAD_LINES
    yield end
