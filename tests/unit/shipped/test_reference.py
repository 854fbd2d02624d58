"""The pages of the reference say what the code does."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import reference
import ways
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from benchmarks import draw
from steersman.cli.command import command_names, find_command
from steersman.cli.main import main
from steersman.config.reload import needs_restart
from steersman.config.types import ProxyConfig, Steersman
from steersman.model.drift import Drift
from steersman.model.node_state import Condition, NodeState, SourceStatus
from steersman.model.top import TopRow, TopSample
from steersman.modes.specs import SPECS
from steersman.operate.status import Status
from steersman.operate.top import Top
from steersman.run.observe.metric_table import DECLARED

ROOT = Path(__file__).parents[3]
NODE = ["--manifests", str(ROOT / "demo"), "--cluster-cidr", "10.244.0.0/16"]
NODE += ["--hostname-override", "node-a"]
QUESTIONS = {
    "FlowAnswer": "explain --from shop/web-1 --to shop/cart:http",
    "ReachAnswer": "explain --from shop/web-1",
    "ServiceAnswer": "explain shop/web",
    "PodAnswer": "explain pod/shop/web-1",
    "Problems": "explain --problems",
    "ServiceList": "services",
    "EndpointList": "endpoints",
    "NodePortList": "nodeports",
    "Diagnosis": "doctor shop/web",
    "VersionAnswer": "version",
}
"""Command lines whose answer needs neither a process nor a kernel."""


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return reference.made()


def test_every_field_and_flag_has_a_meaning(made: dict[str, str]) -> None:
    for name in ("flags.md", "fields.md", "annotations.md", "metric-list.md"):
        rows = re.findall(r"^\| [`\[].*\|$", made[name], re.MULTILINE)
        assert len(rows) > 5, name
        for row in rows:
            assert re.search(r"[^ |] \|$", row), f"{name}: {row}"


def marked(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Yield the paths of fields and sections that are read only at the start."""
    for field in msgspec.structs.fields(kind):
        if needs_restart(field):
            yield prefix + field.encode_name
        elif isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from marked(field.type, f"{prefix}{field.encode_name}.")


def test_fields_that_need_a_restart_are_marked(made: dict[str, str]) -> None:
    rows = re.findall(
        r"^\| `(\S+)` \| .* \| (restart|) \| [^|]* \|$", made["fields.md"], re.MULTILINE
    )
    once = tuple(marked(ProxyConfig))
    assert len(rows) > 60
    for name, mark in rows:
        wanted = any(f"{name}.".startswith(f"{path}.") for path in once)
        assert wanted == (mark == "restart"), name


def test_every_field_of_ours_is_listed(made: dict[str, str]) -> None:
    for field in msgspec.structs.fields(Steersman):
        assert re.search(
            rf"^\| `steersman\.{field.encode_name}[.`]", made["fields.md"], re.MULTILINE
        )


def test_every_command_that_answers_has_a_schema() -> None:
    answering = {name for name in command_names() if find_command(name).answer is not None}
    assert set(reference.ANSWERS) == answering


def test_every_metric_is_listed_with_one_meaning(made: dict[str, str]) -> None:
    listed = re.findall(r"^\| `(\w+)` ", made["metric-list.md"], re.MULTILINE)
    assert listed == sorted({metric.name for metric in DECLARED})


def test_modes_declare_only_metrics_that_are_listed() -> None:
    names = {row.name for row in reference.metric_rows()}
    for spec in SPECS.values():
        assert set(spec.metrics) <= names


def test_pictures_are_as_make_reference_draws_them() -> None:
    drawn = ways.made() | draw.made(draw.read(draw.SOURCE))
    paths = [*ways.IMAGES.glob("way*.svg"), *ways.IMAGES.glob("figures-*.svg")]
    assert {path.name for path in paths} == drawn.keys()
    stale = [path.name for path in paths if path.read_text() != drawn[path.name]]
    assert not stale, "`make reference` draws them"
    pages = "".join(p.read_text() for p in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    assert [name for name in drawn if f"images/{name})" not in pages] == []


@pytest.mark.parametrize(("mode", "way"), ways.WAYS)
def test_pictures_agree_with_explain(mode: str, way: str) -> None:
    flow, _ = ways.ask(mode, way)
    (hop,) = flow.hops
    texts = " ".join(step.text for step in ways.WAYS[mode, way])
    assert hop.masquerade == ("masquerad" in texts or "the endpoint sees this node" in texts)


def test_a_step_without_an_object_is_an_error() -> None:
    with pytest.raises(LookupError, match="nothing that is rendered"):
        ways.named(ways.Step("", "KUBE-NOTHING-(.)", "{0}", ""), "-A KUBE-SERVICES")


def closed(name: str) -> dict[str, Any]:
    """The schema of an answer, without room for fields that it does not name."""
    schema: dict[str, Any] = json.loads(reference.made()[f"schemas/{name}.json"])
    for definition in schema["$defs"].values():
        if "properties" in definition:
            definition.setdefault("additionalProperties", False)
    return schema


def complaints(name: str, answer: object) -> Iterator[str]:
    for error in Draft202012Validator(closed(name)).iter_errors(answer):
        yield f"{error.json_path}: {error.message}"


@pytest.mark.parametrize("name", QUESTIONS)
def test_answers_are_as_their_schema_says(name: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        node = [] if name == "VersionAnswer" else NODE
        status = main([*QUESTIONS[name].split(), "-o", "json", *node])
    assert status in (0, 1)
    answer = json.loads(out.getvalue())
    assert list(complaints(name, answer)) == []
    assert list(complaints(name, {**answer, "other": 1})) != []


def test_the_status_is_as_its_schema_says() -> None:
    source = SourceStatus("apiserver", "https://10.0.0.1:6443", quiet_seconds=1.0)
    state = NodeState("node-a", synced_at=1.0, phases={"plan": 0.1}, source=source, now=5.0)
    condition = Condition("Synced", "True", "Synced", "all is in force", 1.0)
    for status in (
        Status(conditions=(condition,), state=state, now=5.0),
        Status(conditions=(), now=5.0),
    ):
        assert list(complaints("Status", json.loads(json.dumps(status.data)))) == []


def test_a_sample_of_top_is_as_its_schema_says() -> None:
    state = NodeState("node-a", "nftables", synced_at=9.0, repairs=3, drift=Drift(5.0, missing=2))
    top = Top(sample=TopSample(state, counted=True, rows=(TopRow("shop/web"),)))
    data = json.loads(msgspec.json.encode(top.data))
    assert list(complaints("Top", data)) == []
    assert data["sample"]["status"]["mode"] == "nftables"
