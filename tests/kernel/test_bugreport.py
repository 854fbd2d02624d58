"""`steersman bugreport` beside a real process: its parts in each mode, and without a process."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lab.cluster import Lab
from tests.support.lab.ebpf_node import MARKS
from tests.support.lab.machine import MODES, Machine
from tests.support.lab.switches import lab

__all__ = ["lab"]  # a fixture
pytestmark = MARKS
FROM_THE_PROCESS = {
    *("config.json", "drift.json", "history.json", "kernel/objects.txt", "process.txt"),
    *("status.json", "version.json", "node/facts.txt", "kernel/nft.txt", "kernel/iptables.txt"),
}


@pytest.fixture
def machine(lab: Lab, tmp_path: Path) -> Iterator[Machine]:
    made = Machine(lab, tmp_path)
    yield made
    made.close()


def parts_of(machine: Machine) -> tuple[dict[str, str], dict[str, str]]:
    """The files of a report, and the problems of its parts."""
    file = machine.directory / "report.tar.gz"
    words = (sys.executable, "-m", "steersman", "bugreport", str(file))
    subprocess.run(machine.argv(*words), check=True, capture_output=True, timeout=120)
    files = {}
    with tarfile.open(file) as tar:
        for member in tar:
            body = tar.extractfile(member)
            assert body is not None
            files[member.name.partition("/")[2]] = body.read().decode()
    index = json.loads(files["index.json"])["parts"]
    return files, {part["name"]: part["problem"] for part in index}


@pytest.mark.slow(seconds=40)
@pytest.mark.parametrize("mode", MODES)
def test_the_report_has_what_the_process_and_the_kernel_have(machine: Machine, mode: str) -> None:
    machine.start(mode)
    files, problems = parts_of(machine)
    assert {name: problems[name] for name in FROM_THE_PROCESS} == dict.fromkeys(
        FROM_THE_PROCESS, ""
    )
    assert files.keys() >= FROM_THE_PROCESS
    assert [name for name, text in files.items() if "kernel/" in name and "10.96.0.10" in text]
    assert json.loads(files["status.json"])["mode"] == mode
    assert f"--proxy-mode={mode}" in files["process.txt"]
    assert problems["kubeconfig.json"] == "the process has none"


def test_without_a_process_the_node_is_described(machine: Machine) -> None:
    files, problems = parts_of(machine)
    assert "no steersman runs" in problems["drift.json"]
    assert {"status.json", "node/facts.txt", "kernel/nft.txt"} <= files.keys()
