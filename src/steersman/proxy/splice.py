"""Bytes that the kernel moves from socket to socket through a pipe (splice(2)), uncopied by us.

For streams that have shown to be long: it costs two system calls like copying does, but half of the
processor time. The sockets stay with asyncio's transports, which do not let go of them; what
is waited for here are duplicates of their descriptors.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

DESCRIPTORS = 4
"""That one direction takes: two ends of a pipe, two duplicates."""
PIPE = 1 << 20  # bytes that may wait for a slow reader; a small one is slower than copying
_AT_ONCE = 8  # rounds before others have their turn
_SET_SIZE = 1031  # F_SETPIPE_SZ of linux/fcntl.h


def possible() -> bool:
    """Whether this system can."""
    return hasattr(os, "splice")


class Splice:
    """One direction of a connection."""

    __slots__ = ("_ended", "_ends", "_inside", "_loop", "_moved", "_source", "_target")

    def __init__(
        self,
        source: int,
        target: int,
        moved: Callable[[int], None],
        ended: Callable[[OSError | None], None],
    ) -> None:
        """Start, on the running loop.

        Args:
            source: descriptor of a socket that nobody else reads.
            target: descriptor of a socket that nobody else writes to.
            moved: told how many bytes were passed on.
            ended: told once that the source has ended, or what went wrong; then all is closed.

        Raises:
            OSError: there are no descriptors for it; nothing has happened then.
        """
        self._loop = asyncio.get_running_loop()
        self._moved, self._ended = moved, ended
        self._inside = 0
        self._ends = _pipe()
        try:
            self._source = os.dup(source)
            try:
                self._target = os.dup(target)
            except OSError:
                os.close(self._source)
                raise
        except OSError:
            for end in self._ends:
                os.close(end)
            raise
        self._loop.add_reader(self._source, self._pass_on)

    def close(self) -> None:
        """Give up; what is in the pipe is lost. Harmless when closed already."""
        if self._ends:
            self._loop.remove_reader(self._source)
            self._loop.remove_writer(self._target)
            for descriptor in (*self._ends, self._source, self._target):
                os.close(descriptor)
            self._ends = ()

    def _pass_on(self) -> None:
        try:
            for _ in range(_AT_ONCE):
                if not self._take() or not self._give():
                    return
        except OSError as error:
            self._end(error)

    def _take(self) -> bool:
        """Fill the pipe; False where there is nothing to take now, or never again."""
        try:
            self._inside = os.splice(self._source, self._ends[1], PIPE, flags=_flags())
        except BlockingIOError:
            return False
        if not self._inside:
            self._end(None)
        return bool(self._inside)

    def _give(self) -> bool:
        """Empty the pipe; False where the target takes no more now."""
        while self._inside:
            try:
                count = os.splice(self._ends[0], self._target, self._inside, flags=_flags())
            except BlockingIOError:
                self._loop.remove_reader(self._source)
                self._loop.add_writer(self._target, self._give_the_rest)
                return False
            self._inside -= count
            self._moved(count)
        return True

    def _give_the_rest(self) -> None:
        try:
            if self._give():
                self._loop.remove_writer(self._target)
                self._loop.add_reader(self._source, self._pass_on)
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError | None) -> None:
        self.close()
        self._ended(error)


def _pipe() -> tuple[int, ...]:
    from fcntl import fcntl  # noqa: PLC0415  # POSIX only

    ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl(ends[1], _SET_SIZE, PIPE)
    except OSError:  # all pipes of a user without rights have a limit: pipe(7)
        for end in ends:
            os.close(end)
        raise
    return ends


def _flags() -> int:
    return os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK
