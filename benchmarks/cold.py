"""Cold start into an empty kernel: from objects in the Store to all rules in force."""

from __future__ import annotations

import time

from benchmarks import world
from benchmarks.figures import Figure, figure, interleaved
from benchmarks.node import Flat, Node


def _ours(variant: str, services: int) -> float:
    node = Node(variant, services)
    begun = time.perf_counter()
    node.sync()
    seconds = time.perf_counter() - begun
    node.close()
    return seconds


def _flat(variant: str, services: int) -> float:
    numbers = range(services)
    own = [line for n in numbers for line in world.service_rules(n, world.pods(n))]
    text = world.restore_text(numbers, own, world.JUMPS)
    flat = Flat(variant)
    begun = time.perf_counter()
    flat.restore(text)
    seconds = time.perf_counter() - begun
    flat.close()
    return seconds


def run(quick: bool) -> list[Figure]:
    """Measure 5,000 Services (500 when quick) in both variants."""
    services = 500 if quick else 5000
    figures = []
    for variant in ("nft", "legacy"):
        runs = 1 if variant == "nft" and not quick else 3  # upstream's shape takes half a minute
        ours, flat = interleaved(
            runs,
            lambda variant=variant: _ours(variant, services),  # type: ignore[misc]
            lambda variant=variant: _flat(variant, services),  # type: ignore[misc]
        )
        mode = f"iptables-{variant}"
        figures.append(figure("cold start", mode, services, (ours, "s"), flat))
    return figures
