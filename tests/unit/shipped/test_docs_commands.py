"""Commands in the documentation exist: their names, flags, targets and values of the chart."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from steersman.cli.command import command_names, find_command
from steersman.config import FLAGS, load, validate

ROOT = Path(__file__).parents[3]
TEXTS = sorted(
    [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "src/steersman").rglob("README.md"),
        *map(ROOT.joinpath, ("README.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md")),
    ]
)


class Line(NamedTuple):
    """A command line, and the page that has it."""

    page: str
    words: list[str]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def command_lines(program: str) -> Iterator[Line]:
    """Yield what follows a program's name in code: in blocks and between backquotes."""
    for path in TEXTS:
        text = path.read_text().replace("\\\n", " ")
        blocks = re.findall(r"^(?:    |\$ )(.*)$", text, re.MULTILINE)
        blocks += [line for part in text.split("```")[1::2] for line in part.split("\n")]
        blocks += re.findall(r"`([^`\n]+)`", text)
        for code in blocks:
            found = re.search(rf"(?:^|[\s/(]){program} (.*)$", code)
            if found is None:
                continue
            try:
                words = shlex.split(found[1].partition(")")[0], comments=True)
            except ValueError:  # prose within quotes
                continue
            end = [n for n, word in enumerate(words) if word in ("|", "&&", ";", ">", "||")]
            yield Line(path.name, words[: end[0]] if end else words)


def of_steersman() -> list[Line]:
    """The command lines that are for this program, not sentences that begin with its name."""
    return [
        line
        for line in command_lines("steersman")
        if line.words
        and re.fullmatch(r"[a-z]+", line.words[0])
        and line.words[0] in command_names()
    ]


def test_there_are_commands_to_look_at() -> None:
    assert len(of_steersman()) > 80
    assert {line.words[0] for line in of_steersman()} == set(command_names())


@pytest.mark.parametrize("name", command_names())
def test_flags_of_commands_exist(name: str) -> None:
    command = find_command(name)
    known = {f"--{flag.name}" for flag in command.all_flags} | {"--help"}
    known |= {f"-{flag.short}" for flag in command.all_flags if flag.short}
    if command.group == "Run" or name == "config" or command.answer is not None:
        known |= {f"--{flag}" for flag in FLAGS} | {"-v"}
    for line in of_steersman():
        if line.words[0] == name:
            used = {word.partition("=")[0] for word in line.words if re.match(r"--?[a-z]", word)}
            assert used <= known, f"{line}: there is no {', '.join(used - known)}"


def test_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for line in command_lines("make"):
        words = [word for word in line.words if "=" not in word]
        if words and re.fullmatch(r"[a-z-]+", words[0]):
            assert words[0] in targets or " " in line.words[0], line


def test_values_of_the_chart_exist() -> None:
    values: dict[str, Any] = yaml.safe_load(
        (ROOT / "deploy/helm/steersman/values.yaml").read_text()
    )
    seen = 0
    for line in command_lines("helm"):
        if not any("deploy/helm" in word for word in line.words):
            continue
        for flag, value in zip(line.words, line.words[1:], strict=False):
            if flag == "-f" and not value.startswith("my-"):
                assert (ROOT / value).exists(), line
            if flag not in ("--set", "--set-string"):
                continue
            place: Any = values
            for part in value.partition("=")[0].split("."):
                assert isinstance(place, dict), f"{line}: {value}"
                if place == {} or part == "steersman/proxy":  # a label
                    break
                assert part in place, f"{line}: {value}"
                place = place[part]
            seen += 1
    assert seen > 10


def test_the_security_page_names_the_rights_that_the_chart_asks_for() -> None:
    templates = ROOT / "deploy/helm/steersman/templates"
    given = re.findall(r'"([A-Z]+_?[A-Z]+)"', (templates / "_helpers.tpl").read_text())
    page = (ROOT / "docs/security.md").read_text()
    rights = page.partition("## Rights")[2].partition("\n## ")[0]
    assert {"NET_ADMIN", "SYS_ADMIN"} <= set(given)
    for name in given:
        assert name in rights.partition("\n- ")[0], f"{name} is not in the table"
        assert name in rights.partition("\n- ")[2], f"no reason is given for {name}"
    read = re.findall(r"resources: \[(.*)\]", (templates / "rbac.yaml").read_text())
    assert len(read) > 3
    for kind in ", ".join(read).split(", "):
        assert kind in page.lower(), kind


def test_files_of_the_tree_exist() -> None:
    for path in TEXTS:
        for name in re.findall(
            r"(?<![\w/.-])(?:deploy|scripts|tests|src|benchmarks)/[\w./-]*\w", path.read_text()
        ):
            if "MODE" in name or "NAME" in name:
                continue
            found = list(ROOT.glob(name)) or list(ROOT.glob(f"{name}*"))
            assert found, f"{path.name}: {name}"


def test_configuration_in_the_docs_is_valid() -> None:
    head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
    seen = 0
    for path in TEXTS:
        for block in re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL):
            if not re.search("^steersman:", block, re.MULTILINE):
                continue
            loaded = load(block if "kind:" in block else head + block)
            assert not loaded.warnings, f"{path.name}: {loaded.warnings}"
            assert list(validate(loaded.config)) == [], path.name
            seen += 1
    assert seen > 1
