"""Whether the ebpf mode can run on this machine, in sentences that name missing parts.

Kernel features are found by trying the smallest programs and maps that need them: a version number
says little, because distributions backport features. A feature that needs privileges counts as
present without them; missing privileges have a sentence of their own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from steersman.host.libbpf import instruction, library, load_program
from steersman.host.process import CAP_SYS_ADMIN, has_capability
from steersman.model.errors import BusyError
from steersman.modes.base import Support
from steersman.modes.ebpf import bpf

_MOUNTS = Path("/proc/self/mountinfo")
_CGROUPS = "/sys/fs/cgroup"
_ESCAPE = re.compile(r"\\([0-7]{3})")
_SCHED_CLS, _SOCK_ADDR = 3, 18
_CONNECT4 = 10
_SET_RETVAL = 187  # BPF_FUNC_set_retval
# Index that no device has.
_NO_DEVICE = 0x7FFFFFFF
_DENIED = (errno.EPERM, errno.EACCES)


class Feature(NamedTuple):
    """A kernel feature that the mode uses."""

    name: str
    kernel: str
    """The first Linux release with it."""
    exists: Callable[[], bool]
    instead: str = ""
    """The replacement on kernels without it; "" if there is none."""

    @property
    def missing(self) -> str:
        """The sentence for a kernel without it."""
        end = f"; {self.instead}" if self.instead else ""
        return f"This kernel lacks {self.name}, which came with Linux {self.kernel}{end}."


def _accepts(create: Callable[[], int]) -> bool:
    """Try to create an object; a kernel that denies it without privileges knows it."""
    try:
        os.close(create())
    except OSError as error:
        return error.errno in _DENIED
    return True


_RETURN = instruction(0xB7, 0, value=1) + instruction(0x95)  # r0 = 1; return r0


def _can_refuse() -> bool:
    refuse = instruction(0xB7, 1, value=-errno.ECONNREFUSED)  # r1 = -ECONNREFUSED
    code = refuse + instruction(0x85, value=_SET_RETVAL) + _RETURN
    return _accepts(lambda: load_program(_SOCK_ADDR, _CONNECT4, code))


def tcx() -> bool:
    """Return whether devices take links (TCX); other kernels call the request invalid."""
    try:
        program = load_program(_SCHED_CLS, 0, _RETURN)
    except OSError as error:
        return error.errno in _DENIED
    try:
        bpf.Link.attach(program, _NO_DEVICE, bpf.TCX_INGRESS).close()
    except OSError as error:
        return error.errno != errno.EINVAL
    finally:
        os.close(program)
    return True


FEATURES = (
    Feature("bpf_set_retval, which refuses connections", "5.18", _can_refuse),
    Feature(
        "TCX, which attaches programs to devices",
        "6.6",
        tcx,
        "filters of tc (clsact) take its place",
    ),
)
"""The newest features that the mode uses, the oldest first: who has them has all before."""


def missing_features(features: Iterable[Feature] = FEATURES) -> tuple[Feature, ...]:
    """Return the features that this kernel does not have."""
    return tuple(feature for feature in features if not feature.exists())


def probe(
    file: Path,
    cgroup: Path | None,
    features: Callable[[], Iterable[Feature]] = missing_features,
    pins: Path | None = None,
) -> Support:
    """Check kernel, library, object, privileges and cgroup.

    Args:
        file: the compiled object.
        cgroup: the cgroup to use, None for the root of all.
        features: returns the features that the kernel lacks.
        pins: directory of the bpffs, mounted or to be mounted; None to skip that check.
    """
    # Without the fatal parts the mode cannot run; for the mild ones there is a replacement.
    fatal: list[str] = []
    mild: list[str] = []
    try:
        library()
    except (OSError, AttributeError) as error:  # without it features cannot be tried
        fatal.append(f"libbpf.so.1 is not usable ({error}); it is in the package libbpf1.")
    else:
        for feature in features():
            (mild if feature.instead else fatal).append(feature.missing)
    if not file.exists():
        fatal.append(
            f"The compiled programs are missing ({file.name}): install steersman from a wheel, or "
            "install clang and libbpf-dev and run `python hatch_build.py` in a checkout."
        )
    if os.geteuid() != 0:
        fatal.append("Loading BPF programs needs root (CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON).")
    elif pins and not is_bpffs(pins) and not can_mount_bpffs(pins):
        fatal.append(
            f"No bpffs is mounted at {pins}, and this process may not mount one (CAP_SYS_ADMIN): "
            f"run `mount -t bpf bpf {pins}` on the host, and mount that directory into the "
            "container."
        )
    if cgroup and not (cgroup / "cgroup.procs").exists():
        fatal.append(
            f"{cgroup} is no directory of a cgroup2 file system: set --ebpf-cgroup-root to the one "
            "whose sockets are to be balanced, or leave it out."
        )
    root = cgroup or cgroup_root()
    if root is None:
        mild.append(
            "No cgroup2 file system is mounted (it usually is at /sys/fs/cgroup): the packets of "
            "pods and of this node are rewritten, too, and this node has no node ports for itself."
        )
    elif cgroup is None and (root / "cgroup.type").exists():  # only the root of all has none
        mild.append(
            f"{root} is not the root of all cgroups: of processes outside of it the packets are "
            "rewritten, and they have no node ports of this node. Mount the host's cgroup2 file "
            "system and name it by --ebpf-cgroup-root."
        )
    return Support(not fatal, (*fatal, *mild))


def cgroup_root() -> Path | None:
    """Return where cgroup2 is mounted; None if it is not."""
    return choose_mount(_MOUNTS.read_text(), os.path.realpath(_CGROUPS))


def choose_mount(mounts: str, usual: str) -> Path | None:
    """Choose one of the mounts of cgroup2.

    The order of preference: the usual place (of several mounts there the last one, which hides the
    others), a place below it (`unified`, if cgroup v1 is in use, too), a mount of the whole
    hierarchy.

    Args:
        mounts: content of /proc/self/mountinfo (proc(5)).
        usual: the mount point on most machines.
    """
    found: list[tuple[bool, bool, bool, int, str]] = []
    for number, line in enumerate(mounts.splitlines()):
        # ID PARENT MAJOR:MINOR ROOT MOUNTPOINT OPTIONS FIELDS... - TYPE SOURCE OPTIONS
        words = line.split()
        if "-" in words[6:-1] and words[words.index("-", 6) + 1] == "cgroup2":
            root, place = (_ESCAPE.sub(lambda m: chr(int(m[1], 8)), word) for word in words[3:5])
            below = place.startswith(f"{usual}/")
            found.append((place == usual, below, root == "/", number, place))
    return Path(max(found)[-1]) if found else None


def is_bpffs(path: Path) -> bool:
    """Return whether a directory is in a bpffs, the file system of pins."""
    mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    points = {words[4] for words in mounts if words[words.index("-") + 1] == "bpf"}
    return any(str(parent) in points for parent in (path, *path.parents))


def can_mount_bpffs(path: Path) -> bool:
    """Return whether this process may mount a bpffs on a directory."""
    return path.is_dir() and has_capability(CAP_SYS_ADMIN)


def mount_bpffs(path: Path) -> None:
    """Mount a bpffs if there is none; by mount(2), as container images may lack mount(8).

    Raises:
        BusyError: the kernel refuses.
    """
    if is_bpffs(path):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"bpf", os.fsencode(path), b"bpf", 0, None) != 0:
        text = os.strerror(ctypes.get_errno())
        raise BusyError(f"ebpf: no bpffs is mounted at {path}, and mounting one fails: {text}")
