"""Metrics as Prometheus knows them: counters, gauges and histograms, and the text of a scrape.

Prometheus's own library for Python brings an HTTP server and two clients with it, 3 MB of each
process. What the process needs of it is this: values by labels, and the text, which is that of the
library byte by byte (tests/unit/run/test_prometheus.py).

Values change on the event loop only. A scrape reads them in a thread: one that is just being
counted is in this scrape or in the next.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeAlias, TypeVar, overload

import msgspec

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Rows: TypeAlias = Iterable[tuple[Sequence[str], float]]
"""Values of the labels, and the value of the metric."""

_PIECE = 1 << 16
"""Minimum size of a piece in characters, apart from the last one."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of the text of a scrape."""


class Sample(NamedTuple):
    """A value of a metric."""

    name: str
    """The metric's, or with a suffix for a part of a histogram."""
    labels: Mapping[str, str]
    value: float


class Metric(NamedTuple):
    """What a scrape says of a metric."""

    kind: Kind
    name: str
    """In full, with `_total` if it is a counter."""
    text: str
    """The HELP text, a sentence."""
    samples: Iterable[Sample]


class Counter:
    """A value that only grows."""

    kind: ClassVar[Kind] = "counter"

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add an amount, which is not negative."""
        if amount < 0:
            raise ValueError(f"a counter cannot grow by {amount}")
        self.value += amount


class Gauge:
    """A value that goes up and down."""

    kind: ClassVar[Kind] = "gauge"

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        """Replace the value."""
        self.value = value


class Histogram:
    """Numbers of observations by size, and their sum."""

    kind: ClassVar[Kind] = "histogram"

    def __init__(self, bounds: Sequence[float] = ()) -> None:
        """Start at zero, with these upper bounds in ascending order."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, amount: float) -> None:
        """Count an observation."""
        self.counts[bisect_left(self.bounds, amount)] += 1
        self.sum += amount


ChildT = TypeVar("ChildT", bound=Counter | Gauge | Histogram)


class Declared(msgspec.Struct, Generic[ChildT], frozen=True):
    """The declaration of a metric, and what makes it of values that are known elsewhere."""

    child: type[ChildT]
    name: str
    """In full, with `_total` if it is a counter."""
    text: str
    """The HELP text, a sentence."""
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """The type in the text of a scrape."""
        return self.child.kind

    def of(self, rows: Rows) -> Metric:
        """Return a counter or gauge with these samples."""
        metric = self.streamed(rows)
        return metric._replace(samples=list(metric.samples))

    def streamed(self, rows: Rows) -> Metric:
        """Return a counter or gauge whose samples are made while they are written, once."""
        samples = (Sample(self.name, self.labelled(values), value) for values, value in rows)
        return Metric(self.kind, self.name, self.text, samples)

    def at(self, value: float) -> Metric:
        """Return a counter or gauge without labels."""
        return self.of([((), value)])

    def histogram(
        self, rows: Iterable[tuple[Sequence[str], Sequence[float], Sequence[int], float]]
    ) -> Metric:
        """Return a histogram.

        Args:
            rows: values of the labels, upper bounds, the count of each bucket and of what lies
                above all, and the sum.
        """
        samples: list[Sample] = []
        for values, bounds, counts, total in rows:
            labels, so_far = self.labelled(values), list(accumulate(counts))
            for bound, count in zip((*bounds, math.inf), so_far, strict=True):
                below = {**labels, "le": number(bound)}
                samples.append(Sample(f"{self.name}_bucket", below, count))
            samples.append(Sample(f"{self.name}_count", labels, so_far[-1]))
            samples.append(Sample(f"{self.name}_sum", labels, total))
        return Metric(self.kind, self.name, self.text, samples)

    def labelled(self, values: Sequence[str]) -> dict[str, str]:
        """Return the labels with these values."""
        return dict(zip(self.labels, values, strict=True))


class Counted(Declared[ChildT], frozen=True):
    """A metric that the program counts: as an attribute of a `Registry`, it has its values."""

    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram."""

    @overload
    def __get__(self, registry: None, owner: type[Registry]) -> Counted[ChildT]: ...
    @overload
    def __get__(self, registry: Registry, owner: type[Registry]) -> Labelled[ChildT]: ...
    def __get__(
        self, registry: Registry | None, owner: type[Registry]
    ) -> Counted[ChildT] | Labelled[ChildT]:
        """Return the values; raise KeyError if the registry does not have the metric."""
        if registry is None:
            return self
        return registry.by_name[self.name]

    def zero(self) -> ChildT:
        """Return a value that has counted nothing yet."""
        child: Callable[..., ChildT] = self.child
        return child(self.buckets) if self.child is Histogram else child()


class Labelled(Generic[ChildT]):
    """A metric that the program counts, with a value for each set of labels."""

    def __init__(self, declared: Counted[ChildT]) -> None:
        """Create it. Without labels it has its one value, zero, from the start."""
        self._declared = declared
        self._children: dict[tuple[str, ...], ChildT] = {}
        if not declared.labels:
            self()

    def __call__(self, *labels: str) -> ChildT:
        """Return the value for these labels."""
        child = self._children.get(labels)
        if child is None:
            self._declared.labelled(labels)  # as many as it has
            child = self._children[labels] = self._declared.zero()
        return child

    def clear(self) -> None:
        """Forget all values."""
        self._children.clear()

    def collect(self) -> Metric:
        """Return what a scrape says."""
        simple: list[tuple[Sequence[str], float]] = []
        histograms = []
        for labels, child in tuple(self._children.items()):
            if isinstance(child, Histogram):
                histograms.append((labels, child.bounds, tuple(child.counts), child.sum))
            else:
                simple.append((labels, child.value))
        if self._declared.child is Histogram:
            return self._declared.histogram(histograms)
        return self._declared.of(simple)


class Registry:
    """Has declared metrics as attributes of its class: `registry.NAME(labels)` is a value."""

    by_name: dict[str, Labelled[Any]]
    """The values of each metric that is counted."""


def exposition(metrics: Iterable[Metric]) -> Iterator[bytes]:
    """Yield the text of a scrape piece by piece: a cluster has tens of thousands of series.

    Args:
        metrics: read while the pieces are consumed; do that off the event loop.
    """
    waiting: list[str] = []
    size = 0
    for metric in metrics:
        for line in _lines(metric):
            waiting.append(line)
            size += len(line)
            if size >= _PIECE:
                yield "".join(waiting).encode()
                waiting, size = [], 0
    yield "".join(waiting).encode()


def _lines(metric: Metric) -> Iterator[str]:
    kind, name, text, samples = metric
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
    for sample in samples:
        labels = ""
        if sample.labels:
            pairs = (f'{key}="{_escaped(each)}"' for key, each in sorted(sample.labels.items()))
            labels = f"{{{','.join(pairs)}}}"
        yield f"{sample.name}{labels} {number(sample.value)}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def number(value: float) -> str:
    """Return a number as Go prints it, which takes an exponent from 1e+06 on."""
    value = float(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    text = repr(value)
    whole, point, fraction = text.partition(".")
    if value >= 1e6 and point and "e" not in fraction:
        digits = f"{whole[0]}.{whole[1:]}{fraction}".rstrip("0").removesuffix(".")
        return f"{digits}e+{len(whole) - 1:02d}"
    return text
