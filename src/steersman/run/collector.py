"""Python's cycle collector, told that nearly all objects here are values without cycles."""

from __future__ import annotations

import ctypes
import gc

_YOUNG, _YOUNG_AT_START = 50_000, 1_000_000
"""New containers before the collector looks: reading 10,000 Services makes about 400,000."""


def collect_seldom() -> None:
    """Hardly look for cycles while a cluster is first read: looking costs a tenth or more."""
    gc.set_threshold(_YOUNG_AT_START, 20, 100)


def keep_what_is_there() -> None:
    """Take everything alive now to stay alive: later collections, which begin now, need not walk
    it."""
    gc.set_threshold(_YOUNG, 20, 100)
    gc.collect()
    gc.freeze()
    _give_back()


def _give_back() -> None:
    """Return to the system what reading the cluster took and needs no more: glibc would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries have none
    if trim is not None:
        trim(0)
