"""Watches of directories (inotify(7)), and what stands in for them without inotify.

They need no thread and no polling: watchfiles would wake up every few milliseconds, also when
nothing ever happens. They only say that something happened and which files are still open for
writing; the caller finds out what changed with `stat`.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

_MODIFY = 0x2
_CLOSE_WRITE = 0x8
_MASK = (
    _MODIFY
    | _CLOSE_WRITE
    | 0x4  # IN_ATTRIB: permissions, and the unlinking of a directory in use
    | 0x40  # IN_MOVED_FROM
    | 0x80  # IN_MOVED_TO
    | 0x100  # IN_CREATE
    | 0x200  # IN_DELETE
    | 0x400  # IN_DELETE_SELF
    | 0x800  # IN_MOVE_SELF
    | 0x01000000  # IN_ONLYDIR
)
_EVENT = struct.Struct("iIII")  # struct inotify_event: wd, mask, cookie, len; then the name
_RARELY, _AT_MOST = 50, 10  # pauses without inotify, in times of the work
_QUICK = 2.0  # seconds, up to which the first one holds


class FileEvent(NamedTuple):
    """Something happened to an entry of a watched directory (name "": to the directory itself)."""

    directory: Path
    name: str
    mask: int

    @property
    def path(self) -> Path:
        """Path of the entry."""
        return self.directory / self.name

    @property
    def writing(self) -> bool:
        """Whether it was written to or truncated and is still open, so that more may follow."""
        return bool(self.mask & _MODIFY)


class Inotify:
    """A set of watched directories.

    Raises:
        OSError: the kernel has no more inotify instances for this user.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)  # not at import: Windows has no libc
        self._fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._watches: dict[int, Path] = {}

    def close(self) -> None:
        """Remove all watches."""
        os.close(self._fd)

    def watch(self, directories: Iterable[Path]) -> bool:
        """Watch exactly these directories, without those that do not exist.

        Returns:
            Whether the set changed: then events before the new watches were missed.

        Raises:
            OSError: none can be watched: they are gone, or the kernel has no watches left for
                this user.
        """
        watches: dict[int, Path] = {}
        number = errno.ENOENT
        for directory in directories:
            # Returns the same descriptor for a directory that is watched already.
            wd = self._libc.inotify_add_watch(self._fd, os.fsencode(directory), _MASK)
            if wd >= 0:
                watches[wd] = directory
            else:
                number = ctypes.get_errno()
        if not watches:
            raise OSError(number, f"no directory can be watched: {os.strerror(number)}")
        for stale in self._watches.keys() - watches.keys():
            self._libc.inotify_rm_watch(self._fd, stale)  # EINVAL if it is gone: fine
        changed = watches.keys() != self._watches.keys()
        self._watches = watches
        return changed

    async def wait(self, seconds: float) -> None:
        """Return when there are events to read, or after this many seconds."""
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not readable.done():
                readable.set_result(None)

        loop.add_reader(self._fd, wake)
        try:
            async with asyncio.timeout(seconds):
                await readable
        except TimeoutError:
            pass
        finally:
            loop.remove_reader(self._fd)

    def read(self) -> list[FileEvent]:
        """Return the events so far, without waiting."""
        events: list[FileEvent] = []
        while True:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return events
            # One read returns several events; each name is padded with NUL bytes.
            at = 0
            while at < len(data):
                wd, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size
                name = data[at : at + length].rstrip(b"\0")
                at += length
                if wd in self._watches:
                    events.append(FileEvent(self._watches[wd], os.fsdecode(name), mask))


class Polling:
    """The interface of `Inotify` without inotify: time passes, and there are no events.

    Looking at many files takes long, so it is done less often then: for a fiftieth of the time, or
    every two seconds, but never for more than a tenth of the time.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Look again after `seconds`, or later if that takes too much of the time."""
        self._seconds = seconds
        self._clock = clock
        self._woke = clock()

    def close(self) -> None:
        """Do nothing."""

    def watch(self, _: Iterable[Path]) -> bool:
        """Return False: the set of directories does not matter."""
        return False

    async def wait(self, seconds: float) -> None:
        """Return when it is time to look again."""
        took = self._clock() - self._woke
        pause = max(self._seconds, min(_RARELY * took, _QUICK), _AT_MOST * took)
        await asyncio.sleep(min(seconds, pause))
        self._woke = self._clock()

    def read(self) -> list[FileEvent]:
        """Return no events."""
        return []
