"""The system call bpf(2): objects by file descriptor, pins and links.

Commands and structs are those of `union bpf_attr` in linux/bpf.h. Every call raises OSError with
the kernel's errno. The owner of a descriptor, an `Object`, closes it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
import time
from pathlib import Path
from typing import Any, Self

_NUMBERS = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "s390x": 351, "ppc64le": 361}
"""System call number of bpf(2) by machine."""
_MEMBARRIERS = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "s390x": 356, "ppc64le": 365}
"""System call number of membarrier(2)."""
_MEMBARRIER_GLOBAL = 1
_GRACE = 0.1  # seconds; no program takes a thousandth of it

MAP_LOOKUP, MAP_UPDATE, MAP_DELETE = 1, 2, 3
OBJ_PIN, OBJ_GET = 6, 7
OBJ_GET_INFO = 15
MAP_LOOKUP_BATCH, MAP_UPDATE_BATCH, MAP_DELETE_BATCH = 24, 26, 27
LINK_CREATE, LINK_UPDATE, LINK_DETACH = 28, 29, 34

_LINK_CGROUP = 3
XDP = 37
TCX_INGRESS, TCX_EGRESS = 46, 47
CGROUP_ATTACH_TYPES = {
    "sm_release": 34,  # first the end of sockets, then answers, then requests
    "sm_recvmsg4": 19,
    "sm_recvmsg6": 20,
    "sm_getpeername4": 29,
    "sm_getpeername6": 30,
    "sm_bind4": 8,
    "sm_bind6": 9,
    "sm_sendmsg4": 14,
    "sm_sendmsg6": 15,
    "sm_connect4": 10,
    "sm_connect6": 11,
}
"""Attach type by the name of our program, in the order in which they are attached."""

_MACHINE = os.uname().machine
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_long)


def bpf(command: int, attributes: Any, size: int) -> int:
    """Call bpf(2) and return its result; OSError if it fails."""
    number = _NUMBERS.get(_MACHINE)
    if number is None:
        raise OSError(errno.ENOSYS, f"the system call number of bpf(2) on {_MACHINE} is unknown")
    result: int = _libc.syscall(number, command, ctypes.addressof(attributes), size)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


_attributes = functools.cache(struct.Struct)
"""Cached: a system call takes less time than to compile a struct layout."""


def call(command: int, layout: str, *values: int) -> int:
    """Call bpf(2) with attributes of a native struct layout without padding ("=...").

    Raises:
        OSError: as `bpf`.
    """
    attributes = ctypes.create_string_buffer(_attributes(layout).pack(*values))
    return bpf(command, attributes, len(attributes) - 1)


def wait_for_programs() -> None:
    """Wait until every program that runs now has ended, and so all that were replaced before.

    membarrier(2) waits for a grace period of RCU, and programs run within one. A kernel with
    tickless CPUs (nohz_full) or a seccomp filter refuses it: then sleep.
    """
    number = _MEMBARRIERS.get(_MACHINE, -1)
    if _libc.syscall(number, _MEMBARRIER_GLOBAL, None, 0):
        time.sleep(_GRACE)


class Object:
    """A descriptor of a map, program or link."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def pinned(cls, path: Path) -> Self:
        """Open a pinned object; FileNotFoundError if there is none."""
        name = ctypes.create_string_buffer(str(path).encode())
        return cls(call(OBJ_GET, "=QII", ctypes.addressof(name), 0, 0))

    def pin(self, path: Path) -> None:
        """Pin at a path of a bpffs."""
        name = ctypes.create_string_buffer(str(path).encode())
        call(OBJ_PIN, "=QII", ctypes.addressof(name), self.fd, 0)

    def info(self, size: int) -> bytes:
        """Return the kernel's `bpf_*_info`, up to `size` bytes."""
        buffer = ctypes.create_string_buffer(size)
        call(OBJ_GET_INFO, "=IIQ", self.fd, size, ctypes.addressof(buffer))
        return buffer.raw

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Link(Object):
    """An attached program; it stays attached while the link is pinned or open."""

    @classmethod
    def attach(cls, program: int, target: int, attach_type: int) -> Self:
        """Attach a program to a cgroup (by descriptor) or a device (by index)."""
        return cls(call(LINK_CREATE, "=IIIIIIQ", program, target, attach_type, 0, 0, 0, 0))

    def replace(self, program: int) -> None:
        """Replace the program atomically: each packet or socket sees one or the other."""
        call(LINK_UPDATE, "=IIII", self.fd, program, 0, 0)

    def has(self, program: int) -> bool:
        """Whether this program (by descriptor) is the attached one."""
        _, _, own = struct.unpack_from("=III", self.info(32))
        _, number = struct.unpack_from("=II", Object(program).info(8))
        return bool(own == number)

    def detach(self) -> None:
        """Detach the program, even if others have the link open."""
        call(LINK_DETACH, "=I", self.fd)

    @property
    def target(self) -> int:
        """Id of the cgroup, or index of the device; 0 if that is gone."""
        kind, _, _, _, target, extra = struct.unpack_from("=IIIIII", self.info(32))
        identity: int = target | extra << 32 if kind == _LINK_CGROUP else target
        return identity
