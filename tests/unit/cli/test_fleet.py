"""Flags that say how to reach nodes, and the commands that have them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from steersman.cli.command import Command, find_command
from steersman.cli.commands.nodes import COMMAND as NODES
from steersman.cli.commands.problems import COMMAND as PROBLEMS
from steersman.cli.commands.ui import COMMAND as UI
from steersman.cli.commands.ui import run_ui
from steersman.cli.fleet import finder_of
from steersman.config import parse_command_line
from steersman.model.findings import Finding, Severity
from steersman.model.world import World
from steersman.operate import load
from steersman.operate.answer import QuestionError
from steersman.operate.client import NotRunningError
from steersman.operate.connectivity.cluster import SELECTOR
from steersman.operate.fleet_view import SORTS
from steersman.operate.node_trouble import HEALTHS
from steersman.operate.problems import LEVELS, Problems
from steersman.source.kubeconfig import KubeconfigError
from steersman.ui.nodes import Finder, FixedNodes, PodNodes
from tests.support.builders import kube
from tests.support.builders.asked import DEMO, asked
from tests.support.fleet import SimulatedNodes

KUBECONFIG = """
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "https://10.0.0.1:6443"}}]
users: [{name: u, user: {token: t}}]
"""


def finder(*words: str) -> Finder:
    return finder_of(parse_command_line(words, extra=NODES.all_flags, allow_arguments=True))


def test_ways_to_nodes(tmp_path: Path) -> None:
    assert isinstance(finder(), FixedNodes)
    (tmp_path / "nodes").write_text("b=http://10.0.0.2:1\n")
    given = finder("--node=a=http://10.0.0.1:1", f"--nodes-file={tmp_path / 'nodes'}")
    assert isinstance(given, FixedNodes)
    assert given._urls == {"a": "http://10.0.0.1:1", "b": "http://10.0.0.2:1"}
    (tmp_path / "config").write_text(KUBECONFIG)
    assert isinstance(finder(f"--kubeconfig={tmp_path / 'config'}", "--state-port=9"), PodNodes)


def test_contradictions_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# none\n")
    for words, said in (
        (("--node=http://a", "--in-cluster"), "cannot be combined with --kubeconfig"),
        ((f"--nodes-file={tmp_path / 'none'}",), "--nodes-file .*none: .*No such file"),
        ((f"--nodes-file={tmp_path / 'empty'}",), "names no node"),
        (("--node=a=b",), "--node: 'b' is not a URL"),
    ):
        with pytest.raises(QuestionError, match=said):
            finder(*words)
    with pytest.raises(KubeconfigError, match="KUBERNETES_SERVICE_HOST"):
        finder("--in-cluster")


async def test_problems_of_nodes_that_are_asked_once() -> None:
    flags = {flag.name: flag for flag in PROBLEMS.flags}
    assert flags["severity"].choices == LEVELS
    words = ["--node=a=http://127.0.0.1:1", "--severity=error", "REACHED"]
    assert PROBLEMS.answer is not None
    answer = await PROBLEMS.answer(
        parse_command_line(words, extra=PROBLEMS.all_flags, allow_arguments=True)
    )
    assert isinstance(answer, Problems)
    (problem,) = answer.problems
    assert problem.nodes == ("a",)
    assert problem.text.startswith("cannot be reached")
    assert answer.exit_code == 1
    other = parse_command_line([*words, "other"], extra=PROBLEMS.all_flags, allow_arguments=True)
    found = await PROBLEMS.answer(other)
    assert isinstance(found, Problems)
    assert found.problems == ()


async def test_problems_without_flags_are_those_of_this_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that the process knows counts, also Services without endpoints."""
    world = asked(kube.service("none", "10.96.1.2"), *DEMO)
    answers = iter((world, world, NotRunningError("no steersman runs here")))

    async def of_process() -> World:
        match next(answers):
            case World() as found:
                return found
            case error:
                raise error

    monkeypatch.setattr(load, "world_of_process", of_process)
    parsed = parse_command_line((), extra=PROBLEMS.all_flags, allow_arguments=True)
    assert PROBLEMS.follow is not None
    assert PROBLEMS.answer is not None
    assert PROBLEMS.follow(parsed, 0.0) is None, "it is asked again for each answer"
    for answer in (await PROBLEMS.answer(parsed), await PROBLEMS.answer(parsed)):
        assert isinstance(answer, Problems)
        assert [each.service for each in answer.problems] == ["shop/none"]
        assert answer.problems[0].evidence
        assert answer.exit_code == 1
    gone = await PROBLEMS.answer(parsed)
    assert isinstance(gone, Problems)
    assert [each.text for each in gone.problems] == ["cannot be reached"]


@pytest.mark.parametrize("command", [NODES, PROBLEMS], ids=["nodes", "problems"])
async def test_who_watches_nodes_keeps_their_streams(command: Command) -> None:
    async with SimulatedNodes(3) as simulated:
        words = [f"--node={name}={url}" for name, url in simulated.urls.items()]
        parsed = parse_command_line(words, extra=command.all_flags, allow_arguments=True)
        assert command.follow is not None
        answers = command.follow(parsed, 0.05)
        assert answers is not None
        async with asyncio.timeout(60):
            assert (await anext(answers)).exit_code == 0
            simulated.change("node-0002", failure="the kernel refuses")
            simulated.find(
                "node-0002", Finding("Service shop/web", "spec", "is wrong", Severity.ERROR)
            )
            while not (await anext(answers)).exit_code:
                pass
            simulated.change("node-0002", failure="")
            simulated.find("node-0002")
            while (await anext(answers)).exit_code:
                pass
        assert simulated.streams == 3
        await answers.aclose()  # type: ignore[attr-defined] # a generator


def test_pages_are_served_on_loopback_only() -> None:
    for listen, said in (
        ("0.0.0.0:80", "only loopback is served"),
        ("nonsense", "--listen nonsense: "),
    ):
        with pytest.raises(QuestionError, match=said):
            run_ui([f"--listen={listen}"])


def test_choices_of_flags_are_those_of_the_answer() -> None:
    flags = {flag.name: flag for flag in NODES.flags}
    assert flags["sort"].choices == SORTS
    assert flags["health"].choices == tuple(HEALTHS)
    assert flags["selector"].default == SELECTOR
    assert find_command("ui") is UI
