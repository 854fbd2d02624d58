"""Whether the ebpf mode can run on this machine, and what is missing if not."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from steersman.modes.base import Support
from steersman.modes.ebpf import bpffs
from steersman.modes.ebpf.features import Feature, lacking
from steersman.modes.ebpf.loader import library

_MOUNTS = Path("/proc/self/mountinfo")
_CGROUPS = "/sys/fs/cgroup"
_ESCAPE = re.compile(r"\\([0-7]{3})")


def probe(
    file: Path,
    cgroup: Path | None,
    features: Callable[[], Iterable[Feature]] = lacking,
    pins: Path | None = None,
) -> Support:
    """Say whether kernel, library, object and cgroup are there, and what is done without them.

    Args:
        file: the compiled object.
        cgroup: that is to be used, None for the root of all.
        features: those that the kernel lacks.
        pins: directory where a bpffs is, or is to be mounted; None where that does not matter.
    """
    absent = tuple(features())
    fatal = (
        *(feature.missing for feature in absent if not feature.instead),
        *_library(),
        *_object(file),
        *(_privileges() or (bpffs.lacking(pins) if pins else ())),
        *_named_cgroup(cgroup),
    )
    milder = (*(feature.missing for feature in absent if feature.instead), *_cgroup(cgroup))
    return Support(not fatal, (*fatal, *milder))


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
    place = cgroup or cgroup_root()
    if place is None:
        return (
            "No cgroup2 file system is mounted (it usually is at /sys/fs/cgroup): the packets of "
            "pods and of this node are rewritten, too, and this node has no node ports for itself.",
        )
    if cgroup is None and (place / "cgroup.type").exists():  # only the root of all has none
        return (
            f"{place} is not the root of all cgroups: of processes outside of it the packets are "
            "rewritten, and they have no node ports of this node. Mount the host's cgroup2 file "
            "system and name it by --ebpf-cgroup-root.",
        )
    return ()


def _named_cgroup(cgroup: Path | None) -> tuple[str, ...]:
    if cgroup is None or (cgroup / "cgroup.procs").exists():
        return ()
    return (
        f"{cgroup} is no directory of a cgroup2 file system: set --ebpf-cgroup-root to the one "
        "whose sockets are to be balanced, or leave it out.",
    )


def _privileges() -> tuple[str, ...]:
    if os.geteuid() == 0:
        return ()
    return ("Loading BPF programs needs root (CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON).",)


def cgroup_root() -> Path | None:
    """Find where cgroup2 is mounted; None if it is not."""
    return choose_mount(_MOUNTS.read_text(), os.path.realpath(_CGROUPS))


def choose_mount(mounts: str, usual: str) -> Path | None:
    """Choose one of the mounts of cgroup2.

    Preferred are the usual place (of several mounts there the last one, which hides the others), a
    place below it (`unified`, where cgroup v1 is in use, too), and mounts of the whole hierarchy.

    Args:
        mounts: content of /proc/self/mountinfo (proc(5)).
        usual: where cgroups are on most machines.
    """
    found: list[tuple[bool, bool, bool, int, str]] = []
    for number, line in enumerate(mounts.splitlines()):
        words = line.split()
        if "-" in words[6:-1] and words[words.index("-", 6) + 1] == "cgroup2":
            root, place = (_ESCAPE.sub(_unescape, word) for word in words[3:5])
            below = place.startswith(f"{usual}/")
            found.append((place == usual, below, root == "/", number, place))
    return Path(max(found)[-1]) if found else None


def _unescape(escaped: re.Match[str]) -> str:
    return chr(int(escaped[1], 8))
