"""Settings of Python and of glibc for a process that holds many values.

The process reads a cluster once, keeps nearly all of it, and then changes little. Reading 10,000
Services makes about 400,000 containers, and Python's collector would walk all of them again and
again in search of cycles that are not there: a tenth of the time or more. So it hardly runs at
the start, and `freeze_live_objects` excludes everything read from later collections.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys

_YOUNG, _YOUNG_AT_START = 50_000, 1_000_000
"""New containers before the collector runs."""
_SWITCH_SECONDS = 0.001
"""Time after which a computing thread lets the event loop run; Python's default is 0.005."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_LARGE = 128 << 10
"""Bytes of an allocation that is a mapping of its own; glibc's default, until it is raised."""


def collect_rarely() -> None:
    """Hardly search for cycles while a cluster is first read."""
    gc.set_threshold(_YOUNG_AT_START, 20, 100)


def freeze_live_objects() -> None:
    """Freeze live objects, so later collections skip them; collect normally from now on.

    Memory that was only needed to read the cluster goes back to the system: glibc would keep it.
    """
    gc.set_threshold(_YOUNG, 20, 100)
    gc.collect()
    gc.freeze()
    _libc("malloc_trim", 0)


def tune_at_start() -> None:
    """Prepare the interpreter and the C library for reading a cluster."""
    # All threads share a heap: each would keep the memory it once used, and few work at a time.
    _libc("mallopt", _M_ARENA_MAX, 1)
    # Large allocations go back to the system as soon as they are freed. glibc would raise these
    # limits up to 32 and 64 MB by what it sees at the start, and keep as much for later.
    _libc("mallopt", _M_MMAP_THRESHOLD, _LARGE)
    _libc("mallopt", _M_TRIM_THRESHOLD, _LARGE)
    collect_rarely()
    sys.setswitchinterval(_SWITCH_SECONDS)


def _libc(name: str, *values: int) -> None:
    """Call a function of glibc, if it has it; other libraries lack these, and need them less."""
    call = getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
    if call is not None:
        call(*values)
