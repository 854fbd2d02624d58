"""One boot for everything that needs another kernel (tests/vm/guest)."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vm.initramfs import Archive
from tests.vm.kernel import Kernel, MachineError, find_kernel
from tests.vm.machine import EVERYTHING, MARK, UNAVAILABLE, missing, run

pytestmark = pytest.mark.skipif(bool(os.environ.get(MARK)), reason="this is the virtual machine")


@pytest.mark.kernel
@pytest.mark.slow(seconds=900)
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_everything_inside() -> None:
    minutes = 90 if os.environ.get(EVERYTHING) else 45
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/vm/guest"]
    # What pytest compiles here it does not compile inside, where that takes a minute.
    outside = {**os.environ, MARK: "1", "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([*tests, "--collect-only"], env=outside, capture_output=True, check=True)
    argv = [sys.executable, "-m", "tests.vm", "--timeout", str(minutes * 60), "--", *tests]
    inside = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    output = inside.stdout + inside.stderr
    if inside.returncode == UNAVAILABLE:
        pytest.skip(output.strip())
    failed = re.findall("^(?:FAILED|ERROR) .*", output, re.MULTILINE)
    assert inside.returncode == 0, "\n".join((*failed, output[-8000:]))


@pytest.mark.parametrize("command", ["qemu-system-x86_64", "busybox", "depmod"])
def test_what_is_missing_is_named(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None if name == command else f"/bin/{name}")
    package = {"qemu-system-x86_64": "qemu-system-x86", "busybox": "busybox-static"}
    assert f"needs {package.get(command, 'kmod')}: apt-get install" in missing()
    with pytest.raises(MachineError, match="apt-get install"):
        run(["true"])


def test_without_the_tools_of_debian_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MachineError, match="a Debian system is needed"):
        find_kernel("linux-image-0.1")


def test_a_kernel_without_a_module_is_refused(tmp_path: Path) -> None:
    modules = tmp_path / "lib/modules/0.1"
    modules.mkdir(parents=True)
    (modules / "modules.dep").write_text("kernel/fs/9p.ko.xz: kernel/net/9pnet.ko.xz\n")
    (modules / "modules.builtin").write_text("kernel/drivers/virtio.ko\n")
    with pytest.raises(MachineError, match="has no module overlay"):
        Kernel(tmp_path, "0.1").closure(["virtio", "overlay"])


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
