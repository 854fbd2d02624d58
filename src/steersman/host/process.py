"""Processes: what this one may do and tells the system, and what another one does."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

NEEDS_NET_ADMIN = "needs root or CAP_NET_ADMIN"
"""Hint for messages about EPERM."""
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
_LAUNCHER = "setpriv-net"
"""Program of the image that has CAP_NET_ADMIN as a file, for a user who is not root."""
_TRIED = "STEERSMAN_LAUNCHED_BY"


def notify_supervisor(state: str) -> None:
    """Tell systemd what this process does: READY=1 or STOPPING=1 (sd_notify(3), Type=notify).

    Without systemd, or if it does not listen, nothing happens.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if sys.platform != "linux" or not address:
        return
    if address.startswith("@"):  # an abstract socket
        address = f"\0{address[1:]}"
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as sock:
        sock.setblocking(False)
        sock.sendto(state.encode(), address)


def has_capability(number: int, proc: Path = Path("/proc"), pid: int | str = "self") -> bool:
    """Whether a capability (linux/capability.h) is effective; OSError if the process is gone."""
    for line in (proc / str(pid) / "status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


class Activity(NamedTuple):
    """What a process does at a moment."""

    state: str
    """As in proc_pid_stat(5): R runs or wants to, S sleeps, D waits in the kernel, T is stopped, t
    is stopped by a debugger, Z has ended."""
    used: int
    """CPU time since its start, in ticks of the clock."""

    @property
    def stopped(self) -> str:
        """Why it cannot do anything, for people; "" if it can."""
        return {
            "T": "it is stopped (SIGSTOP)",
            "t": "a debugger has stopped it",
            "Z": "it has ended, and its parent does not know yet",
        }.get(self.state, "")


def activity(pid: int, proc: Path = Path("/proc")) -> Activity:
    """Return what a process does now.

    Raises:
        OSError: it has ended.
    """
    # The name of its program, in parentheses, may have blanks and parentheses, too.
    fields = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return Activity(fields[0], int(fields[11]) + int(fields[12]))


def words_of(proc: Path, pid: int) -> list[str]:
    """Return the command line of a process.

    Raises:
        OSError: it has ended, or belongs to another user.
    """
    words = (proc / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    return [word.decode(errors="replace") for word in words]


def gain_net_admin(argv: Sequence[str]) -> None:
    """Replace this process by one with CAP_NET_ADMIN, if the image's launcher can give it that.

    A command that `kubectl exec` starts in a pod without root has no capabilities, although the
    process that the pod is for has some. Returns if nothing is to be gained.

    Args:
        argv: the command line to run again.
    """
    if sys.platform != "linux" or os.geteuid() == 0 or has_capability(CAP_NET_ADMIN):
        return
    import shutil  # noqa: PLC0415 - 200 kB with what it imports, for commands in a pod only

    launcher = shutil.which(_LAUNCHER)
    if launcher is None or _LAUNCHER in os.environ.get(_TRIED, ""):
        return
    os.environ[_TRIED] = _LAUNCHER  # it may give nothing: never try twice
    words = [launcher, "--inh-caps=+net_admin", "--ambient-caps=+net_admin", *argv]
    with contextlib.suppress(OSError):
        os.execv(launcher, words)


def set_oom_score_adjustment(value: int, proc: Path = Path("/proc")) -> str:
    """Make the kernel kill this process later (below 0) or sooner when memory runs out.

    Returns:
        A sentence for the log if that fails, else "": the proxy runs without it, too.
    """
    if sys.platform == "win32":  # it kills no process to get memory
        return ""
    try:
        (proc / "self/oom_score_adj").write_text(str(value))
    except OSError as error:
        return f"the OOM score adjustment could not be set to {value}: {error.strerror}"
    return ""
