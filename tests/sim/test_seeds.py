"""Short lives of nodes in every seed, and that a seed is all that decides about a life."""

from __future__ import annotations

import os
import re
import subprocess
import sys

SEEDS = 500
HOURS = 0.25


def simulate(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the simulation in a process of its own: it replaces the clocks."""
    argv = [sys.executable, "-m", "tests.sim", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_nodes_survive_their_lives() -> None:
    cores = os.cpu_count() or 1
    done = simulate(f"--seeds={SEEDS}", f"--hours={HOURS}", f"-j={cores}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_replays_exactly() -> None:
    first, second = (simulate("--seed=7", "--hours=1").stdout for _ in range(2))
    assert re.findall(r"^seed 7: (\S+),", first, re.MULTILINE)
    assert re.sub(r"in .* s of CPU .*", "", first) == re.sub(r"in .* s of CPU .*", "", second)
