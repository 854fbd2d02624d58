"""One boot for everything that needs another kernel (tests/vm/guest)."""

from __future__ import annotations

import io
import os
import stat
import sys

import pytest

from tests.vm.initramfs import Archive
from tests.vm.kernel import DEFAULT, MachineError
from tests.vm.machine import MARK, missing, run

KERNEL = os.environ.get("STEERSMAN_VM_KERNEL", DEFAULT)
"""Debian package of the kernel: a second version can be chosen."""
MINUTES = 40 if os.environ.get("STEERSMAN_VM_ALL") else 15
pytestmark = pytest.mark.skipif(bool(os.environ.get(MARK)), reason="this is the virtual machine")


@pytest.mark.kernel
@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_everything_inside() -> None:
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/vm/guest"]
    output = io.BytesIO()
    try:
        status = run(argv, kernel=KERNEL, timeout=MINUTES * 60, out=output)
    except MachineError as error:
        pytest.skip(str(error))
    assert status == 0, output.getvalue().decode(errors="replace")[-8000:]


def test_an_archive_is_made_of_padded_entries() -> None:
    archive = Archive()
    archive.add("bin", stat.S_IFDIR | 0o755)
    archive.add("bin/a", stat.S_IFREG | 0o755, b"12345")
    data = archive.close()
    assert len(data) % 4 == 0
    assert data.count(b"070701") == 3
    assert data.startswith(b"070701" + b"00000001" + b"000041ed")
    assert b"bin/a\0" in data
    assert b"12345\0\0\0" in data
