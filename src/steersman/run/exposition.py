"""Metrics as text, piece by piece: a cluster has tens of thousands of series."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_TOGETHER = 500
"""Series that are written at once, some 70 kB."""
_PIECE = 1 << 16
"""Bytes of a piece, at least, but for the last one."""
_HEAD_LINES = 2  # HELP and TYPE
Encoder = Callable[[Collector], bytes]


class Series(Metric):
    """A counter whose series are made while they are written: it can be written once."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        rows: Iterable[tuple[Sequence[str], float]],
    ) -> None:
        """Take the name (with `_total`) and the series: values of the labels, and the count."""
        super().__init__(name.removesuffix("_total"), documentation, "counter")
        made = (Sample(name, dict(zip(labels, values, strict=True)), n) for values, n in rows)
        self.samples: Iterator[Sample] = made  # type: ignore[assignment]


def exposition(metrics: Iterable[Metric], accept: str = "") -> tuple[Iterator[bytes], str]:
    """Write metrics in the form that a client asks for; return the pieces and the content type.

    Args:
        metrics: read while the pieces are taken; take them off the event loop.
        accept: the header of that name.
    """
    encoder, content_type = choose_encoder(accept)
    return _together(_parts(metrics, encoder)), content_type


class _Only(NamedTuple):
    """As much of a registry as an encoder needs."""

    metric: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.metric,)


def _parts(metrics: Iterable[Metric], encoder: Encoder) -> Iterator[bytes]:
    end = encoder(CollectorRegistry())  # OpenMetrics has one
    for metric in metrics:
        whole = not isinstance(metric, Series)
        for part in [encoder(_Only(metric))] if whole else _cut(metric, encoder):
            yield part.removesuffix(end)
    yield end


def _cut(series: Metric, encoder: Encoder) -> Iterator[bytes]:
    """Write some series at a time, the first ones (though there be none) with the head."""
    head, samples = 0, iter(series.samples)
    while (some := list(islice(samples, _TOGETHER))) or not head:
        part = Metric(series.name, series.documentation, series.type)
        part.samples = some
        yield encoder(_Only(part)).split(b"\n", head)[-1]
        head = _HEAD_LINES


def _together(parts: Iterable[bytes]) -> Iterator[bytes]:
    waiting: list[bytes] = []
    size = 0
    for part in parts:
        waiting.append(part)
        size += len(part)
        if size >= _PIECE:
            yield b"".join(waiting)
            waiting, size = [], 0
    yield b"".join(waiting)
