"""Whether the ebpf mode can run on this machine, and what is missing if not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from steersman.modes.base import Support
from steersman.modes.ebpf.features import Feature, lacking
from steersman.modes.ebpf.loader import library


def probe(
    file: Path, cgroup: Path | None, features: Callable[[], Iterable[Feature]] = lacking
) -> Support:
    """Say whether kernel, library, object and cgroup are there, and what is done without them.

    Args:
        file: the compiled object.
        cgroup: that is to be used, None for the root of all.
        features: those that the kernel lacks.
    """
    absent = tuple(features())
    fatal = (
        *(feature.missing for feature in absent if not feature.instead),
        *_library(),
        *_object(file),
        *_privileges(),
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
    if (cgroup or cgroup_root()) is not None:
        return ()
    return (
        "No cgroup2 file system is mounted (it usually is at /sys/fs/cgroup): the packets of pods "
        "and of this node are rewritten, too, and this node has no node ports for itself.",
    )


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
