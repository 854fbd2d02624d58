"""The two ways in which programming the kernel fails. Callers react to the class alone."""

from __future__ import annotations

import errno

TRANSIENT_ERRNOS = frozenset({errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.EINTR})
"""Kernel errors that say nothing about the objects of a batch: they become a BusyError."""


class ApplyError(Exception):
    """The kernel rejected a batch because an object in it is invalid. Bisect the batch."""


class BusyError(Exception):
    """The kernel cannot be programmed now (lock held, out of memory). Retry the same later."""
