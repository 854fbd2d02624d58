"""Memory: what Python's collector and the C library are told about a process that holds values."""

from __future__ import annotations

import ctypes
import gc
import os

_YOUNG, _YOUNG_AT_START = 50_000, 1_000_000
"""New containers before the collector looks: reading 10,000 Services makes about 400,000."""

_M_ARENA_MAX = -8  # malloc.h


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


def one_heap() -> None:
    """Have all threads share a heap: each would keep what it once took, and few work at a time."""
    _libc("mallopt", _M_ARENA_MAX, 1)


def _give_back() -> None:
    """Return to the system what reading the cluster took and needs no more: glibc would keep it."""
    _libc("malloc_trim", 0)


def _libc(name: str, *values: int) -> None:
    """Call what glibc has; other libraries have it not, and need it less."""
    call = getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
    if call is not None:
        call(*values)
