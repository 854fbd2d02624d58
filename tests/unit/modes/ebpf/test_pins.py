"""Pinned links: their descriptors are closed, whatever the kernel refuses."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from steersman.modes.ebpf.bpf import Link
from steersman.modes.ebpf.pins import Pins


def some_link() -> Link:
    return Link(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def refuse(*_: object) -> None:
    raise OSError(errno.EBUSY, "no")


@pytest.mark.parametrize("call", ["pin", "replace", "has"])
def test_a_link_that_is_refused_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    link = some_link()
    monkeypatch.setattr(Link, "attach", lambda *_: link)
    monkeypatch.setattr(Pins, "link", lambda *_: None if call == "pin" else link)
    monkeypatch.setattr(Link, "target", 7)
    monkeypatch.setattr(Link, "has", lambda *_: False)
    monkeypatch.setattr(Link, call, refuse)
    with pytest.raises(OSError, match="no"):
        Pins(tmp_path).attach("7-sm_ingress", 3, (7, 7), 46)
    assert link.fd == -1
