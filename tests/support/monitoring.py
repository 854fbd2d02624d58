"""Every metric that the program declares, and every query of the shipped rules and boards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from scripts import monitoring
from scripts.monitoring import FOLDER
from steersman.modes.specs import SPECS
from steersman.run.observe.metric_table import DECLARED


class Row(NamedTuple):
    name: str
    type: str
    labels: tuple[str, ...]
    modes: str
    text: str


def rows() -> Iterator[Row]:
    """Every metric as the reference page lists it."""
    for metric in DECLARED:
        having = [mode for mode, spec in SPECS.items() if metric.name in spec.metrics]
        modes = ", ".join(having) or "all"
        yield Row(metric.name, metric.kind, metric.labels, modes, metric.text)


def rules() -> list[dict[str, Any]]:
    text = yaml.safe_load((FOLDER / "rules.yaml").read_text())
    return [rule for group in text["groups"] for rule in group["rules"]]


def queries() -> Iterator[str]:
    """Every expression of rules and boards."""
    yield from (rule["expr"] for rule in rules())
    for board in yaml.safe_load((FOLDER / "boards.yaml").read_text()).values():
        yield from monitoring.queries(board)


def metrics_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:steersman|kubeproxy|kubernetes|process)_\w+", query))
