"""Files that other programs write: read them with bounds, see who locks them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_PIECE = 1 << 16  # bytes of a read


def read_file(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

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
        # In pieces: a read takes memory for all that it may return, which Windows gives at once.
        pieces, left = list[bytes](), limit + 1 if status.st_size <= limit else 0
        while piece := file.read(min(left, _PIECE)):
            pieces.append(piece)
            left -= len(piece)
        if not left:
            raise OSError(errno.EFBIG, f"it is longer than {limit} bytes")
        return b"".join(pieces)


def lock_holder(path: Path, proc: Path = Path("/proc")) -> str:
    """Name the process that holds a flock on a file: ` by pid 17 (iptables)`; "" if unknown.

    Processes outside of our pid namespace cannot be seen.
    """
    try:
        found = os.stat(path)
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        for line in (proc / "locks").read_text().splitlines():
            # 1: FLOCK ADVISORY WRITE 17 00:1a:123 0 EOF; waiting processes have "->" in place 1
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[5] == device and int(words[4]) > 0:
                name = (proc / words[4] / "comm").read_text().strip()
                return f" by pid {words[4]} ({name})"
    except (OSError, ValueError):
        pass
    return ""


def is_locked(path: Path) -> bool:
    """Return whether a process holds a flock on a file that nobody else may share.

    It takes the lock for an instant, in the way of a reader. Unlike `lock_holder` it sees the locks
    of every process, whatever its pid namespace.

    Raises:
        OSError: the file cannot be read.
    """
    import fcntl  # noqa: PLC0415 - Windows lacks it

    if not path.exists():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
