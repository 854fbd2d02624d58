"""Computations on many kernel objects, beside the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from steersman.host.worker import KernelWorker

T = TypeVar("T")

_INLINE = 1000
"""Objects or owners up to which a computation on them is not worth a thread."""


async def in_thread(worker: KernelWorker, work: Callable[[], T], size: int) -> T:
    """Run a pure computation on many objects in the thread of the mode, on few at once.

    It has always ended when this returns or raises: no other task may touch the ledger before.
    """
    return work() if size <= _INLINE else await worker.do(work)
