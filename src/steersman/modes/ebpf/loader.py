"""The compiled object: libbpf reads, relocates and loads it; its structs are compared with ours.

libbpf (libbpf.so.1, Debian package libbpf1) is called by ctypes; all else is bpf.py.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from steersman.modes.ebpf import bpf, layout, shapes

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
    **{
        f"bpf_map__{what}": (ctypes.c_uint32, (_Pointer,))
        for what in (
            *("type", "key_size", "value_size", "max_entries", "map_flags"),
            *("btf_key_type_id", "btf_value_type_id"),
        )
    },
    "bpf_map__set_pin_path": (ctypes.c_int, (_Pointer, ctypes.c_char_p)),
    "btf__find_by_name_kind": (ctypes.c_int, (_Pointer, ctypes.c_char_p, ctypes.c_uint32)),
    "btf__type_by_id": (_Pointer, (_Pointer, ctypes.c_uint32)),
    "btf__resolve_type": (ctypes.c_int, (_Pointer, ctypes.c_uint32)),
    "btf__resolve_size": (ctypes.c_int64, (_Pointer, ctypes.c_uint32)),
    "btf__load_from_kernel_by_id": (_Pointer, (ctypes.c_uint32,)),
    "btf__free": (None, (_Pointer,)),
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


class StaleMapsError(Exception):
    """Pinned maps have another shape than those of the object; nothing was loaded."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(f"maps of another shape are pinned: {', '.join(sorted(names))}")
        self.names = names


def digest(path: Path = FILE) -> bytes:
    """Sixteen bytes that tell objects apart."""
    return hashlib.blake2b(path.read_bytes(), digest_size=16).digest()


class LoadedObject:
    """The programs and maps of an object, in the kernel while this is open or they are pinned."""

    def __init__(self, path: Path, pins: Path | None) -> None:
        """Load an object; maps that are pinned in `pins` are taken over, others are pinned there.

        Raises:
            ObjectError: libbpf or the kernel refused it, or its structs are not ours.
            StaleMapsError: maps of another shape are pinned.
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
        if pins:
            self._pin(pins)
        failed = self._library.bpf_object__load(self._object)
        if failed:
            raise _error(-failed, f"the kernel does not load {path}")

    def _pin(self, pins: Path) -> None:
        btf, stale = self._library.bpf_object__btf(self._object), set()
        for name, handle in self._each("map"):
            if name.startswith((".", "steersma")):  # of the compiler
                continue
            self._library.bpf_map__set_pin_path(handle, os.fsencode(pins / name))
            if (pins / name).exists():
                pinned = bpf.Object.pinned(pins / name)
                found = shapes.of_pinned(self._library, pinned.fd)
                pinned.close()
                if not shapes.same(found, shapes.of_object(self._library, btf, handle)):
                    stale.add(name)
        if stale:
            raise StaleMapsError(frozenset(stale))

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
        number = library.btf__find_by_name_kind(btf, name.encode(), _STRUCT)
        if number < 0:
            yield f"struct {name} is missing"
        elif (found := library.btf__resolve_size(btf, number)) != size:
            yield f"struct {name} has {found} bytes, not {size}"
        else:
            yield from _moved(name, shapes.fields(library, btf, number))


def _moved(name: str, members: shapes.Fields) -> Iterator[str]:
    for member, offset in layout.OFFSETS.get(name, {}).items():
        found, _ = members.get(member, (None, 0))
        if found != offset:
            yield f"{name}.{member} is at {found}, not {offset}"
