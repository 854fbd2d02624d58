"""Where the ebpf mode of a benchmark works: a bpffs and a cgroup of its own, gone when closed."""

from __future__ import annotations

import atexit
import itertools
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from steersman.modes.ebpf.datapath import EbpfOptions
from steersman.modes.ebpf.probe import cgroup_root

_serial = itertools.count(1)


class Place:
    """Sockets made `inside` are balanced, all others are left alone."""

    def __init__(self) -> None:
        root = cgroup_root()
        if root is None:
            raise RuntimeError("no cgroup2 file system is mounted")
        (own,) = (
            line.removeprefix("0::").lstrip("/")
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        )
        self._home = root / own
        self.cgroup = self._home / f"sm-bench-{os.getpid()}-{next(_serial)}"
        self.cgroup.mkdir()
        (self.cgroup / "cgroup.type").write_text("threaded")
        self._bpffs = Path(tempfile.mkdtemp(prefix="sm-bench-"))
        subprocess.run(["mount", "-t", "bpf", "bpf", self._bpffs], check=True)
        self._leave = atexit.register(self.close)
        self.options = EbpfOptions(self._bpffs / "pins", self.cgroup)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Be in the cgroup, with this thread."""
        thread = str(threading.get_native_id())
        (self.cgroup / "cgroup.threads").write_text(thread)
        try:
            yield
        finally:
            (self._home / "cgroup.threads").write_text(thread)

    def close(self) -> None:
        """Leave nothing: with the pins the programs go."""
        atexit.unregister(self._leave)
        subprocess.run(["umount", "-l", self._bpffs], check=True)
        self._bpffs.rmdir()
        self.cgroup.rmdir()
