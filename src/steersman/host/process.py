"""What this process asks of the kernel for itself."""

from __future__ import annotations

import contextlib
from pathlib import Path

NEEDS_NET_ADMIN = "needs root or CAP_NET_ADMIN"
"""What is missing where the kernel says EPERM."""
CAP_SYS_ADMIN = 21


def has_capability(number: int, proc: Path = Path("/proc")) -> bool:
    """Whether this process has a capability (linux/capability.h) in effect."""
    for line in (proc / "self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


MOST_DESCRIPTORS = 1 << 20
"""What the limit is raised to: more was never needed, and some programs look at each number."""


def descriptor_limit() -> int:
    """Return how many files and sockets this process may have open."""
    try:
        import resource  # noqa: PLC0415 - POSIX only
    except ImportError:
        return MOST_DESCRIPTORS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit(most: int = MOST_DESCRIPTORS) -> int:
    """Raise the limit of open files as far as this process may, as Go's runtime does.

    With CAP_SYS_RESOURCE the hard limit is raised as well. Returns the limit that now holds.
    """
    try:
        import resource  # noqa: PLC0415 - POSIX only
    except ImportError:
        return descriptor_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < most:
        if hard != unlimited and hard < most:
            with contextlib.suppress(OSError, ValueError):  # not privileged, or above fs.nr_open
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
                return most
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (most if hard == unlimited else min(hard, most), hard)
            )
    return descriptor_limit()


def set_oom_score_adjustment(value: int, proc: Path = Path("/proc")) -> str:
    """Ask the kernel to kill this process later (below 0) or sooner when memory runs out.

    Returns:
        What went wrong, for the log ("" if nothing): the proxy runs as well without it.
    """
    try:
        (proc / "self/oom_score_adj").write_text(str(value))
    except OSError as error:
        return f"the OOM score adjustment could not be set to {value}: {error.strerror}"
    return ""
