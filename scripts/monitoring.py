"""Make the Grafana boards and the PrometheusRule in deploy/monitoring of their sources beside them.

`--runbooks URL` is the address at which the docs of this version are read, for the links of alerts:
`python scripts/monitoring.py --runbooks https://docs.example.org/steersman/`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / "deploy" / "monitoring"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
KINDS = {"stat": "stat", "graph": "timeseries", "table": "table", "states": "state-timeline"}
WIDE = 24
HEIGHTS = {"stat": 5, "graph": 8, "table": 5, "states": 8}
LABELS = {"app.kubernetes.io/name": "steersman"}


def board(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a dashboard in Grafana's format."""
    one_node = any("$instance" in query for query in queries(spec))
    return {
        "uid": spec["uid"],
        "title": spec["title"],
        "tags": ["steersman"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["steersman"], "title": "steersman", "keepTime": True}
        ],
        "templating": {"list": list(variables(one_node=one_node))},
        "panels": list(panels(spec["rows"])),
    }


def queries(spec: dict[str, Any]) -> Iterator[str]:
    """Yield the queries of a board, with its variables."""
    for row in spec["rows"]:
        for panel in row["panels"]:
            yield from panel["queries"].values()


def variables(*, one_node: bool) -> Iterator[dict[str, Any]]:
    """Yield what the reader of a board chooses."""
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    choices = {"job": "label_values(steersman_condition, job)"}
    if one_node:
        choices["instance"] = 'label_values(steersman_condition{job="$job"}, instance)'
    for name, query in choices.items():
        yield {
            "name": name,
            "label": {"instance": "node"}.get(name, name),
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,  # when the time range changes: nodes come and go
            "sort": 1,
        }


def panels(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows and their panels, from left to right and down."""
    number = top = 0
    for row in rows:
        number += 1
        place = {"x": 0, "y": top, "w": WIDE, "h": 1}
        yield {"id": number, "type": "row", "title": row["title"], "gridPos": place, "panels": []}
        top += 1
        left = height = 0
        for spec in row["panels"]:
            if left + spec["width"] > WIDE:
                left, top, height = 0, top + height, 0
            height = max(height, HEIGHTS[spec["kind"]])
            number += 1
            place = {"x": left, "y": top, "w": spec["width"], "h": HEIGHTS[spec["kind"]]}
            yield {"id": number, "gridPos": place, **panel(spec)}
            left += spec["width"]
        top += height


def panel(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a panel without its place."""
    kind = spec["kind"]
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if "alarm" in spec:
        steps.append({"color": "red", "value": spec["alarm"]})
    defaults: dict[str, Any] = {
        "unit": spec.get("unit", "short"),
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if kind == "graph":
        stacking = {"mode": "normal" if spec.get("stacked") else "none"}
        fill = 30 if spec.get("stacked") else 0
        defaults |= {"min": 0, "custom": {"stacking": stacking, "fillOpacity": fill}}
    if kind == "states":
        words = {"0": {"text": "no", "color": "red"}, "1": {"text": "yes", "color": "green"}}
        defaults["mappings"] = [{"type": "value", "options": words}]
    instant = kind in ("stat", "table")
    return {
        "type": KINDS[kind],
        "title": spec["title"],
        "description": spec.get("text", ""),
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": SOURCE,
                "expr": query.replace("$rate", "$__rate_interval"),
                "legendFormat": legend,
                "instant": instant,
                "range": not instant,
                **({"format": "table"} if kind == "table" else {}),
            }
            for place, (legend, query) in enumerate(spec["queries"].items())
        ],
    }


def prometheus_rule(rules: dict[str, Any]) -> dict[str, Any]:
    """Return the rules as an object for prometheus-operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "steersman", "namespace": "kube-system", "labels": LABELS},
        "spec": rules,
    }


def made(runbooks: str = "") -> dict[str, str]:
    """Return the text of each file that is made, by its name.

    Args:
        runbooks: the address below which the docs are, with a final slash; "" for relative links.
    """
    boards = yaml.safe_load((FOLDER / "boards.yaml").read_text())
    files = {f"{name}.json": json.dumps(board(spec), indent=1) for name, spec in boards.items()}
    rules = yaml.safe_load((FOLDER / "rules.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if runbooks and "alert" in rule:
                link = rule["annotations"]["runbook_url"].removeprefix("docs/")
                rule["annotations"]["runbook_url"] = runbooks + link
    text = yaml.safe_dump(prometheus_rule(rules), sort_keys=False, width=100)
    head = "# Made of rules.yaml by scripts/monitoring.py.\n"
    return {name: f"{body}\n" for name, body in files.items()} | {
        "prometheusrule.yaml": head + text
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runbooks", default="", metavar="URL")
    for file, content in made(parser.parse_args().runbooks).items():
        (FOLDER / file).write_text(content)
