"""docs/metrics.md lists every metric, as the program declares it; `--update` writes the list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from steersman.modes.specs import SPECS
from steersman.run.event_loop import HOLD
from steersman.run.metrics import DECLARED, Metrics
from steersman.run.mode_metrics import SUMS, TABLES
from steersman.run.scraped import SCRAPED

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
BEGIN, END = "<!-- the program's own list, written by a test -->\n", "<!-- end of the list -->\n"


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
    for family in Metrics("iptables").registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if name not in listed:
            labels = tuple(family.samples[0].labels) if family.samples else ()
            yield Row(name, family.type, labels, "all", f"{family.documentation.rstrip('.')}.")


def text() -> str:
    lines = ["| metric | type | labels | modes | meaning |", "| --- | --- | --- | --- | --- |"]
    for row in sorted(rows()):
        labels = ", ".join(f"`{label}`" for label in row.labels)
        lines.append(f"| `{row.name}` | {row.type} | {labels} | {row.modes} | {row.text} |")
    return "\n".join(lines) + "\n"


def test_the_page_lists_every_metric(update: bool) -> None:
    page = PAGE.read_text()
    head, _, rest = page.partition(BEGIN)
    before, _, tail = rest.partition(END)
    if update:
        PAGE.write_text(f"{head}{BEGIN}{text()}{END}{tail}")
    else:
        assert before == text(), "pytest tests/unit/shipped/test_metrics_page.py --update"


def test_every_metric_has_one_meaning_and_a_mode() -> None:
    found = list(rows())
    assert len({row.name for row in found}) == len(found)
    for row in found:
        assert row.modes, f"{row.name}: no mode has it (ModeSpec.metrics, ModeSpec.counts)"


def test_modes_declare_only_what_is_there() -> None:
    names = {row.name for row in rows()}
    for spec in SPECS.values():
        assert {*spec.metrics, *spec.counts} <= names
