"""Measure the iptables mode in a network namespace of its own.

`python -m tests.support.processes.iptables_measure 5000` prints the figures for 5,000 Services.

Functions to call; figures for README and benchmarks come from there. Needs root.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence

import msgspec

from steersman.host.exec import Result
from steersman.model.plan import ServicePlan
from steersman.model.ruleset import Diff, diff
from steersman.modes.iptables.mode import IptablesMode
from steersman.modes.specs import ModeOptions
from tests.support.builders.plans import SETTINGS, endpoints, simple
from tests.support.lab.iptables import Namespace, namespace
from tests.support.modes.scripted import InThread


class Timed(InThread):
    """Runs commands in a namespace and adds up the seconds spent in them."""

    def __init__(self, inside: Namespace) -> None:
        self._execute = inside.execute
        self.seconds = 0.0

    def run_tool(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0) -> Result:
        start = time.perf_counter()
        try:
            return self._execute.run_tool(argv, stdin, timeout=timeout)
        finally:
            self.seconds += time.perf_counter() - start


def measure(variant: str, services: int, *, rounds: int = 5) -> dict[str, float]:
    """Return milliseconds by what was measured, medians; `own` is all but child processes."""
    plans = [simple(number) for number in range(services)]
    settings = msgspec.structs.replace(
        SETTINGS,
        families=SETTINGS.families[:1],
        split_dispatch=services > 500,
        large_cluster=sum(len(plan.reachable) for plan in plans) > 1000,
    )
    figures: dict[str, list[float]] = {}

    with namespace() as inside:
        execute = Timed(inside)
        mode = IptablesMode(execute, ModeOptions(iptables_variant=variant))
        mode.probe()

        def timed(name: str, change: Diff) -> None:
            execute.seconds, start = 0.0, time.perf_counter()
            mode.apply(change)
            total = time.perf_counter() - start
            figures.setdefault(name, []).append(total * 1e3)
            figures.setdefault(f"{name}, own", []).append((total - execute.seconds) * 1e3)

        start = time.perf_counter()
        want = dict(mode.render_node(settings))
        for plan in plans:
            want.update(mode.render_service(plan, settings))
        figures["render"] = [(time.perf_counter() - start) * 1e3]
        timed("cold start", diff({}, want))
        execute.seconds, start = 0.0, time.perf_counter()
        have = mode.read()
        total = time.perf_counter() - start
        figures["read"] = [total * 1e3]
        figures["read, own"] = [(total - execute.seconds) * 1e3]
        assert not diff(have, want)
        for number in range(rounds):
            plan = plans[number * 37 % services]
            old = mode.render_service(plan, settings)
            new = mode.render_service(_one_more(plan, number), settings)
            timed("endpoint added", diff(old, new))
            timed("endpoint removed", diff(new, old))
            timed("Service removed", diff(old, {}))
            timed("Service added", diff({}, old))
        timed("cleanup", diff(mode.read(), {}))
    return {name: statistics.median(values) for name, values in figures.items()}


def _one_more(plan: ServicePlan, number: int) -> ServicePlan:
    more = (*plan.cluster, *endpoints(f"10.250.0.{number + 1}"))
    return msgspec.structs.replace(plan, cluster=more, reachable=more)


def main(sizes: Sequence[int]) -> None:
    """Print the figures of both variants."""
    for services in sizes:
        for variant in ("nft", "legacy"):
            print(f"{variant}, {services} Services x 3 endpoints, ms:")
            for name, value in (measure(variant, services)).items():
                print(f"  {name:24} {value:9.1f}", flush=True)


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]] or [1000])
