from __future__ import annotations

import asyncio

from steersman.run.loop import BUCKETS, Holds, MeasuredLoop


class Clocks:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def pass_by(self, wall: float, cpu: float) -> None:
        self.wall += wall
        self.cpu += cpu

    def holds(self) -> Holds:
        return Holds(lambda: self.wall, lambda: self.cpu)


def buckets(holds: Holds) -> dict[tuple[str, float], float]:
    (family,) = holds.collect()
    return {
        (sample.labels["clock"], float(sample.labels["le"])): sample.value
        for sample in family.samples
        if sample.name.endswith("_bucket")
    }


def sums(holds: Holds) -> dict[str, float]:
    (family,) = holds.collect()
    return {s.labels["clock"]: s.value for s in family.samples if s.name.endswith("_sum")}


def test_an_iteration_is_counted_by_both_clocks() -> None:
    clocks = Clocks()
    holds = clocks.holds()
    holds.end()  # the loop waits for the first time: nothing has run
    holds.begin()
    clocks.pass_by(0.03, 0.004)
    holds.end()
    found = buckets(holds)
    assert [found["wall", bound] for bound in (0.025, 0.05, float("inf"))] == [0, 1, 1]
    assert [found["cpu", bound] for bound in (0.002, 0.005, 5.0)] == [0, 1, 1]
    assert sums(holds) == {"wall": 0.03, "cpu": 0.004}


def test_the_longest_hold_has_a_bucket_of_its_own() -> None:
    clocks = Clocks()
    holds = clocks.holds()
    holds.begin()
    clocks.pass_by(60, 60)
    holds.end()
    assert buckets(holds)["wall", BUCKETS[-1]] == 0
    assert buckets(holds)["wall", float("inf")] == 1


def test_a_loop_counts_what_runs_on_it_and_not_its_waiting() -> None:
    clocks = Clocks()
    holds = clocks.holds()

    async def work() -> None:
        clocks.pass_by(0.2, 0.2)
        await asyncio.sleep(0.001)
        clocks.pass_by(0.01, 0.01)

    with asyncio.Runner(loop_factory=lambda: MeasuredLoop(holds)) as runner:
        runner.run(work())
    found = buckets(holds)
    assert found["wall", 0.25] - found["wall", 0.1] == 1
    assert sums(holds)["wall"] == 0.2 + 0.01
