"""The compiled object: libbpf reads, relocates and loads it; its structs are compared with ours.

libbpf (libbpf.so.1, Debian package libbpf1) is called by ctypes; all else is bpf.py.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from steersman.modes.ebpf import layout

FILE = Path(__file__).with_name(f"steersman-{'el' if sys.byteorder == 'little' else 'eb'}.o")
"""The object for this machine; the build makes it (hatch_build.py)."""

_STRUCT = 4  # BTF_KIND_STRUCT
_LINES = 40  # of libbpf's words, in an error
_Pointer = ctypes.c_void_p
_PRINT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _OpenOptions(ctypes.Structure):
    """The part of `struct bpf_object_open_opts` that we set."""

    _fields_ = (("size", ctypes.c_size_t), ("object_name", ctypes.c_char_p))


_FUNCTIONS: Mapping[str, tuple[object, tuple[object, ...]]] = {
    "bpf_object__open_mem": (_Pointer, (ctypes.c_char_p, ctypes.c_size_t, _Pointer)),
    "bpf_object__load": (ctypes.c_int, (_Pointer,)),
    "bpf_object__close": (None, (_Pointer,)),
    "bpf_object__btf": (_Pointer, (_Pointer,)),
    "bpf_object__next_program": (_Pointer, (_Pointer, _Pointer)),
    "bpf_object__next_map": (_Pointer, (_Pointer, _Pointer)),
    "bpf_program__name": (ctypes.c_char_p, (_Pointer,)),
    "bpf_program__fd": (ctypes.c_int, (_Pointer,)),
    "bpf_map__name": (ctypes.c_char_p, (_Pointer,)),
    "bpf_map__fd": (ctypes.c_int, (_Pointer,)),
    "bpf_map__set_pin_path": (ctypes.c_int, (_Pointer, ctypes.c_char_p)),
    "btf__find_by_name_kind": (ctypes.c_int, (_Pointer, ctypes.c_char_p, ctypes.c_uint32)),
    "btf__type_by_id": (_Pointer, (_Pointer, ctypes.c_uint32)),
    "btf__name_by_offset": (ctypes.c_char_p, (_Pointer, ctypes.c_uint32)),
    "libbpf_set_print": (_Pointer, (_PRINT,)),
}
"""Result and arguments of what we call."""


@functools.cache
def library() -> ctypes.CDLL:
    """Load libbpf; OSError where it is not installed."""
    loaded = ctypes.CDLL("libbpf.so.1", use_errno=True)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    loaded.libbpf_set_print(_callback)
    return loaded


_said: list[str] = []
_libc = ctypes.CDLL(None)
_libc.vsnprintf.argtypes = (ctypes.c_char_p, ctypes.c_size_t, _Pointer, _Pointer)


def _listen(level: int, text: int, arguments: int) -> int:
    """Keep warnings for an error message; libbpf writes to stderr otherwise."""
    if level == 0:
        buffer = ctypes.create_string_buffer(1 << 16)
        _libc.vsnprintf(buffer, len(buffer), text, arguments)
        _said.append(buffer.value.decode(errors="replace"))
    return 0


_callback = _PRINT(_listen)  # kept, for libbpf keeps a pointer to it


class ObjectError(OSError):
    """The object cannot be loaded; the text has what libbpf and the verifier said."""


def digest(path: Path = FILE) -> bytes:
    """Sixteen bytes that tell objects apart."""
    return hashlib.blake2b(path.read_bytes(), digest_size=16).digest()


class LoadedObject:
    """The programs and maps of an object, in the kernel while this is open or they are pinned."""

    def __init__(self, path: Path, pins: Path | None) -> None:
        """Load an object; maps that are pinned in `pins` are taken over, others are pinned there.

        Raises:
            ObjectError: libbpf or the kernel refused it, or its structs are not ours.
        """
        self._library = library()
        data = path.read_bytes()
        options = _OpenOptions(ctypes.sizeof(_OpenOptions), b"steersman")
        _said.clear()
        self._object = self._library.bpf_object__open_mem(data, len(data), ctypes.byref(options))
        if not self._object:
            raise _error(ctypes.get_errno(), f"{path} is no BPF object")
        try:
            self._prepare(path, pins)
        except BaseException:
            self.close()
            raise
        self.programs = self._descriptors("program")
        """Descriptors by name."""
        self.maps = self._descriptors("map")

    def _prepare(self, path: Path, pins: Path | None) -> None:
        if wrong := list(differences(self._library, self._object)):
            raise _error(errno.EINVAL, f"{path} has other structs than this version: {wrong[0]}")
        for name, handle in self._each("map"):
            if pins and not name.startswith((".", "steersma")):
                self._library.bpf_map__set_pin_path(handle, os.fsencode(pins / name))
        failed = self._library.bpf_object__load(self._object)
        if failed:
            raise _error(-failed, f"the kernel does not load {path}")

    def _each(self, kind: str) -> Iterator[tuple[str, int]]:
        next_one = getattr(self._library, f"bpf_object__next_{kind}")
        name_of = getattr(self._library, f"bpf_{kind}__name")
        handle = next_one(self._object, None)
        while handle:
            yield name_of(handle).decode(), handle
            handle = next_one(self._object, handle)

    def _descriptors(self, kind: str) -> dict[str, int]:
        fd_of = getattr(self._library, f"bpf_{kind}__fd")
        return {name: fd_of(handle) for name, handle in self._each(kind)}

    def close(self) -> None:
        """Close every descriptor; twice is once."""
        if self._object:
            self._library.bpf_object__close(self._object)
            self._object = None


def _error(code: int, what: str) -> ObjectError:
    said = "".join(_said).splitlines()[-_LINES:]
    return ObjectError(code, "\n".join([f"{what}: {os.strerror(code)}", *said]))


def differences(library: ctypes.CDLL, handle: int) -> Iterator[str]:
    """Where the structs of an object are not those of layout.py."""
    btf = library.bpf_object__btf(handle)
    for name, size in layout.SIZES.items():
        found = _struct(library, btf, name)
        if found is None:
            yield f"struct {name} is missing"
        elif found[0] != size:
            yield f"struct {name} has {found[0]} bytes, not {size}"
        else:
            yield from _moved(name, found[1])


def _moved(name: str, members: Mapping[str, int]) -> Iterator[str]:
    for member, offset in layout.OFFSETS.get(name, {}).items():
        if members.get(member) != offset:
            yield f"{name}.{member} is at {members.get(member)}, not {offset}"


def _struct(library: ctypes.CDLL, btf: int, name: str) -> tuple[int, dict[str, int]] | None:
    """Size and offsets of a struct, of `struct btf_type` and the `struct btf_member`s behind it."""
    number = library.btf__find_by_name_kind(btf, name.encode(), _STRUCT)
    if number < 0:
        return None
    address = library.btf__type_by_id(btf, number)
    _, kind, size = struct.unpack("=III", ctypes.string_at(address, 12))
    members = {}
    for place in range(kind & 0xFFFF):
        data = ctypes.string_at(address + 12 + 12 * place, 12)
        text, _, bits = struct.unpack("=III", data)
        members[library.btf__name_by_offset(btf, text).decode()] = bits // 8
    return size, members
