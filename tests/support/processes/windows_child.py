"""`steersman` as on Windows, on Linux: the platform is said to be, what only Linux has is gone.

The loop has no readers and no signal handlers for us, like Windows' Proactor. At the end the names
of all modules of the program that were imported go to the file that TRACE names.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import yaml

# Imported before: their own branches for Windows do not run here.
OTHERS = (multiprocessing, subprocess, uuid, yaml)
GONE = ("fcntl", "resource", "termios", "pwd", "grp", "pty", "syslog")


class Gone:
    """Finds no module of those that Windows lacks."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in GONE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _not_there(*_: object) -> NoReturn:
    raise NotImplementedError


def _pair_of_sockets() -> tuple[socket.socket, socket.socket]:
    """Connect two sockets over loopback, as `socket.socketpair` does on Windows."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        return first, listener.accept()[0]


class Loop(asyncio.SelectorEventLoop):
    """What asyncio itself does goes on, by readers of its own under other names."""

    add_reader = add_writer = add_signal_handler = _not_there  # type: ignore[assignment]


class Policy(asyncio.DefaultEventLoopPolicy):
    """Has one loop, made while there were still Unix sockets: it wakes itself by them."""

    def __init__(self) -> None:
        super().__init__()
        self._made = Loop()

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return self._made


def pretend() -> None:
    asyncio.set_event_loop_policy(Policy())
    for module, names in (
        (socket, ("AF_NETLINK", "AF_UNIX", "SO_REUSEPORT", "SCM_RIGHTS", "send_fds", "recv_fds")),
        (os, ("geteuid", "getuid", "fork", "splice", "pipe2", "O_CLOEXEC", "O_NONBLOCK")),
    ):
        for name in names:
            delattr(module, name)
    dll = Mock(CreateMutexW=Mock(return_value=1))  # every function succeeds
    vars(ctypes).update(WinDLL=lambda *_, **__: dll, get_last_error=lambda: 0)
    socket.socketpair = _pair_of_sockets  # type: ignore[assignment]
    for name in GONE:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Gone())
    sys.platform = "win32"


def main(argv: list[str]) -> Any:
    pretend()
    from steersman.cli.main import main as steersman  # noqa: PLC0415
    from steersman.compile import endpoints, service  # noqa: PLC0415

    # Without a namespace a test has loopback addresses only, which Services may not use.
    for module in (endpoints, service):
        vars(module)["special_range"] = lambda _: ""

    try:
        return steersman(argv)
    finally:
        ours = sorted(name for name in sys.modules if name.startswith("steersman") or name in GONE)
        Path(os.environ["TRACE"]).write_text("\n".join(ours))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
