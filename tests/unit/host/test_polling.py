"""How often files are looked at where the kernel does not tell of changes."""

from __future__ import annotations

import asyncio

import pytest

from steersman.host.directories import Polling


async def test_looking_takes_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pauses = 0.0, []

    async def sleep(seconds: float) -> None:
        nonlocal now
        pauses.append(round(seconds, 3))
        now += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    watch = Polling(0.1, clock=lambda: now)
    for work in (0.0, 0.001, 0.02, 0.1, 3.0):
        now += work
        await watch.wait(60.0)
    assert pauses == [0.1, 0.1, 1.0, 2.0, 30.0]
    now += 0.02
    await watch.wait(0.5)  # for a writer, say
    assert pauses[-1] == 0.5
