"""docs/metrics.md lists every metric, as the program declares it; `--update` writes the list."""

from __future__ import annotations

from pathlib import Path

from steersman.modes.specs import SPECS
from tests.support.monitoring import rows

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
BEGIN, END = "<!-- the program's own list, written by a test -->\n", "<!-- end of the list -->\n"


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


def test_every_metric_has_one_meaning() -> None:
    found = [row.name for row in rows()]
    assert len(set(found)) == len(found)


def test_modes_declare_only_what_is_there() -> None:
    names = {row.name for row in rows()}
    for spec in SPECS.values():
        assert set(spec.metrics) <= names
