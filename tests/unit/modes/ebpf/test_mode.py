"""Errors of the kernel as errors of a mode."""

from __future__ import annotations

import errno
import os

import pytest

from steersman.host.exec import SubprocessExec
from steersman.model.errors import ApplyError, BusyError
from steersman.model.plan import NodeSettings
from steersman.modes.ebpf.mode import EbpfMode, explained
from steersman.modes.ebpf.render import Programs, render_node


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
    with pytest.raises(kind, match=os.strerror(code)), explained():
        raise OSError(code, os.strerror(code))


def test_another_mode_may_bind_node_ports_while_this_one_still_serves() -> None:
    have = {**render_node(NodeSettings(), Programs(bytes(16))), b"F": b"a frontend"}
    free = EbpfMode(SubprocessExec()).free_node_ports(have)
    assert free == {
        **render_node(NodeSettings(), Programs(bytes(16), guard_node_ports=False)),
        b"F": b"a frontend",
    }
    assert free != have
    assert EbpfMode(SubprocessExec()).free_node_ports({}) == {}
