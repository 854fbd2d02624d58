"""What the daemon costs while nothing happens: CPU and wake-ups."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, figure

_DEMO = Path(__file__).parents[1] / "demo"
_TICKS = os.sysconf("SC_CLK_TCK")


def _processes(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _processes(int(child))


def _cpu(pid: int) -> float:
    """Seconds of CPU so far, of the process and of its children that ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


def _wakeups(pid: int) -> int:
    """Voluntary context switches so far: each is a sleep that ended."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                total += int(line.split()[1])
    return total


def run(quick: bool) -> list[Figure]:
    """Watch `steersman run --manifests demo/` for 40 s (5 when quick), after 3 s of start."""
    seconds = 5 if quick else 40
    argv = ["unshare", "--net", sys.executable, "-m", "steersman", "run", "--manifests", str(_DEMO)]
    process = subprocess.Popen(
        [*argv, "--hostname-override", "node-a", "--cluster-cidr", "10.244.0.0/16"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        time.sleep(3)
        if process.poll() is not None:
            raise RuntimeError(f"steersman run ended with status {process.returncode}")
        cpu, wakeups = _cpu(process.pid), _wakeups(process.pid)
        time.sleep(seconds)
        cpu, wakeups = _cpu(process.pid) - cpu, _wakeups(process.pid) - wakeups
    finally:
        process.terminate()
        process.wait()
    return [
        figure("idle: CPU of one core", "iptables", 2, (100 * cpu / seconds, "%")),
        figure("idle: wake-ups a second", "iptables", 2, (wakeups / seconds, "/s")),
    ]
