"""This process: its capabilities and limits, users it trusts, threads that do not delay its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NEEDS_NET_ADMIN = "needs root or CAP_NET_ADMIN"
"""Hint for messages about EPERM."""
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
_LAUNCHER = "setpriv-net"
"""Program of the image that has CAP_NET_ADMIN as a file, for a user who is not root."""
_TRIED = "STEERSMAN_LAUNCHED_BY"
INLINE_OBJECTS = 64
"""Number of objects up to which writing them to the kernel takes less time than a thread."""
CONTROL = "steersman-control"
"""Name of the abstract socket on which the process answers commands (run/serve/control.py)."""
_PEER = struct.Struct("iII")  # struct ucred: process, user, group
MOST_DESCRIPTORS = 1 << 20
"""The limit is raised to this: more was never needed, and some programs try each number."""


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


# The name of an abstract socket lives in the network namespace, so containers that share nothing
# else find each other. Anyone may bind or connect; the kernel says who did (SO_PEERCRED).


def peer(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and the user of the process at the other end of an abstract socket."""
    pid, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, user


def is_trusted(user: int) -> bool:
    """Whether a user is root or our own; in another user namespace, root is neither."""
    return user in (0, os.geteuid())


def descriptor_limit() -> int:
    """Return how many files and sockets this process may have open."""
    try:
        import resource  # noqa: PLC0415 - POSIX only
    except ImportError:
        return MOST_DESCRIPTORS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit(most: int = MOST_DESCRIPTORS) -> int:
    """Raise the limit of open files as far as allowed, as Go's runtime does; return the limit.

    With CAP_SYS_RESOURCE the hard limit is raised as well.
    """
    try:
        import resource  # noqa: PLC0415 - POSIX only
    except ImportError:
        return descriptor_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    # First try to raise both limits, then the soft one up to the hard one.
    if soft != unlimited and soft < most:
        if hard != unlimited and hard < most:
            with contextlib.suppress(OSError, ValueError):  # unprivileged, or above fs.nr_open
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
                return most
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (most if hard == unlimited else min(hard, most), hard)
            )
    return descriptor_limit()


def set_oom_score_adjustment(value: int, proc: Path = Path("/proc")) -> str:
    """Make the kernel kill this process later (below 0) or sooner when memory runs out.

    Returns:
        A sentence for the log if that fails, else "": the proxy runs without it, too.
    """
    try:
        (proc / "self/oom_score_adj").write_text(str(value))
    except OSError as error:
        return f"the OOM score adjustment could not be set to {value}: {error.strerror}"
    return ""


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the programs that it ran to their end."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def resident_bytes(proc: Path = Path("/proc")) -> int:
    """Return the resident memory of this process; 0 if the system does not say."""
    try:
        pages = int((proc / "self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class DaemonThreads(Executor):
    """Runs each call in a thread of its own.

    asyncio's own executor is joined at the end of the process, so that a call that never returns
    (a name server, a file system of the network) would keep the process from ending.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start a call."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        # Running calls cannot be cancelled: asyncio then only drops the result.
        future.set_running_or_notify_cancel()
        threading.Thread(target=work, daemon=True, name=fn.__name__).start()
        return future


_THREADS = DaemonThreads()


async def in_thread(call: Callable[..., T], *args: Any) -> T:
    """Call a blocking function in a thread; when cancelled, stop waiting for it.

    Raises:
        OSError: no thread can be started, and whatever the function raises.
    """
    try:
        done = asyncio.get_running_loop().run_in_executor(_THREADS, call, *args)
    except RuntimeError as error:
        raise OSError(f"no thread can be started: {error}") from error
    return await done


async def to_thread_to_end(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread, as asyncio.to_thread; when cancelled, wait for its end first.

    For calls that use descriptors or write: their owner may close once no task is left.
    """
    thread = asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait([thread])
        raise
