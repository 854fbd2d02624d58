"""How many files and sockets this process may have open."""

from __future__ import annotations

import contextlib

MOST_DESCRIPTORS = 1 << 20
"""The limit is raised to this: more was never needed, and some programs try each number."""


def descriptor_limit() -> int:
    """Return how many files and sockets this process may have open."""
    try:
        import resource  # noqa: PLC0415 - POSIX only
    except ImportError:
        return MOST_DESCRIPTORS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit(most: int = MOST_DESCRIPTORS) -> int:
    """Raise the limit of open files as far as allowed, as Go's runtime does; return the limit.

    With CAP_SYS_RESOURCE the hard limit is raised as well.
    """
    try:
        import resource  # noqa: PLC0415 - POSIX only
    except ImportError:
        return descriptor_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    # First try to raise both limits, then the soft one up to the hard one.
    if soft != unlimited and soft < most:
        if hard != unlimited and hard < most:
            with contextlib.suppress(OSError, ValueError):  # unprivileged, or above fs.nr_open
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
                return most
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (most if hard == unlimited else min(hard, most), hard)
            )
    return descriptor_limit()
