"""deploy/monitoring: made of its sources, of metrics that exist, with runbooks for its alerts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from reference import metric_rows

from scripts import monitoring
from scripts.monitoring import FOLDER
from tests.support.monitoring import metrics_in, queries, rules

ROOT = Path(__file__).parents[2]
RUNBOOKS = ROOT / "docs" / "monitoring.md"
CASES = Path(__file__).with_name("rules_test.yaml")
PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: `scripts/setup.sh tests`"
)
SUFFIXES = ("", "_bucket", "_sum", "_count")


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


@pytest.mark.parametrize("name", sorted(monitoring.made()))
def test_what_is_made_is_current(name: str) -> None:
    text = monitoring.made()[name]
    assert (FOLDER / name).read_text() == text, "run python scripts/monitoring.py"


def test_queries_ask_for_metrics_that_exist() -> None:
    exist = {f"{row.name}{suffix}" for row in metric_rows() for suffix in SUFFIXES}
    for query in queries():
        assert metrics_in(query) <= exist, query


def test_recorded_series_are_used_under_their_names() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = {name for query in queries() for name in re.findall(r"\bsteersman:[\w:]+", query)}
    assert used == recorded


def test_each_alert_has_a_runbook_and_says_where() -> None:
    anchors = re.findall(r"^### (\w+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert anchors == list(alerts()), "one paragraph for each alert, in the order of rules.yaml"
    for name, rule in alerts().items():
        link = rule["annotations"]["runbook_url"]
        assert link == f"docs/{RUNBOOKS.name}#{name.lower()}"
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_runbook_links_can_lead_to_docs_elsewhere() -> None:
    text = monitoring.made("https://docs.example.org/")["prometheusrule.yaml"]
    rule = yaml.safe_load(text)["spec"]["groups"][1]["rules"][0]
    link = rule["annotations"]["runbook_url"]
    assert link == "https://docs.example.org/monitoring.md#steersmandown"


def test_each_alert_is_tested_firing_with_others_that_are_well() -> None:
    text = yaml.safe_load(CASES.read_text())
    cases = [case for group in text["tests"] for case in group.get("alert_rule_test", ())]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(alerts())
    for group in text["tests"]:
        if any(case["exp_alerts"] for case in group.get("alert_rule_test", ())):
            names = {
                name
                for series in group["input_series"]
                for name in re.findall(r'instance="(\w)"', series["series"])
            }
            assert len(names) > 1, group["name"]


def test_boards_are_what_grafana_reads() -> None:
    for name in ("fleet", "node"):
        board = json.loads((FOLDER / f"{name}.json").read_text())
        assert board["uid"] == f"steersman-{name}"
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= monitoring.WIDE
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not taken & cells, panel["title"]
            taken |= cells
            for target in panel.get("targets", ()):
                assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        variables = {variable["name"] for variable in board["templating"]["list"]}
        used = set(re.findall(r"\$(\w+)", " ".join(monitoring.queries(source(name)))))
        assert used - {"rate"} == variables - {"datasource"}


def source(name: str) -> dict[str, Any]:
    board: dict[str, Any] = yaml.safe_load((FOLDER / "boards.yaml").read_text())[name]
    return board


def test_pods_are_found_with_the_port_that_they_declare() -> None:
    monitor = yaml.safe_load((FOLDER / "podmonitor.yaml").read_text())
    daemonset = yaml.safe_load((ROOT / "deploy/kustomize/base/daemonset.yaml").read_text())
    pod = daemonset["spec"]["template"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    assert wanted <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports[endpoint["port"]] == 10249
    assert monitor["spec"]["jobLabel"] in pod["metadata"]["labels"]


@PROMTOOL
def test_prometheus_understands_the_rules(tmp_path: Path) -> None:
    made = yaml.safe_load((FOLDER / "prometheusrule.yaml").read_text())
    plain = tmp_path / "made.yaml"
    plain.write_text(yaml.safe_dump(made["spec"]))
    for path in (FOLDER / "rules.yaml", plain):
        done = subprocess.run(
            ["promtool", "check", "rules", path], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert f"{len(rules())} rules found" in done.stdout


@PROMTOOL
def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    for path in (FOLDER / "rules.yaml", CASES):
        shutil.copy(path, tmp_path)
    done = subprocess.run(
        ["promtool", "test", "rules", CASES.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
