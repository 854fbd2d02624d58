"""One endpoint changed, one Service added: from the event received to the rule in the kernel."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks import world
from benchmarks.figures import Figure, figure, interleaved
from benchmarks.node import Flat, Node


class _Changes:
    """The same changes for steersman and for the yardstick, on a node each."""

    def __init__(self, variant: str, services: int) -> None:
        self._services = services
        self._count = 0
        self.node = Node(variant, services)
        self.node.sync()
        self.flat = Flat(variant)
        self.flat.fill(services)
        self.shares: list[float] = []

    def close(self) -> None:
        self.node.close()
        self.flat.close()

    def _timed(self, feed: Callable[[], None]) -> float:
        self.node.netns.enter()
        children = self.node.exec.seconds
        begun = time.perf_counter()
        feed()
        self.node.sync()
        seconds = time.perf_counter() - begun
        self.shares.append(seconds - (self.node.exec.seconds - children))
        return seconds * 1e3

    def endpoint(self) -> float:
        """Replace an endpoint of a Service in the middle, each time by another one."""
        self._count += 1
        number = self._services // 2
        raw = world.endpoint_slice(number, world.pods(number, self._count))
        return self._timed(lambda: self.node.event("EndpointSlice", raw))

    def endpoint_flat(self) -> float:
        number = self._services // 2
        own = world.service_rules(number, world.pods(number, self._count))
        text = world.restore_text(range(self._services), own)
        return self._restored(text)

    def service(self) -> float:
        """Add a Service that was not there."""
        self._count += 1
        number = self._services + self._count
        service = world.service(number)
        slice_ = world.endpoint_slice(number, world.pods(number))

        def feed() -> None:
            self.node.event("Service", service)
            self.node.event("EndpointSlice", slice_)

        return self._timed(feed)

    def service_flat(self) -> float:
        number = self._services + self._count
        own = world.service_rules(number, world.pods(number))
        return self._restored(world.restore_text([*range(self._services), number], own))

    def _restored(self, text: str) -> float:
        begun = time.perf_counter()
        self.flat.restore(text)
        return (time.perf_counter() - begun) * 1e3


def run(quick: bool) -> list[Figure]:
    """Measure at 5,000 Services (500 when quick) in both variants."""
    services, runs = (500, 5) if quick else (5000, 9)
    figures = []
    for variant in ("nft", "legacy"):
        mode = f"iptables-{variant}"
        changes = _Changes(variant, services)
        for name, ours, flat in (
            ("one endpoint changed", changes.endpoint, changes.endpoint_flat),
            ("one Service added", changes.service, changes.service_flat),
        ):
            changes.shares.clear()
            value, reference = interleaved(runs, ours, flat)
            share = sorted(changes.shares)[len(changes.shares) // 2] * 1e3
            figures.append(figure(name, mode, services, (value, "ms"), reference))
            figures.append(figure(f"{name}: our share", mode, services, (share, "ms")))
        changes.close()
    return figures
