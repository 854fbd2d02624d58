"""Wait for a condition of which nothing tells: a minute, as a machine under load stands still."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

PATIENCE = 60.0
"""Seconds after which a condition that does not come is a failure."""
_INTERVAL = 0.01


async def until(true: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait until something is so; an awaitable is awaited.

    Raises:
        TimeoutError: it did not come in time.
    """
    end = time.monotonic() + seconds
    while True:
        found = true()
        if await asyncio.wait_for(found, seconds) if inspect.isawaitable(found) else found:
            return
        if time.monotonic() > end:
            raise TimeoutError
        await asyncio.sleep(_INTERVAL)


def wait_until(true: Callable[[], object], told: Callable[[], object] = str) -> None:
    """Wait until something is so, without an event loop.

    Args:
        true: the condition.
        told: returns what to print if it does not come, such as a log.
    """
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, told()
        time.sleep(_INTERVAL)
