"""From the start of the process to its first rule in the kernel, with an empty world."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import Figure, figure
from benchmarks.node import Netns
from benchmarks.process import FirstRule, api_server, cpu, steersman


def _start(*flags: str) -> tuple[float, float]:
    """Seconds to the first rule, and of CPU until then (with iptables' own)."""
    netns = Netns()
    netns.enter()
    first = FirstRule()
    begun = time.perf_counter()
    with steersman(*flags) as process:
        first.wait()
        return time.perf_counter() - begun, cpu(process.pid)


def _api_start(folder: Path) -> tuple[float, float]:
    netns = Netns()
    netns.enter()
    with api_server((), folder) as url:
        first = FirstRule()
        begun = time.perf_counter()
        with steersman("--master", url) as process:
            first.wait()
            return time.perf_counter() - begun, cpu(process.pid)


def run(quick: bool) -> list[Figure]:
    """Medians of 9 starts (3 when quick) from an empty directory and from an API server."""
    figures = []
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "empty").mkdir()
        ways: dict[str, Callable[[], tuple[float, float]]] = {
            "manifests": lambda: _start("--manifests", str(folder / "empty")),
            "API server": lambda: _api_start(folder),
        }
        for name, start in ways.items():
            runs = [start() for _ in range(3 if quick else 9)]
            seconds, used = (statistics.median(column) for column in zip(*runs, strict=True))
            figures.append(figure(f"start, {name}", "iptables-nft", 0, (seconds, "s")))
            figures.append(figure(f"start, {name}: CPU", "iptables-nft", 0, (used, "s")))
    return figures
