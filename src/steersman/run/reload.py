"""Notices that the configuration file was written or replaced."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from steersman.host.files import Inotify, Polling

_POLL_SECONDS = 1.0  # without inotify
_WRITER_SECONDS = 2.0
_RESCAN_SECONDS = 60.0
"""A file behind links (a ConfigMap's `..data`) may change without an event in its directory."""


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


async def file_changes(path: Path) -> AsyncIterator[None]:
    """Yield each time that a file has become another one; while it is missing, nothing.

    A file that somebody has open and writes to is waited for, but not for ever.

    Raises:
        OSError: its directory cannot be watched.
    """
    clock = asyncio.get_running_loop().time
    watch = Polling(_POLL_SECONDS) if sys.platform == "win32" else Inotify()
    try:
        seen = _identity(path)
        watch.watch([path.parent])
        patience = 0.0  # until when a writer is waited for
        while True:
            now = _identity(path)
            for event in watch.read():  # after the look: who wrote by then is known
                if event.name == path.name:
                    patience = (patience or clock() + _WRITER_SECONDS) if event.writing else 0.0
                    now = _identity(path)
            if patience <= clock():
                patience = 0.0
            if now is not None and now != seen and not patience:
                seen = now
                yield
            await watch.wait(patience - clock() if patience else _RESCAN_SECONDS)
    finally:
        watch.close()
