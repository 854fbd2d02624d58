"""Runs on Windows: steersman, which does what lines of standard input say.

break     press Ctrl-Break: Wine has no console to press it on
handles   print how many handles the process has
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import threading

from steersman.cli.main import main

_HANDLES = 16  # SystemHandleInformation of winternl.h
_HEADER, _ENTRY = 8, struct.Struct("IBBHQIxxxx")  # the first field is a pid


def handles() -> int:
    """Count the handles of this process among all of them: GetProcessHandleCount is 0 with Wine."""
    ntdll = vars(ctypes)["WinDLL"]("ntdll")
    table = ctypes.create_string_buffer(1 << 20)
    assert ntdll.NtQuerySystemInformation(_HANDLES, table, len(table), None) == 0
    end = _HEADER + _ENTRY.size * int.from_bytes(table.raw[:4], "little")
    return sum(pid == os.getpid() for pid, *_ in _ENTRY.iter_unpack(table.raw[_HEADER:end]))


def obey() -> None:
    for line in sys.stdin:
        if line.strip() == "break":
            signal.raise_signal(vars(signal)["SIGBREAK"])
        else:
            print(f"{handles()} open handles", flush=True)


if __name__ == "__main__":
    threading.Thread(target=obey, daemon=True).start()
    sys.exit(main(sys.argv[1:]))
