"""What this process uses: CPU time, memory, and handles of Windows."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the programs that it ran to their end."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def resident_bytes(proc: Path = Path("/proc")) -> int:
    """Return the resident memory of this process; 0 if the system does not say."""
    if sys.platform == "win32":
        return windows_usage().resident
    try:
        pages = int((proc / "self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class WindowsUsage(NamedTuple):
    """What this process uses on Windows."""

    resident: int
    """Bytes of memory."""
    handles: int
    """Open files, sockets, events and other objects of the system; Wine says 0."""


class _MemoryCounters(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS of psapi.h."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("faults", ctypes.c_uint32),
        ("peak_resident", ctypes.c_size_t),
        ("resident", ctypes.c_size_t),
        ("others", ctypes.c_size_t * 6),
    )


def windows_usage() -> WindowsUsage:
    """Return what this process uses on Windows; zeros if the system does not say."""
    kernel32: Any = vars(ctypes)["WinDLL"]("kernel32")
    this_process = ctypes.c_void_p(-1)  # as GetCurrentProcess returns it
    memory, handles = _MemoryCounters(), ctypes.c_uint32()
    memory.size = ctypes.sizeof(memory)
    kernel32.K32GetProcessMemoryInfo(this_process, ctypes.byref(memory), memory.size)
    kernel32.GetProcessHandleCount(this_process, ctypes.byref(handles))
    return WindowsUsage(memory.resident, handles.value)
