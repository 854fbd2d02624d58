"""Read files that somebody else writes: never without end, and never waiting for a writer."""

from __future__ import annotations

import errno
import os
import stat


def read_file(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    Raises:
        OSError: it cannot be read, is longer, or is something else (a pipe, a device).
    """
    # Without O_NONBLOCK, opening a FIFO would wait until somebody writes to it.
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(number, "rb") as file:
        status = os.fstat(number)
        if stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        data = file.read(most + 1) if status.st_size <= most else b""
        if status.st_size > most or len(data) > most:
            raise OSError(errno.EFBIG, f"it is longer than {most} bytes")
        return data
