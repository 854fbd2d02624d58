from __future__ import annotations

import asyncio
import logging

import pytest

from steersman.run.http import ListenError
from steersman.run.tasks import Wake, guarded


async def nothing() -> None:
    """End well."""


async def failing(error: BaseException) -> None:
    raise error


async def test_a_task_that_ends_well_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    await guarded("quiet", nothing(), told.append)
    assert (told, caplog.records) == ([], [])


async def test_a_crash_is_told_by_name_and_logged_with_its_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []
    await guarded("drift", failing(KeyError("x")), told.append)
    assert told == ["task 'drift' crashed: KeyError: 'x'"]
    (record,) = caplog.records
    assert record.levelno == logging.CRITICAL
    assert record.exc_info is not None


async def test_an_address_in_use_is_told_without_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    error = ListenError(98, "listen on 127.0.0.1:1: Address already in use")
    await guarded("metrics", failing(error), told.append)
    assert told == ["metrics: cannot listen on 127.0.0.1:1: Address already in use"]
    assert not caplog.records


async def test_a_cancelled_task_is_cancelled() -> None:
    told: list[str] = []
    task = asyncio.create_task(guarded("source", asyncio.Event().wait(), told.append))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not told


async def test_news_cut_a_sleep_short_and_are_forgotten_then() -> None:
    wake = Wake()
    sleep = asyncio.create_task(wake.sleep(3600.0))
    await asyncio.sleep(0)
    wake.up()
    async with asyncio.timeout(10):
        await sleep
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await wake.sleep(3600.0)


async def test_news_before_the_sleep_count_and_a_sleep_ends_by_itself() -> None:
    wake = Wake()
    wake.up()
    async with asyncio.timeout(10):
        await wake.sleep(3600.0)
        await wake.sleep(0.0)
