"""Errors of the kernel as errors of a mode."""

from __future__ import annotations

import errno
import os

import pytest

from steersman.model.errors import ApplyError, BusyError
from steersman.modes.ebpf.mode import guarded


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOMEM, BusyError),
        (errno.EPERM, ApplyError),
        (errno.EMFILE, BusyError),
        (errno.EINVAL, ApplyError),
        (errno.E2BIG, ApplyError),
    ],
)
def test_only_what_is_about_an_object_is_its_fault(code: int, kind: type[Exception]) -> None:
    def work() -> None:
        raise OSError(code, os.strerror(code))

    with pytest.raises(kind, match=os.strerror(code)):
        guarded(work)
