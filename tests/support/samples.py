"""The samples of metrics, for tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from steersman.run.observe.prometheus import Metric


def value_of(metrics: Iterable[Metric], name: str, labels: Mapping[str, str]) -> float | None:
    """Return the value of a sample; None if there is no such sample."""
    for metric in metrics:
        for sample in metric.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return None
