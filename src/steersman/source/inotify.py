"""Directory watches of the kernel (inotify(7)), without a thread and without polling.

Only says that something happened and who is still writing; what changed is for `stat` to tell.
(watchfiles would wake up every few milliseconds to look, also when nothing ever happens.)
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Iterator
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


class Event(NamedTuple):
    """Something that happened to an entry of a watched directory (name "": to the directory)."""

    directory: Path
    name: str
    mask: int

    @property
    def path(self) -> Path:
        """The entry."""
        return self.directory / self.name

    @property
    def writing(self) -> bool:
        """Whether it was written to or cut off, and is still open, so that more may follow."""
        return bool(self.mask & _MODIFY)


class Inotify:
    """A set of watched directories.

    Raises:
        OSError: the kernel has no more inotify instances for this user.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)  # here: other systems have no such thing
        self._fd = _check(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._watches: dict[int, Path] = {}

    def close(self) -> None:
        """Give up all watches."""
        os.close(self._fd)

    def watch(self, directories: Iterable[Path]) -> bool:
        """Watch exactly these directories; those that are not there (any more) are left out.

        Returns whether that is a change: then things may have happened before the watch was on.

        Raises:
            OSError: not even one can be watched: they are gone, or the kernel has no watches left
                for this user.
        """
        watches: dict[int, Path] = {}
        number = errno.ENOENT
        for directory in directories:
            wd = self._libc.inotify_add_watch(self._fd, os.fsencode(directory), _MASK)
            if wd >= 0:
                watches[wd] = directory
            else:
                number = ctypes.get_errno()
        if not watches:
            raise OSError(number, f"no directory can be watched: {os.strerror(number)}")
        for stale in self._watches.keys() - watches.keys():
            self._libc.inotify_rm_watch(self._fd, stale)  # fails where the directory is gone: fine
        changed = watches.keys() != self._watches.keys()
        self._watches = watches
        return changed

    async def wait(self, seconds: float) -> None:
        """Return when there are events to read, or after this many seconds."""
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._fd, _settle, readable)
        try:
            async with asyncio.timeout(seconds):
                await readable
        except TimeoutError:
            pass
        finally:
            loop.remove_reader(self._fd)

    def read(self) -> list[Event]:
        """Return the events so far, without waiting."""
        events: list[Event] = []
        while data := self._take():
            events.extend(self._parse(data))
        return events

    def _take(self) -> bytes:
        try:
            return os.read(self._fd, 65536)
        except BlockingIOError:
            return b""

    def _parse(self, data: bytes) -> Iterator[Event]:
        at = 0
        while at < len(data):
            wd, mask, _, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size
            name = data[at : at + length].rstrip(b"\0")
            at += length
            if wd in self._watches:
                yield Event(self._watches[wd], os.fsdecode(name), mask)


class Polling:
    """What there is without inotify: looks again and again, sees no events."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def close(self) -> None:
        """Nothing to give up."""

    def watch(self, _: Iterable[Path]) -> bool:
        """Everything is watched already."""
        return False

    async def wait(self, seconds: float) -> None:
        """Return when it is time to look again."""
        await asyncio.sleep(min(seconds, self._seconds))

    def read(self) -> list[Event]:
        """No events, ever."""
        return []


def _settle(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)
