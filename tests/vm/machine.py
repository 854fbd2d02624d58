"""Runs a command as root in a small virtual machine with a stock kernel.

The machine sees the host's files read only, so this project and its environment; what it writes
is lost. Its output is passed on and its exit status returned.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.vm.initramfs import START, initramfs
from tests.vm.kernel import DEFAULT, Kernel, MachineError, find_kernel

QEMU = "qemu-system-x86_64"
MARK = "STEERSMAN_VM"
"""Set in the environment of the command."""
EVERYTHING = "STEERSMAN_VM_ALL"
"""Set it to run every test of tests/vm/guest, which takes 20 minutes, not the selection."""
SHARE, SHARES = "STEERSMAN_VM_SHARE", 12
"""Which share of the cases runs beside the selection; by default it rotates by commit."""
FAILED, TIMED_OUT = 125, 124
"""Exit statuses of the machine itself: it ended without a status; it was stopped."""
UNAVAILABLE = 69
"""Exit status of `python -m tests.vm` where no machine can run."""
# Emulated code is translated once for each address: a program that is always mapped at the same
# ones starts in half the time (norandmaps).
_BOOT = (
    "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic mitigations=off nokaslr norandmaps "
    "no_timer_check "
    "rcupdate.rcu_cpu_stall_timeout=120 watchdog_thresh=60 random.trust_cpu=on"
)
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "PYTHONPATH", "TERM", EVERYTHING, SHARE)


def missing() -> str:
    """Why no machine can run here; "" where one can (the kernel may still have to be fetched)."""
    wanted = {QEMU: "qemu-system-x86", "busybox": "busybox-static", "depmod": "kmod"}
    packages = [package for command, package in wanted.items() if shutil.which(command) is None]
    if packages:
        return f"the virtual machine needs {', '.join(packages)}: apt-get install them, as root"
    return "" if os.geteuid() == 0 else "the virtual machine reads the host's files as root"


def run(
    argv: Sequence[str],
    *,
    kernel: str = DEFAULT,
    timeout: float = 900.0,
    memory: str = "1G",
    out: IO[bytes] | None = None,
) -> int:
    """Run a command and return its exit status, or FAILED or TIMED_OUT.

    Args:
        argv: the command, run in the current directory.
        kernel: a Debian package.
        timeout: seconds after which the machine is stopped, whatever it does.
        memory: as QEMU writes it.
        out: takes the output, errors too; ours where it is None.

    Raises:
        MachineError: no machine can run here.
    """
    if why := missing():
        raise MachineError(why)
    found = find_kernel(kernel)
    with tempfile.TemporaryDirectory(prefix="steersman-vm-") as name:
        work = Path(name)
        _prepare(work, found, argv)
        status = _boot(work, found, memory, timeout, out)
        if status == FAILED:
            _explain(work)
        return status


def _prepare(work: Path, kernel: Kernel, argv: Sequence[str]) -> None:
    control = work / "control"
    control.mkdir()
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    exports = {SHARE: str(_rotated()), **kept, MARK: "1", "PYTHONDONTWRITEBYTECODE": "1"}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    lines += [f"cd {shlex.quote(str(Path.cwd()))} || exit 126", f"exec {shlex.join(argv)}", ""]
    (control / "command").write_text("\n".join(lines))
    (control / "start").write_text(START)
    (control / "modules").write_text(str(kernel.modules))
    (work / "initramfs").write_bytes(initramfs(kernel))


def _rotated() -> int:
    """Return which share of the cases this commit runs; the first one if there is no commit."""
    if shutil.which("git") is None:
        return 0
    argv = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return int(done.stdout.strip() or "0", 16) % SHARES


def chosen(names: Sequence[str], selected: Container[str]) -> list[str]:
    """Return the names of the cases that run: the selection, and a share of the others."""
    share = int(os.environ.get(SHARE, "0"))
    everything = bool(os.environ.get(EVERYTHING))
    return [
        name
        for number, name in enumerate(names)
        if everything or name in selected or number % SHARES == share
    ]


def _boot(work: Path, kernel: Kernel, memory: str, timeout: float, out: IO[bytes] | None) -> int:
    with _pipe(out or sys.stdout.buffer) as stdout, _pipe(out or sys.stderr.buffer) as stderr:
        argv = _qemu(work, kernel, memory, stdout, stderr)
        with (work / "qemu.log").open("wb") as log:
            machine = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(stdout, stderr)
            )
        try:
            machine.wait(timeout)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            machine.kill()
            machine.wait()
    status = work / "control/status"
    return int(status.read_text()) if status.exists() else FAILED


@contextmanager
def _pipe(sink: IO[bytes]) -> Iterator[int]:
    """Pass on the bytes written to a file descriptor, until the context ends."""
    reading, writing = os.pipe()

    def pump() -> None:
        while data := os.read(reading, 1 << 16):
            sink.write(data)
            sink.flush()

    thread = threading.Thread(target=pump)
    thread.start()
    try:
        yield writing
    finally:
        os.close(writing)
        thread.join()
        os.close(reading)


def _qemu(work: Path, kernel: Kernel, memory: str, stdout: int, stderr: int) -> list[str]:
    # KVM is not tried: a /dev/kvm that exists proves nothing inside another virtual machine.
    return [
        # One processor does everything in turn: beside many programs it must not wait for each.
        *("nice", "-n", "-10"),
        *(QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-nic", "none", "-machine", "q35", "-accel", "tcg,thread=multi"),
        # One processor: emulating a second takes two thirds more CPU time, and longer, too.
        *("-cpu", "max,-la57", "-m", memory, "-smp", "1", "-kernel", str(kernel.image)),
        *("-initrd", str(work / "initramfs"), "-append", _BOOT),
        *("-chardev", f"file,id=console,path={work}/console", "-serial", "chardev:console"),
        *("-device", "virtio-rng-pci", "-device", "virtio-serial-pci"),
        *_port("out", stdout),
        *_port("err", stderr),
        *_share("root", Path("/"), ",readonly=on"),
        *_share("control", work / "control"),
    ]


def _port(name: str, descriptor: int) -> tuple[str, ...]:
    chardev = f"file,id={name},path=/dev/fd/{descriptor}"
    return "-chardev", chardev, "-device", f"virtserialport,chardev={name},name={name}"


def _share(tag: str, path: Path, more: str = "") -> tuple[str, ...]:
    device = f"local,id={tag},path={path},security_model=none,multidevs=remap{more}"
    return "-fsdev", device, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"


def _explain(work: Path) -> None:
    print("the machine ended without a status; its console:", file=sys.stderr)
    for name in ("console", "qemu.log"):
        path = work / name
        if path.exists():
            print(path.read_text(errors="replace")[-4000:], file=sys.stderr)
