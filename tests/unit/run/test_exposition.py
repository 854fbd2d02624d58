"""Metrics in pieces say what prometheus_client says at once."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from steersman.run.exposition import Series, exposition

NAME, LABELS = "steersman_connections_total", ("service", "endpoint")
FORMS = pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])


class _Counted(Collector):
    def __init__(self, count: int, *, whole: bool) -> None:
        self._rows = [((f"shop/{n % 7}", f'10.0.0.{n}:"80"'), float(n)) for n in range(count)]
        self._whole = whole

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        if not self._whole:
            yield Series(NAME, "Connections", LABELS, iter(self._rows))
            return
        family = CounterMetricFamily(NAME, "Connections", labels=LABELS)
        for values, count in self._rows:
            family.add_metric(values, count)
        yield family


def registry(count: int, *, whole: bool) -> CollectorRegistry:
    made = CollectorRegistry()
    Gauge("before", "A gauge", registry=made).set(1)
    made.register(_Counted(count, whole=whole))
    Gauge("after", "Another", ["mode"], registry=made).labels("ipvs").set(2)
    return made


@FORMS
@pytest.mark.parametrize("count", [0, 1, 500, 1201])
def test_the_text_is_the_same(accept: str, count: int) -> None:
    encoder, content_type = choose_encoder(accept)
    pieces, said = exposition(registry(count, whole=False).collect(), accept)
    assert b"".join(pieces) == encoder(registry(count, whole=True))
    assert said == content_type


@FORMS
def test_only_some_series_are_held_at_once(accept: str) -> None:
    pieces = list(exposition(registry(20_000, whole=False).collect(), accept)[0])
    assert len(pieces) > 10
    assert all(1 << 16 <= len(piece) < 1 << 18 for piece in pieces[:-1])
