"""Whether the ebpf mode can run on this machine, and what is missing if not."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from steersman.modes.base import Support
from steersman.modes.ebpf.loader import library

_KERNEL = (6, 6)
"""TCX, the newest of what the programs need."""
_FEATURES = (
    ((5, 7), "links to cgroups and the cookie of a network namespace"),
    ((5, 8), "the getpeername hook"),
    ((5, 14), "the cookie of a network namespace for processes (SO_NETNS_COOKIE)"),
    ((5, 18), "bpf_set_retval, by which a connection is refused"),
    ((6, 6), "TCX, by which devices have programs"),
)


def probe(file: Path, cgroup: Path | None) -> Support:
    """Say whether kernel, library, object and cgroup are there."""
    missing = (
        *_kernel(platform.release()),
        *_library(),
        *_object(file),
        *_cgroup(cgroup),
        *_privileges(),
    )
    return Support(not missing, missing)


def _kernel(release: str) -> tuple[str, ...]:
    found = re.match(r"(\d+)\.(\d+)", release)
    version = (int(found[1]), int(found[2])) if found else _KERNEL
    return tuple(
        f"The kernel is {release}; {what} came with Linux {needed[0]}.{needed[1]}."
        for needed, what in _FEATURES
        if version < needed
    )


def _library() -> tuple[str, ...]:
    try:
        library()
    except (OSError, AttributeError) as error:
        return (f"libbpf.so.1 is not usable ({error}); it is in the package libbpf1.",)
    return ()


def _object(file: Path) -> tuple[str, ...]:
    if file.exists():
        return ()
    return (
        f"The compiled programs are missing ({file.name}): install steersman from a wheel, or "
        "install clang and libbpf-dev and run `python hatch_build.py` in a checkout.",
    )


def _cgroup(cgroup: Path | None) -> tuple[str, ...]:
    if (cgroup or cgroup_root()) is not None:
        return ()
    return ("No cgroup2 file system is mounted; it usually is at /sys/fs/cgroup.",)


def _privileges() -> tuple[str, ...]:
    if os.geteuid() == 0:
        return ()
    return ("Loading BPF programs needs root (CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON).",)


def cgroup_root() -> Path | None:
    """Where cgroup2 is mounted; None where it is not."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        words = line.split()
        if words[words.index("-") + 1] == "cgroup2":
            return Path(words[4])
    return None
