"""Places in arrays: nothing is given out twice, nothing too early, nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.modes.ebpf.bpf import FullError
from steersman.modes.ebpf.services import QUARANTINE, SlotAllocator, run_length


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def covered(runs: list[tuple[int, int]]) -> list[int]:
    return [n for place, count in runs for n in range(place, place + run_length(count))]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_runs_never_overlap(steps: list[tuple[bool, int]]) -> None:
    clock = Clock()
    places = SlotAllocator(1 << 20, clock)
    taken: list[tuple[int, int]] = []
    for give, count in steps:
        if give and taken:
            places.give(*taken.pop(count % len(taken)))
            clock.now += QUARANTINE / 2
        else:
            taken.append((places.take(count), count))
        used = covered(taken)
        assert len(used) == len(set(used))


def test_what_is_given_back_rests() -> None:
    clock = Clock()
    places = SlotAllocator(2, clock)
    places.give(places.take(2), 2)
    with pytest.raises(FullError):
        places.take(1)
    clock.now += QUARANTINE
    assert places.take(2) == 0


@given(st.lists(st.integers(1, 9), max_size=20), st.data())
def test_what_is_free_after_a_restart_can_be_taken(counts: list[int], data: st.DataObject) -> None:
    before = SlotAllocator(1 << 10, Clock())
    runs = [(before.take(count), count) for count in counts]
    kept = [run for run in runs if data.draw(st.booleans())]
    after = SlotAllocator(1 << 10, Clock())
    after.adopt(kept)
    everything = covered(
        [*kept, *((after.take(1), 1) for _ in range((1 << 10) - len(covered(kept))))]
    )
    assert sorted(everything) == list(range(1 << 10))
