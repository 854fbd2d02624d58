"""Notices that the configuration file was written or replaced."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from steersman.source.inotify import Inotify, Polling

_POLL_SECONDS = 1.0  # without inotify
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

    Raises:
        OSError: its directory cannot be watched.
    """
    watch = Polling(_POLL_SECONDS) if sys.platform == "win32" else Inotify()
    try:
        seen = _identity(path)
        watch.watch([path.parent])
        while True:
            now = _identity(path)
            if now is not None and now != seen:
                seen = now
                yield
            await watch.wait(_RESCAN_SECONDS)
            watch.read()
    finally:
        watch.close()
