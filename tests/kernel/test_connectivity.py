"""`steersman connectivity` on a node of namespaces: all is well, a firewall, and a killed run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.lab.cluster import Lab
from tests.support.lab.ebpf_node import MARKS
from tests.support.lab.machine import MODES, Machine
from tests.support.lab.switches import lab

__all__ = ["lab"]  # a fixture
pytestmark = MARKS
WORDS = (sys.executable, "-m", "steersman", "connectivity", "-o", "json")
TRIED = {
    *("pod to pod, TCP", "pod to pod, UDP"),
    *("pod to cluster IP, TCP", "pod to cluster IP, UDP"),
    *("node to cluster IP, TCP", "node to cluster IP, UDP"),
    *("outside to node port, TCP", "outside to node port, UDP"),
    *("pod to itself by its Service", "session affinity", "internal policy Local"),
}


@pytest.fixture
def machine(lab: Lab, tmp_path: Path) -> Iterator[Machine]:
    made = Machine(lab, tmp_path)
    yield made
    made.close()


def asked(machine: Machine) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status, and what was tried with IPv4."""
    done = subprocess.run(
        machine.argv(*WORDS), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout, (done.stderr, machine.log.read_text())
    tried = json.loads(done.stdout)["tried"]
    return done.returncode, {each["what"]: each for each in tried if each["family"] == "IPv4"}


def left(machine: Machine) -> list[str]:
    """The objects of a run that are still there."""
    files = [path.name for path in (machine.directory / "objects").iterdir()]
    links = machine.lab.run("ip", "-o", "link").splitlines()
    return [*(name for name in files if "connectivity" in name), *(x for x in links if "smd-" in x)]


@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize("mode", MODES)
def test_a_node_that_serves_passes(machine: Machine, mode: str) -> None:
    machine.start(mode)
    status, tried = asked(machine)
    assert {what: tried[what]["result"] for what in TRIED} == dict.fromkeys(TRIED, "ok"), tried
    policy = tried["external policy Local, client seen"]
    assert policy["result"] == ("not tried" if mode in ("userspace", "ebpf") else "ok"), policy
    assert status == 0
    assert left(machine) == []


@pytest.mark.slow(seconds=60)
def test_runs_that_are_ended_and_a_firewall(machine: Machine) -> None:
    machine.start("nftables")

    # One that is interrupted removes everything.
    with subprocess.Popen(machine.argv(*WORDS), start_new_session=True) as interrupted:
        machine.until(lambda: any("connectivity" in name for name in left(machine)))
        interrupted.send_signal(signal.SIGINT)
    assert left(machine) == []

    # A run that is killed leaves a file, which the next one removes.
    with subprocess.Popen(machine.argv(*WORDS), start_new_session=True) as killed:
        machine.until(lambda: any("connectivity" in name for name in left(machine)))
        killed.send_signal(signal.SIGKILL)
    machine.until(lambda: not any("smd-" in name for name in left(machine)))
    assert left(machine)

    machine.lab.run(
        *("nft", "-f", "-"),
        stdin="""table ip firewall { chain forward {
        type filter hook forward priority -10
        udp dport 8080 drop
        }
        }
        """,
    )
    status, tried = asked(machine)
    failed = {what for what, each in tried.items() if each["result"] == "failed"}
    assert failed == {"pod to pod, UDP", "pod to cluster IP, UDP", "outside to node port, UDP"}
    assert tried["pod to cluster IP, UDP"]["reason"].endswith(":80: no answer within 3 s")
    assert status == 1
    assert left(machine) == []
