"""Processes of the node: those of its network namespace, who has a socket, who proxies Services.

In a pod without hostPID, /proc shows the processes of the container only: `sees_processes` tells.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from steersman.host.process import words_of
from steersman.operate.doctor.context import Context

ELSEWHERE = "this container sees only its own processes (hostPID would show those of the node)"
"""Why processes of the node cannot be seen."""
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of linux/proc_ns.h, since 3.8


def sees_processes(proc: Path) -> bool:
    """Return whether all processes of the node are in `proc`, not only those of one container.

    Args:
        proc: where proc is mounted.
    """
    with suppress(OSError):
        if os.readlink(proc / "self/ns/pid") == _FIRST_PID_NAMESPACE:
            return True
    with suppress(OSError):
        # A container that is a whole node (kind) has an init system; a pod has not.
        return (proc / "1/comm").read_text().strip() in ("systemd", "init")
    return False


class Process(NamedTuple):
    """A process in the network namespace of the node."""

    pid: int
    name: str
    """As in /proc/PID/comm."""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


async def processes(context: Context) -> tuple[Process, ...]:
    """Return the processes that share this process's network namespace."""

    def read() -> list[Process]:
        found = []
        proc = context.path("proc")
        # Processes in other namespaces (pods) do not program this one.
        try:
            mine = os.stat(proc / "self/ns/net").st_ino
        except OSError:
            mine = 0
        for folder in proc.iterdir():
            if not folder.name.isdigit():
                continue
            with suppress(OSError):  # it has ended, or is another user's
                if mine in (0, os.stat(folder / "ns/net").st_ino):
                    name = (folder / "comm").read_text().strip()
                    found.append(Process(int(folder.name), name))
        return found

    return tuple(await asyncio.to_thread(read))


def proxies_services(process: Process, proc: Path) -> bool | None:
    """Return whether a process programs Services; None if that cannot be known; it blocks.

    The agents of Cilium and of kube-router do so only if a flag asks for it: often they are only
    the pod network, beside another proxy.
    """
    if process.name == "kube-proxy":
        return True
    try:
        flags = dict(word.partition("=")[::2] for word in words_of(proc, process.pid))
        if process.name == "kube-router":
            return flags.get("--run-service-proxy", "true").lower() not in ("false", "0")
        if process.name != "cilium-agent":
            return False
        value = flags.get("--kube-proxy-replacement")
        if value is None and (folder := flags.get("--config-dir")):
            # A ConfigMap that is mounted in the agent's container: a file for each key.
            root = proc / str(process.pid) / "root" / folder.lstrip("/")
            key = root / "kube-proxy-replacement"
            value = key.read_text().strip() if key.exists() or not root.is_dir() else None
        return (value or "false").lower() not in ("false", "disabled")
    except OSError:
        return None


class Owner(NamedTuple):
    """The process that has a socket."""

    pid: int
    command: str

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command})"


def socket_owners(inodes: frozenset[int], proc: Path = Path("/proc")) -> dict[int, Owner]:
    """Return the process that has each socket, as far as processes can be seen; it blocks.

    Args:
        inodes: of the sockets.
        proc: where proc is mounted.
    """
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, Owner] = {}
    if not wanted:
        return found
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        with suppress(OSError):  # it ended, or belongs to another user
            for link in os.listdir(proc / name / "fd"):
                with suppress(OSError):
                    inode = wanted.get(os.readlink(proc / name / "fd" / link))
                    if inode is not None and inode not in found:
                        command = " ".join(words_of(proc, int(name))[:4])
                        found[inode] = Owner(int(name), command)
    return found
