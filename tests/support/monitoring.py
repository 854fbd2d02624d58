"""Every metric that the program declares, and every query of the shipped rules and boards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from scripts import monitoring
from scripts.monitoring import FOLDER
from steersman.modes.specs import SPECS
from steersman.run.observe.metrics import DECLARED, Metrics
from steersman.run.observe.mode_metrics import SUMS, TABLES
from steersman.run.observe.scraped import SCRAPED
from steersman.run.process.event_loop import HOLD


class Row(NamedTuple):
    name: str
    type: str
    labels: tuple[str, ...]
    modes: str
    text: str


def modes_with(name: str) -> str:
    """The modes that have a metric."""
    return ", ".join(mode for mode, spec in SPECS.items() if name in (*spec.metrics, *spec.counts))


def rows() -> Iterator[Row]:
    """Every metric: pushed ones, those collected at a scrape, and those of modes."""
    for metric in DECLARED:
        modes = modes_with(metric.name) if metric.optional else "all"
        kind = metric.kind.__name__.lower()
        yield Row(metric.name, kind, metric.labels, modes, metric.text)
    for each in (*SCRAPED, HOLD):
        yield Row(each.name, each.kind, each.labels, modes_with(each.name) or "all", each.text)
    for each in SUMS:
        yield Row(each.name, each.kind, each.labels, modes_with(each.name), each.text)
    of_service = ("namespace", "service", "port", "protocol")
    series = {}
    for table in TABLES:
        for column in table.columns:
            more = ("direction",) if column.direction else ()
            labels = (*of_service, table.label, *more)
            series[column.metric] = Row(
                column.metric, "counter", labels, modes_with(column.metric), column.help
            )
    yield from series.values()
    listed = {metric.name for metric in DECLARED}
    for family in Metrics("iptables").collect():
        if family.name not in listed:
            sample = next(iter(family.samples), None)
            labels = tuple(sample.labels) if sample else ()
            yield Row(family.name, family.kind, labels, "all", family.text)


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
