"""The ebpf mode in a lab: its node's sockets, and those of its pods, in a cgroup of their own.

Sockets belong to the cgroup of the thread that makes them; a threaded cgroup lets the worker of
lab_sockets be in one for just that long, so that clients outside are not seen by the programs.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import functools
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import hatch_build
from steersman.host.exec import Exec, SubprocessExec
from steersman.host.libbpf import call
from steersman.host.worker import KernelWorker
from steersman.model.plan import NodePlan
from steersman.modes.base import Mode, release
from steersman.modes.ebpf.bpf import HashMap
from steersman.modes.ebpf.datapath import EbpfOptions
from steersman.modes.ebpf.dump import describe
from steersman.modes.ebpf.loader import FILE
from steersman.modes.ebpf.mode import EbpfMode
from steersman.modes.ebpf.probe import cgroup_root
from tests.support.ending import ENDING
from tests.support.lab import sockets as lab_sockets
from tests.support.lab.inside import Inside

_serial = itertools.count(1)


def next_number() -> int:
    """A number that nobody else in this process has."""
    return next(_serial)


def program_exists(program: int) -> bool:
    """Whether the kernel has a program of this id."""
    try:
        os.close(call("bpf_prog_get_fd_by_id", program))
    except FileNotFoundError:
        return False
    return True


class _TestRun(ctypes.Structure):
    """The part of `struct bpf_test_run_opts` that we set."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("data_in", ctypes.c_void_p),
        ("data_out", ctypes.c_void_p),
        ("data_size_in", ctypes.c_uint32),
        ("data_size_out", ctypes.c_uint32),
        ("ctx_in", ctypes.c_void_p),
        ("ctx_out", ctypes.c_void_p),
        ("ctx_size_in", ctypes.c_uint32),
        ("ctx_size_out", ctypes.c_uint32),
        ("retval", ctypes.c_int32),
        ("repeat", ctypes.c_int),
        ("duration", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
    )


_modes: dict[str, EbpfMode] = {}


CHECKSUM_COMPLETE = 4  # BPF_F_TEST_SKB_CHECKSUM_COMPLETE (linux/bpf.h)


def run_packet(
    program: int, packet: bytes, context: bytes = b"", *, flags: int = 0
) -> tuple[int, bytes]:
    """Run a program of devices on a packet (PROG_TEST_RUN); return its answer and the packet."""
    given = ctypes.create_string_buffer(packet, len(packet))
    meta = ctypes.create_string_buffer(context, len(context))
    out = ctypes.create_string_buffer(4096)
    options = _TestRun(
        ctypes.sizeof(_TestRun),
        *(ctypes.addressof(given), ctypes.addressof(out), len(packet), len(out)),
        *(ctypes.addressof(meta) if context else None, None, len(context), 0, 0, 1, 0, flags),
    )
    call("bpf_prog_test_run_opts", program, ctypes.byref(options))
    return options.retval, out.raw[: options.data_size_out]


def mode_behind(execute: Exec) -> EbpfMode:
    """The mode, in the namespace in which an Exec runs programs; one per namespace."""
    if isinstance(execute, Inside):
        return _mode_in(str(execute.netns), execute)
    return EbpfMode(execute, EbpfOptions(file=compiled()))


def mode_in(path: str, options: EbpfOptions, execute: Exec | None = None) -> EbpfMode:
    """A mode for a network namespace."""
    mode = EbpfMode(execute or SubprocessExec(), options)
    mode.worker = KernelWorker(Path(path))
    return mode


def _mode_in(path: str, execute: Exec) -> EbpfMode:
    for other in [other for other in _modes if not os.path.exists(other)]:
        release_now(_modes.pop(other))
    if path not in _modes:
        number = next(_serial)
        cgroup = new_cgroup(number)
        lab_sockets.CGROUPS[path] = cgroup
        options = EbpfOptions(bpffs() / str(number), cgroup, file=compiled())
        _modes[path] = mode_in(path, options, execute)
    return _modes[path]


def release_now(mode: Mode) -> None:
    """Release a mode, also if this thread has a running event loop."""
    thread = threading.Thread(target=lambda: asyncio.run(release(mode)), daemon=True)
    thread.start()
    thread.join(60)


def forget_connections(path: str) -> None:
    """Delete what the mode of a namespace has learned of connections."""
    flows = HashMap.pinned(_modes[path].datapath.pins.maps / "flows")
    flows.delete_all([key for key, _ in flows.items()])
    flows.close()


@functools.cache
def compiled() -> Path:
    """The object of the mode; all are compiled if one is missing, or older than the sources."""
    root = Path(hatch_build.__file__).parent
    sources = FILE.parent / "c"
    newest = max(path.stat().st_mtime for path in sources.iterdir())
    descriptor = os.open(sources, os.O_RDONLY)
    try:  # other test processes wait until one of them has compiled
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        made = [path.stat().st_mtime if path.exists() else 0 for path in hatch_build.objects(root)]
        if min(made) < newest and shutil.which("clang"):
            hatch_build.compile_objects(root)
    finally:
        os.close(descriptor)
    return FILE


@functools.cache
def bpffs() -> Path:
    """A bpffs of this process."""
    place = Path(tempfile.mkdtemp(prefix="sm-bpf-"))
    subprocess.run(["mount", "-t", "bpf", "bpf", place], check=True)
    ENDING.callback(_unmount, place)
    return place


def _unmount(place: Path) -> None:
    for mode in _modes.values():
        release_now(mode)
    subprocess.run(["umount", "-l", place], check=False)
    place.rmdir()


def new_cgroup(number: int) -> Path:
    """A threaded cgroup below the one we are in."""
    root = cgroup_root()
    assert root is not None, "no cgroup2 file system is mounted"
    place = own_cgroup(root) / f"sm-{os.getpid()}-{number}"
    place.mkdir()
    ENDING.callback(_remove, place)
    (place / "cgroup.type").write_text("threaded")
    return place


def _remove(place: Path) -> None:
    if place.exists():
        place.rmdir()


def own_cgroup(root: Path) -> Path:
    """The cgroup of this process."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return root / line.removeprefix("0::").lstrip("/")
    return root


def golden(plan: NodePlan) -> str:
    """The rendered objects of a plan's Services, in words."""
    mode, out = mode_behind(SubprocessExec()), dict[Any, Any]()
    for service in plan.services.values():
        out.update(mode.render_service(service, plan.settings))
    return "".join(f"{line}\n" for line in sorted(map(describe, out.items())))
