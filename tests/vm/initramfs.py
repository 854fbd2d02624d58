"""The first file system of the machine: busybox, a few modules, and the scripts that start it."""

from __future__ import annotations

import io
import shutil
import stat
from pathlib import Path

from tests.vm.kernel import Kernel, MachineError

_MODULES = ("virtio_pci", "virtio_console", "virtio_rng", "9pnet_virtio", "9p", "overlay")
_DIRECTORIES = ("bin", "dev", "proc", "sys", "modules", "root")
_NINE = "trans=virtio,version=9p2000.L,msize=262144,access=any"

INIT = f"""#!/bin/busybox sh
# The machine's root is the host's, read only, under a file system in memory.
/bin/busybox --install -s /bin
mount -t devtmpfs dev /dev; mount -t proc proc /proc; mount -t sysfs sys /sys
for module in $(cat /modules/order); do insmod /modules/$module.ko || echo "no $module"; done
mkdir -p /lower /upper /new /control
mount -t 9p -o {_NINE} control /control || poweroff -f
mount -t 9p -o ro,{_NINE},cache=loose root /lower || poweroff -f
mount -t tmpfs -o size=75%,mode=755 upper /upper; mkdir /upper/data /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work,xino=off \
    overlay /new || poweroff -f
for name in proc sys dev run tmp control; do mkdir -p /new/$name; done
for name in proc sys dev control; do mount --move /$name /new/$name; done
exec switch_root /new /bin/bash /control/start
"""

START = """
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mount -t tmpfs -o mode=755 run /run; mkdir -p /run/netns /run/lock /dev/pts /dev/shm
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts; mount -t tmpfs shm /dev/shm
ln -sfn /proc/self/fd /dev/fd
for n in 0 1 2; do
    names=(stdin stdout stderr); ln -sfn fd/$n /dev/${names[$n]}
done
mount -t cgroup2 cgroup2 /sys/fs/cgroup; mount -t bpf bpf /sys/fs/bpf
mkdir -p /lib/modules; rm -rf "/lib/modules/$(uname -r)"
ln -sfn "$(cat /control/modules)" "/lib/modules/$(uname -r)"
ip link set lo up; hostname steersman-vm
touch -c /etc/protocols /etc/services /etc/hosts  # copied up: 9p would be asked each time
for port in /sys/class/virtio-ports/*; do declare "port_$(cat "$port/name")=/dev/${port##*/}"; done
ulimit -n 65536
setsid bash /control/command </dev/null >"$port_out" 2>"$port_err"
echo $? >/control/status.part; mv /control/status.part /control/status
sync; /bin/busybox poweroff -f
"""


def initramfs(kernel: Kernel) -> bytes:
    """Return the archive that the kernel unpacks.

    Raises:
        MachineError: busybox is missing, or the kernel lacks a module.
    """
    busybox = shutil.which("busybox")
    if busybox is None:
        raise MachineError("busybox is not installed; apt-get install busybox-static")
    program = Path(busybox).read_bytes()
    if b"/ld-linux" in program:
        raise MachineError("busybox needs libraries; apt-get install busybox-static")
    modules = kernel.closure(_MODULES)
    archive = Archive()
    for name in _DIRECTORIES:
        archive.add(name, stat.S_IFDIR | 0o755)
    archive.add("bin/busybox", stat.S_IFREG | 0o755, program)
    archive.add("init", stat.S_IFREG | 0o755, INIT.encode())
    for name, data in modules:
        archive.add(f"modules/{name}.ko", stat.S_IFREG | 0o644, data)
    order = "\n".join(name for name, _ in modules)
    archive.add("modules/order", stat.S_IFREG | 0o644, order.encode())
    return archive.close()


class Archive:
    """A cpio archive in the format `newc` (Documentation/driver-api/early-userspace)."""

    def __init__(self) -> None:
        self._out = io.BytesIO()
        self._entries = 0

    def add(self, name: str, mode: int, data: bytes = b"") -> None:
        """Add a file or a directory."""
        self._entries += 1
        path = name.encode() + b"\0"
        fields = (self._entries, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
        self._write(b"070701" + b"".join(b"%08x" % field for field in fields) + path)
        self._write(data)

    def close(self) -> bytes:
        """End the archive and return it."""
        self.add("TRAILER!!!", 0)
        return self._out.getvalue()

    def _write(self, data: bytes) -> None:
        self._out.write(data + bytes(-(self._out.tell() + len(data)) % 4))
