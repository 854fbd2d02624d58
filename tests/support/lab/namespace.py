"""A network namespace of a test's own: of one thread, nameless, gone with the thread."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Coroutine
from typing import Any

_CLONE_NEWNET = 0x40000000


def sh(command: str) -> str:
    """Run a command line in the caller's namespace; its output."""
    return subprocess.run(command, shell=True, check=True, text=True, stdout=subprocess.PIPE).stdout


def in_namespace(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine on a loop of its own, in a new network namespace with `lo` up.

    The kernel removes the namespace when the thread (and its executor's threads, made from it)
    ends, also after a failure.
    """
    failures: list[BaseException] = []

    def thread() -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.unshare(_CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            sh("ip link set lo up")
            asyncio.run(body())
        except BaseException as failure:
            failures.append(failure)

    runner = threading.Thread(target=thread)
    runner.start()
    runner.join()
    if failures:
        raise failures[0]
