"""Who holds a lock on a file (flock)."""

from __future__ import annotations

import os
from pathlib import Path


def held_by(path: Path, proc: Path = Path("/proc")) -> str:
    """Name the process that holds a lock on a file: ` by pid 17 (iptables)`; "" if not known.

    Processes in pid namespaces that are not ours cannot be seen.
    """
    try:
        found = os.stat(path)
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        for line in (proc / "locks").read_text().splitlines():
            words = line.split()  # 1: FLOCK ADVISORY WRITE 17 00:1a:123 0 EOF; -> for who waits
            if len(words) > 5 and words[1] == "FLOCK" and words[5] == device and int(words[4]) > 0:
                name = (proc / words[4] / "comm").read_text().strip()
                return f" by pid {words[4]} ({name})"
    except (OSError, ValueError):
        pass
    return ""
