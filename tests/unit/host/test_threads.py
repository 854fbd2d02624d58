from __future__ import annotations

import asyncio
import threading

import pytest

from steersman.host.threads import to_thread_to_end


async def test_a_cancelled_call_waits_for_its_thread() -> None:
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    done: list[bool] = []

    def work() -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(60)
        done.append(True)

    task = asyncio.create_task(to_thread_to_end(work))
    await begun.wait()
    for _ in range(3):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done(), "the thread still uses what its owner would close"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [True]


async def test_results_and_errors_are_those_of_the_call() -> None:
    assert await to_thread_to_end(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await to_thread_to_end(divmod, 7, 0)
