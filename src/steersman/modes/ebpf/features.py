"""What this kernel can do, found by trying it: the smallest programs and maps that need it.

A version says little, for distributions bring features to older kernels. What needs privileges
counts as there where we have none: that they are missing is said apart (probe.py).
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

from steersman.modes.ebpf import bpf

_MAP_CREATE, _PROG_LOAD = 0, 5
_ARRAY, _MMAPABLE = 2, 1 << 10
_SCHED_CLS, _SOCK_ADDR = 3, 18
_CONNECT4, _GETPEERNAME4 = 10, 29
_NETNS_COOKIE, _REDIRECT_NEIGH, _SET_RETVAL = 122, 152, 187
_SO_NETNS_COOKIE = 71
_NOWHERE = 0x7FFFFFFF
"""Index that no device has."""
_DENIED = (errno.EPERM, errno.EACCES)


class Feature(NamedTuple):
    """Something that not every kernel has."""

    what: str
    kernel: str
    """The first release of Linux that has it."""
    there: Callable[[], bool]
    instead: str = ""
    """What is done without it; "" where nothing can be."""

    @property
    def missing(self) -> str:
        """A sentence that says so."""
        end = f"; {self.instead}" if self.instead else ""
        return f"This kernel lacks {self.what}, which came with Linux {self.kernel}{end}."


def _possible(work: Callable[[], int]) -> bool:
    """Whether the kernel does not refuse something as unknown to it."""
    try:
        os.close(work())
    except OSError as error:
        return error.errno in _DENIED
    return True


def load(kind: int, place: int, code: bytes) -> int:
    """Load a program of a few instructions; returns its descriptor.

    Args:
        kind: BPF_PROG_TYPE_*.
        place: expected attach type, 0 where the kind has none.
        code: instructions.
    """
    program, licence = ctypes.create_string_buffer(code), ctypes.create_string_buffer(b"GPL")
    at = (ctypes.addressof(program), ctypes.addressof(licence))
    layout = "=IIQQIIQIIQQII"
    return bpf.call(_PROG_LOAD, layout, kind, len(code) // 8, *at, 0, 0, 0, 0, 0, 0, 0, 0, place)


def _set(register: int, value: int) -> bytes:
    number = register if sys.byteorder == "little" else register << 4
    return struct.pack("=BBhi", 0xB7, number, 0, value)


def _call(helper: int) -> bytes:
    return struct.pack("=BBhi", 0x85, 0, 0, helper)


_RETURN = _set(0, 1) + struct.pack("=BBhi", 0x95, 0, 0, 0)


def _program(kind: int, place: int, *code: bytes) -> Callable[[], bool]:
    return lambda: _possible(lambda: load(kind, place, b"".join((*code, _RETURN))))


def _mapped_array() -> bool:
    values = (_ARRAY, 4, 8, 1, _MMAPABLE)
    return _possible(lambda: bpf.call(_MAP_CREATE, "=IIIII", *values))


def _batches() -> bool:
    try:
        bpf.call(bpf.MAP_LOOKUP_BATCH, "=QQQQIIQQ", *(0,) * 5, _NOWHERE, 0, 0)
    except OSError as error:
        return error.errno != errno.EINVAL
    return True


def _cookies() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
        except OSError:
            return False
    return True


def tcx() -> bool:
    """Whether devices take links (TCX): without one, asking for a link is no valid request."""
    try:
        program = load(_SCHED_CLS, 0, _RETURN)
    except OSError as error:
        return error.errno in _DENIED
    try:
        bpf.Link.attach(program, _NOWHERE, bpf.TCX_INGRESS).close()
    except OSError as error:
        return error.errno != errno.EINVAL
    finally:
        os.close(program)
    return True


FEATURES = (
    Feature("maps in memory", "5.5", _mapped_array),
    Feature("batches of map entries", "5.6", _batches),
    Feature(
        "the cookie of a network namespace for programs",
        "5.7",
        _program(_SOCK_ADDR, _CONNECT4, _call(_NETNS_COOKIE)),
    ),
    Feature("the getpeername hook", "5.8", _program(_SOCK_ADDR, _GETPEERNAME4)),
    Feature(
        "bpf_redirect_neigh, by which this node's own packets find their way",
        "5.10",
        _program(_SCHED_CLS, 0, *map(_set, (1, 2, 3, 4), (1, 0, 0, 0)), _call(_REDIRECT_NEIGH)),
    ),
    Feature("the cookie of a network namespace for processes (SO_NETNS_COOKIE)", "5.14", _cookies),
    Feature(
        "bpf_set_retval, by which a connection is refused",
        "5.18",
        _program(_SOCK_ADDR, _CONNECT4, _set(1, -errno.ECONNREFUSED), _call(_SET_RETVAL)),
    ),
    Feature(
        "TCX, by which devices have programs",
        "6.6",
        tcx,
        "filters of tc (clsact) take its place",
    ),
)
"""What the mode needs, the oldest first."""


def lacking(features: Iterable[Feature] = FEATURES) -> tuple[Feature, ...]:
    """Which features this kernel does not have."""
    return tuple(feature for feature in features if not feature.there())
