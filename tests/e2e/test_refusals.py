"""What keeps a mode from running is a sentence that says what to do, in every mode."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.steersman import FLAGS, NOBODY, manifests, world

pytestmark = pytest.mark.kernel
PROGRAMS = "iptables iptables-nft iptables-legacy nft ipset modprobe ip"


def refused(tmp_path: Path, mode: str, *through: str) -> str:
    """Start where it cannot run; what it says."""
    folder = manifests(tmp_path / "m", *world())
    command = [sys.executable, "-m", "steersman", "run", f"--manifests={folder}", *FLAGS]
    argv = ["unshare", "--net", *through, *command, f"--proxy-mode={mode}", "--strict"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("steersman: ")]
    assert len(said) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "Errno" not in said[0]
    return said[0].removeprefix("steersman: ")


@pytest.mark.parametrize(
    ("mode", "program"), [("iptables", "iptables"), ("nftables", "nft"), ("userspace", "iptables")]
)
@pytest.mark.parametrize(
    ("write", "why"),
    [
        (":", "is not installed; install the package"),
        ('for i in $0; do echo > "/usr/sbin/$i"; done', "cannot be executed: Permission denied."),
    ],
    ids=["missing", "not executable"],
)
def test_without_its_programs(
    tmp_path: Path, mode: str, program: str, write: str, why: str
) -> None:
    script = f'mount -t tmpfs none /usr/sbin && {{ {write}; }} && exec "$@"'
    through = ("unshare", "--mount", "sh", "-c", script, PROGRAMS)
    said = refused(tmp_path, mode, *through)
    assert said.startswith(f"{mode} mode cannot run here: {program} {why}")


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_without_rights(tmp_path: Path, mode: str) -> None:
    said = refused(tmp_path, mode, *NOBODY)
    assert said.startswith(f"{mode} mode cannot run here: ")
    assert "needs root or CAP_NET_ADMIN" in said
