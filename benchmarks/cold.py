"""Cold start into an empty kernel: from objects in the Store to all rules in force."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks import world
from benchmarks.figures import Figure, figure
from benchmarks.node import Flat, Node
from steersman.run.process.memory import collect_rarely


class _Cost(NamedTuple):
    seconds: float
    cpu: float
    """Seconds of CPU, of this process and of its children."""


def _cost(work: Callable[[], None]) -> _Cost:
    before, begun = os.times(), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - begun, os.times()
    return _Cost(seconds, sum(after[:4]) - sum(before[:4]))


def _ours(variant: str, services: int) -> _Cost:
    node = Node(variant, services)
    cost = _cost(node.sync)
    node.close()
    return cost


def _flat(variant: str, services: int) -> _Cost:
    numbers = range(services)
    own = [line for n in numbers for line in world.service_rules(n, world.pods(n))]
    text = world.restore_text(numbers, own, world.JUMPS)
    flat = Flat(variant)
    cost = _cost(lambda: flat.restore(text))
    flat.close()
    return cost


def run(quick: bool) -> list[Figure]:
    """Measure 10,000 Services (500 when quick) in both variants, ours and upstream's in turn."""
    collect_rarely()  # as at the start of a process
    services = 500 if quick else 10_000
    figures = []
    for variant in ("nft", "legacy"):
        runs = 1 if variant == "nft" and not quick else 3  # upstream's shape takes over a minute
        rounds = [(_ours(variant, services), _flat(variant, services)) for _ in range(runs)]
        ours, flat = (
            _Cost(*map(statistics.median, zip(*costs, strict=True)))
            for costs in zip(*rounds, strict=True)
        )
        mode = f"iptables-{variant}"
        figures += [
            figure("cold start", mode, services, (ours.seconds, "s"), flat.seconds),
            figure("  CPU", mode, services, (ours.cpu, "s"), flat.cpu),
        ]
    return figures
