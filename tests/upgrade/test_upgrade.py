"""The last release is replaced by this version and comes back: nobody's connection notices.

The last release is the newest tag `v*` before this commit, or what `PREVIOUS=REVISION` names; where
there is no tag, the newest commit that is a day older. Both versions are built as wheels, as they
are shipped, and run in turn as pods of a DaemonSet do: the old process ends, then the new one
starts. In userspace mode the process itself carries the connections, so the new one takes over
instead (`--take-over`).
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.packaging.artefacts import ROOT, hatch, needs_clang, own_wheel
from tests.support.lab.cluster import Lab
from tests.support.lab.ebpf_node import MARKS
from tests.support.lab.machine import (
    MODES,
    WAIT,
    Machine,
    failed,
    open_connections,
    still_carry,
)
from tests.support.lab.switches import WAYS, Clients, lab
from tests.support.waiting import wait_until

__all__ = ["lab"]  # a fixture
pytestmark = [*MARKS, pytest.mark.slow(seconds=120), needs_clang]

LISTINGS = (
    ("nft", "--stateless", "list", "ruleset"),
    ("iptables-save",),
    ("ip", "rule"),
    ("ip", "-o", "link"),
)
CHANGING = re.compile(
    r"^#.*|\[\d+:\d+\]|\b3\d{4}\b|pid=.*since=\d+|^table \S+ \S+ \{\n\}$", re.MULTILINE
)
"""Counters, ports of the userspace proxy, the process that holds the node's lock, and empty tables,
which iptables-nft makes when it lists."""


@cache
def previous() -> str:
    """The revision of the last release; "" where there is none, and no history."""
    if given := os.environ.get("PREVIOUS"):
        return given
    if tag := git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD^"):
        return tag
    now = git("log", "-1", "--format=%ct")
    return git("rev-list", "-1", f"--before={int(now) - 86400}", "HEAD") if now else ""


def git(*words: str) -> str:
    """What git says; "" if it fails."""
    argv = ["git", *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """How the last release is started, and how this version is."""
    if not previous():
        pytest.skip(
            "there is no release and no history: PREVIOUS=REVISION names one to be replaced"
        )
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    argv = ["git", "archive", "--format=tar", previous()]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 or later
        archive.extractall(old / "tree")
    hatch(old / "tree", "wheel", old)
    (wheel,) = old.glob("*.whl")
    return program(wheel, old), program(own_wheel(tmp_path_factory), new)


def program(wheel: Path, folder: Path) -> list[str]:
    """Unpack a wheel, and return the command line that runs it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return ["env", f"PYTHONPATH={folder / 'site'}", sys.executable, "-m", "steersman"]


@pytest.fixture
def machine(lab: Lab, tmp_path: Path) -> Iterator[Machine]:
    made = Machine(lab, tmp_path)
    yield made
    made.close()


def kernel(machine: Machine) -> list[str]:
    """What the kernel has of the process, in the words of its tools."""
    texts = [CHANGING.sub("", machine.lab.run(*argv)) for argv in LISTINGS]
    pins = machine.mounts.path("/sys/fs/bpf")
    lines = [line.strip() for text in texts for line in text.splitlines()]
    lines += [str(path.relative_to(pins)) for path in pins.rglob("*")]
    return sorted(filter(None, lines))


def replace(
    machine: Machine, mode: str, old: subprocess.Popen[bytes], program: list[str]
) -> subprocess.Popen[bytes]:
    """Replace a process by one of another version, as this is done in the mode."""
    if mode == "userspace":
        return machine.start(mode, "--take-over", "--drain-period=1m", program=program)
    old.send_signal(signal.SIGTERM)
    assert old.wait(WAIT) == 0, machine.log.read_text()
    return machine.start(mode, program=program)


@pytest.mark.parametrize("mode", MODES)
def test_upgrade_and_way_back_lose_no_connection_and_leave_nothing(
    mode: str, machine: Machine, programs: tuple[list[str], list[str]]
) -> None:
    old, new = programs
    flags = ["--drain-period=1m"] if mode == "userspace" else []
    process = machine.start(mode, *flags, program=old)
    machine.until(lambda: "ServicePorts planned" in machine.log.read_text())  # IPv6, too
    before = kernel(machine)
    clients = Clients(machine.lab)
    try:
        for program in (new, old):
            live = open_connections(machine.lab)
            process = replace(machine, mode, process, program)
            opened = clients.opened
            while clients.opened < opened + 2 * len(WAYS):
                clients.pause()
            assert failed(clients) == [], machine.log.read_text()
            still_carry(live)
            clients.check()
            for sock in live:
                sock.close()
    finally:
        clients.close()
    if mode == "userspace":  # those that drain end with their last connection
        for each in machine.processes[:-1]:
            assert each.wait(WAIT) == 0, machine.log.read_text()

    def differing() -> list[str]:
        return sorted(set(kernel(machine)) ^ set(before))

    wait_until(lambda: not differing(), differing)
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT) == 0
    done = subprocess.run(machine.argv(*old, "cleanup"), capture_output=True, check=True, text=True)
    assert "kernel objects removed" in done.stdout
    assert not machine.rules(mode)
