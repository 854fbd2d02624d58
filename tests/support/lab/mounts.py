"""A mount namespace of a test's own, for files that a machine has once: bpffs, cgroups, locks."""

from __future__ import annotations

import subprocess
from pathlib import Path

from steersman.modes.ebpf.probe import cgroup_root
from tests.support.lab import ebpf
from tests.support.lab.cluster import Lab
from tests.support.lab.sockets import CGROUPS


class Mounts:
    """A mount namespace, kept by a process that sleeps in it."""

    def __init__(self, script: str, *, pid: bool = False) -> None:
        """Enter a new namespace and run a shell script there that mounts.

        Args:
            script: what mounts.
            pid: a pid namespace, too, whose processes end with the keeper.
        """
        self._pid = pid
        # The keeper stays outside of the pid namespace, of which its child is the first process.
        also = ["--pid", "--fork", "--kill-child", "--mount-proc"] if pid else []
        script = f"{script}\necho mounted; exec sleep infinity"
        argv = ["unshare", "--mount", *also, "sh", "-ec", script]
        self._keeper = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert self._keeper.stdout
        assert self._keeper.stdout.readline() == b"mounted\n", script

    def argv(self, *words: str) -> list[str]:
        """A command line that runs here."""
        folder = f"/proc/{self._keeper.pid}/ns"
        also = [f"--pid={folder}/pid_for_children"] if self._pid else []
        return ["nsenter", f"--mount={folder}/mnt", *also, *words]

    def path(self, path: str) -> Path:
        """A file of this namespace, as other processes see it."""
        return Path(f"/proc/{self._keeper.pid}/root{path}")

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.wait()
        assert self._keeper.stdout
        self._keeper.stdout.close()


def ebpf_mounts(lab: Lab) -> tuple[Path, str]:
    """A cgroup for the sockets of a lab's node, and a script for its mounts.

    The program looks for the cgroup2 root and for a bpffs; with these both are the test's own.
    """
    ebpf.compiled()
    cgroup = CGROUPS[lab.node.path] = ebpf.new_cgroup(ebpf.next_number())
    return cgroup, f"mount --bind {cgroup} {cgroup_root()}; mount -t bpf bpf /sys/fs/bpf"
