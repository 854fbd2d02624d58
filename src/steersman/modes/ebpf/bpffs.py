"""The file system in which programs and maps are pinned (bpffs): found, or mounted.

It is mounted by mount(2), not by the program: images for containers need not have that.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from steersman.host.process import CAP_SYS_ADMIN, has_capability
from steersman.model.errors import ApplyError

_MOUNTS = Path("/proc/self/mountinfo")


def is_bpffs(path: Path) -> bool:
    """Whether a directory is in a bpffs."""
    mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    points = {words[4] for words in mounts if words[words.index("-") + 1] == "bpf"}
    return any(str(parent) in points for parent in (path, *path.parents))


def lacking(place: Path) -> tuple[str, ...]:
    """Say what keeps us from having a bpffs at a directory; () if nothing does."""
    if is_bpffs(place) or (place.is_dir() and has_capability(CAP_SYS_ADMIN)):
        return ()
    return (
        f"No bpffs is mounted at {place}, and this process may not mount one (CAP_SYS_ADMIN): run "
        f"`mount -t bpf bpf {place}` on the host, and mount that directory into the container.",
    )


def mount(place: Path) -> None:
    """Mount a bpffs where there is none.

    Raises:
        ApplyError: the kernel refuses.
    """
    if is_bpffs(place):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"bpf", os.fsencode(place), b"bpf", 0, None) != 0:
        text = os.strerror(ctypes.get_errno())
        raise ApplyError(f"ebpf: no bpffs is mounted at {place}, and mounting one fails: {text}")
