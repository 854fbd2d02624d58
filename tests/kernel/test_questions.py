"""The questions of an operator and the answers of the program: questions/answers.md.

Each is asked of a real process on a small cluster of network namespaces; `--update` writes the
page, otherwise the answers must be those of the page, apart from times, pids and other numbers
that differ from run to run.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from demo_cluster import POD_CIDR, Cluster

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.kernel

HERE = Path(__file__).parent / "questions"
PAGE = HERE / "answers.md"
QUESTIONS: list[dict[str, Any]] = yaml.safe_load((HERE / "questions.yaml").read_text())
STEERSMAN = (sys.executable, "-m", "steersman")
HEAD = """# Questions and answers

What an operator may ask at night, how to ask it, and the answer. A test
(`tests/kernel/test_questions.py`) asks each question on a cluster of network namespaces and writes
this page: two nodes, three pods, the Services of `demo/` and four that are special or in trouble
(`tests/kernel/questions/world.yaml`). steersman runs on node-a in nftables mode, and the
commands are run there. Exit status 0 means that all is well, 1 that something is wrong.
"""
VARYING = (
    (r"\bpid \d+", "pid N"),
    (r"\d+(\.\d+)? ?(ms|us|s|min|m|h|d)\b", "TIME"),
    (r"\d{4}-\d\d-\d\dT[\d:.]+Z?", "WHEN"),
    (r"\b\d\d:\d\d:\d\d\b", "WHEN"),
    # The question before removed rules: the repair may be before or after.
    (r"\bsync +revision \d+ \(.*", "sync N"),
    (r"\bhandle \d+", "handle N"),
    (r"(?<=:)(3[2-9]|[456]\d)\d{3}\b", "PORT"),
    (r"\d+(\.\d+)? (MB|kB|GB)", "SIZE"),
    (r"/tmp/[\w./-]+", "PATH"),
    (r'"(at|since|now|started|quietSeconds|uptimeSeconds|pid)": [^,\n]+', r'"\1": N'),
    (r"(?m)^(shop/\S+ +)[\d.-]+ +\d+ ", r"\1RATE COUNT "),  # of earlier questions
    (r"[ \t]+", " "),
)
"""What differs from run to run, and what stands for it when answers are compared."""


class Node:
    """node-a of the cluster, where steersman runs and the questions are asked."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def shell(self, line: str) -> None:
        argv = self._cluster.argv("node-a", ["sh", "-c", line])
        subprocess.run(argv, check=True, capture_output=True)

    def ask(self, words: str) -> tuple[int, str]:
        argv = self._cluster.argv("node-a", [*STEERSMAN, *shlex.split(words)])
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120
        )
        return done.returncode, (done.stdout + done.stderr).rstrip()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("world")
    manifests = folder / "manifests"
    manifests.mkdir()
    for path in (*(ROOT / "demo").glob("*.yaml"), HERE / "world.yaml"):
        (manifests / path.name).write_text(with_pod_names(path.read_text()))
    cluster = Cluster()
    try:
        cluster.build()
        flags = ["--hostname-override=node-a", f"--cluster-cidr={POD_CIDR}"]
        words = ["run", "--proxy-mode=nftables", f"--manifests={manifests}", *flags]
        with (folder / "log").open("wb") as log:
            process = cluster.start("node-a", "steersman", [*STEERSMAN, *words], log)
        node = Node(cluster)
        said = (folder / "log").read_text
        wait_until(lambda: process.poll() or node.ask("explain shop/web")[0] == 0, said)
        assert process.poll() is None, said()
        yield node
    finally:
        cluster.close()


def with_pod_names(text: str) -> str:
    """Give the endpoints of the demo the names of their pods, as Kubernetes does."""
    pods = {"10.244.1.11": "pod-1", "10.244.1.12": "pod-2", "10.244.2.13": "pod-3"}
    documents = list(yaml.safe_load_all(text))
    for endpoint in (end for document in documents for end in document.get("endpoints", ())):
        if name := pods.get(endpoint["addresses"][0]):
            endpoint["targetRef"] = {"kind": "Pod", "namespace": "shop", "name": name}
    return yaml.safe_dump_all(documents)


def section(node: Node, number: int, case: dict[str, Any]) -> str:
    """Ask a question; return its part of the page."""
    if "do" in case:
        node.shell(case["do"])
    try:
        status, answer = node.ask(case["ask"])
    finally:
        if "undo" in case:
            node.shell(case["undo"])
    lines = answer.splitlines()
    if "lines" in case and len(lines) > case["lines"]:
        lines = [*lines[: case["lines"]], f"... ({len(lines)} lines)"]
    answer = "\n".join(lines)
    prepared = f"$ {case['do']}\n" if "do" in case else ""
    return (
        f"## {number}. {case['question']}\n\n"
        f"```text\n{prepared}$ steersman {case['ask']}\n{answer}\n```\n\nExit status: {status}\n"
    )


def steady(text: str) -> str:
    for pattern, stand_in in VARYING:
        text = re.sub(pattern, stand_in, text)
    return text


def test_the_page_has_the_answers_of_today(node: Node, update: bool) -> None:
    sections = [section(node, number, case) for number, case in enumerate(QUESTIONS, 1)]
    page = "\n".join([HEAD, *sections])
    if update:
        PAGE.write_text(page)
    assert "Traceback" not in page
    failed = [text for text in sections if re.search(r"unknown command|Exit status: 2$", text)]
    assert not failed
    known = re.split(r"\n(?=## )", PAGE.read_text())[1:]
    assert len(known) == len(QUESTIONS)
    for case, now, then in zip(QUESTIONS, sections, known, strict=True):
        if words := case.get("says"):
            assert not [word for word in words if word not in now or word not in then], now
        else:
            assert [steady(line) for line in now.splitlines()] == [
                steady(line) for line in then.splitlines()
            ]
