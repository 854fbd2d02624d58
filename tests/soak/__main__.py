"""`python -m tests.soak`: all modes side by side; see `tests.soak`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.soak.node import METRICS, Clients, Node, Size, SoakError, running

MODES = ("nftables", "iptables", "ebpf", "userspace")
MORE_MEMORY = 1.3
"""An old process may have this many times the memory of a new one: what Python keeps for reuse."""
MORE_DESCRIPTORS = 3
"""Connections to the API server and to clients that may just be open."""


def soak(mode: str, seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """Run one mode; return its figures.

    Raises:
        SoakError: something was lost, left over, or grew.
    """
    with running(mode, folder, seed) as node, Clients(node.lab) as clients:
        resident = churn(node, clients, seconds)
        clients.pause = 1.0
        node.fill()
        node.settle()
        old = node.size()
        lost, opened = node.lost(clients.failed), clients.opened
        node.daemon.stop()
        code, text = node.daemon.run("cleanup")
        if code:
            raise SoakError(f"cleanup: {text}")
        node.daemon.start()
        node.wait_ready()
        node.settle()
        new = node.size()
        problems = [*differences(old, new), *errors_in(node.log)]
        if lost:
            problems.append(f"{len(lost)} connections failed while nothing was broken: {lost[:3]}")
        return {
            "mode": mode,
            "hours": round(seconds / 3600, 2),
            "changes": node.changes,
            "faults": dict(node.happened),
            "history": node.history,
            "connections": opened,
            "failed near faults": len(clients.failed) - len(lost),
            "failed in stalls": clients.excused,
            "MB in the second and the last tenth": resident,
            "old": [round(old.resident, 1), old.descriptors, old.threads, old.kernel.total()],
            "new": [round(new.resident, 1), new.descriptors, new.threads, new.kernel.total()],
            "problems": problems,
        }


def churn(node: Node, clients: Clients, seconds: float) -> list[float]:
    """Change and break things; return the memory in the second and in the last tenth, in MB."""
    began = time.monotonic()
    next_fault, next_reading = began + min(20.0, seconds / 10), began
    readings: list[float] = []
    while (now := time.monotonic()) < began + seconds:
        node.change()
        time.sleep(0.1)
        if now > next_fault:
            node.break_something(clients)
            next_fault = time.monotonic() + 20.0
        if now > next_reading:
            node.get(METRICS)
            readings.append(node.size().resident)
            next_reading = now + max(1.0, seconds / 500)
            node.api("compact")  # the API server's own memory
    tenth = max(1, len(readings) // 10)
    parts = readings[tenth : 2 * tenth] or readings, readings[-tenth:]
    return [round(statistics.median(part), 1) for part in parts]


def differences(old: Size, new: Size) -> list[str]:
    """Return in what an old process differs from a new one."""
    found = []
    if old.resident > new.resident * MORE_MEMORY:
        found.append(f"memory: {old.resident:.0f} MB, {new.resident:.0f} MB in a new process")
    if old.descriptors > new.descriptors + MORE_DESCRIPTORS:
        found.append(f"descriptors: {old.descriptors}, {new.descriptors} in a new process")
    for left, lines in (
        ("left over", old.kernel - new.kernel),
        ("missing", new.kernel - old.kernel),
    ):
        if lines:
            found.append(f"{lines.total()} lines of the kernel are {left}: {[*lines][:5]}")
    return found


def errors_in(log: Path) -> list[str]:
    """Return what must never be in a log."""
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if "Traceback" in line or "Task exception" in line][:5]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=3.0)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for the logs; by default a temporary one")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="sm-soak-"))
    if args.child:
        (folder / args.modes).mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        print(json.dumps(soak(args.modes, args.hours * 3600, args.seed, folder / args.modes)))
        return 0
    print(f"logs: {folder}", flush=True)
    return report(run_all(args.modes.split(","), args.hours, args.seed, folder))


def run_all(modes: Sequence[str], hours: float, seed: int, folder: Path) -> dict[str, Any]:
    """Run every mode in a process of its own; return figures, or what went wrong."""
    children = {}
    for mode in modes:
        argv = [sys.executable, "-m", "tests.soak", "--child", f"--modes={mode}"]
        argv += [f"--hours={hours}", f"--seed={seed}", f"--folder={folder}"]
        children[mode] = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    found: dict[str, Any] = {}
    try:
        for mode, child in children.items():
            out, err = child.communicate()
            failed = err.decode().strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
            found[mode] = json.loads(out) if child.returncode == 0 else {"problems": failed}
    finally:
        for child in children.values():
            if child.poll() is None:
                child.terminate()
                child.wait()
    (folder / "figures.json").write_text(json.dumps(found, indent=1))
    return found


def report(found: dict[str, Any]) -> int:
    """Print a table; return the exit code."""
    columns = ("hours", "changes", "connections", "failed near faults", "failed in stalls")
    print(
        "| mode |",
        " | ".join(columns),
        "| faults | MB / descriptors / threads / lines | fresh | problems |",
    )
    print("| --- " * (len(columns) + 5) + "|")
    for mode, row in found.items():
        cells = [str(row.get(name, "")) for name in columns]
        cells.append(str(sum(row.get("faults", {}).values())))
        cells += [" / ".join(map(str, size)) for size in (row.get("old", ()), row.get("new", ()))]
        print(f"| {mode} |", " | ".join(cells), f"| {'; '.join(row['problems']) or 'none'} |")
    return int(any(row["problems"] for row in found.values()))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    raise SystemExit(main())
