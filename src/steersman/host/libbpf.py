"""libbpf (libbpf.so.1, Debian package libbpf1), called by ctypes. Every bpf(2) goes through it."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
from collections.abc import Mapping

# Lines of libbpf's messages in an error.
_LINES = 40
_Pointer = ctypes.c_void_p
_INSTRUCTION = struct.Struct("=BBhi")  # struct bpf_insn: code, registers, offset, immediate
_PRINT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
SAMPLE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
"""What a ring buffer calls for each record: a context, its address and size."""


MAP_ATTRIBUTES = (
    *("type", "key_size", "value_size", "max_entries", "map_flags"),
    *("btf_key_type_id", "btf_value_type_id"),
)
"""What an object asks for in a map."""
# Result and arguments of the functions that we call.
_FUNCTIONS: Mapping[str, tuple[object, tuple[object, ...]]] = {
    "bpf_map_create": (
        ctypes.c_int,
        (*(ctypes.c_int, ctypes.c_char_p), *(ctypes.c_uint32,) * 3, _Pointer),
    ),
    "bpf_map_lookup_elem": (ctypes.c_int, (ctypes.c_int, _Pointer, _Pointer)),
    "bpf_map_update_elem": (ctypes.c_int, (ctypes.c_int, _Pointer, _Pointer, ctypes.c_uint64)),
    "bpf_map_delete_elem": (ctypes.c_int, (ctypes.c_int, _Pointer)),
    "bpf_map_lookup_batch": (ctypes.c_int, (ctypes.c_int, *(_Pointer,) * 6)),
    "bpf_map_update_batch": (ctypes.c_int, (ctypes.c_int, *(_Pointer,) * 4)),
    "bpf_map_delete_batch": (ctypes.c_int, (ctypes.c_int, *(_Pointer,) * 3)),
    "bpf_obj_pin": (ctypes.c_int, (ctypes.c_int, ctypes.c_char_p)),
    "bpf_obj_get": (ctypes.c_int, (ctypes.c_char_p,)),
    "bpf_obj_get_info_by_fd": (ctypes.c_int, (ctypes.c_int, _Pointer, _Pointer)),
    "bpf_prog_load": (
        ctypes.c_int,
        (ctypes.c_int, *(ctypes.c_char_p,) * 3, ctypes.c_size_t, _Pointer),
    ),
    "bpf_prog_get_fd_by_id": (ctypes.c_int, (ctypes.c_uint32,)),
    "bpf_prog_test_run_opts": (ctypes.c_int, (ctypes.c_int, _Pointer)),
    "bpf_raw_tracepoint_open": (ctypes.c_int, (ctypes.c_char_p, ctypes.c_int)),
    "bpf_link_create": (ctypes.c_int, (*(ctypes.c_int,) * 3, _Pointer)),
    "bpf_link_update": (ctypes.c_int, (ctypes.c_int, ctypes.c_int, _Pointer)),
    "bpf_link_detach": (ctypes.c_int, (ctypes.c_int,)),
    "bpf_object__open_mem": (_Pointer, (ctypes.c_char_p, ctypes.c_size_t, _Pointer)),
    "bpf_object__load": (ctypes.c_int, (_Pointer,)),
    "bpf_object__close": (None, (_Pointer,)),
    "bpf_object__btf": (_Pointer, (_Pointer,)),
    "bpf_object__next_program": (_Pointer, (_Pointer, _Pointer)),
    "bpf_object__next_map": (_Pointer, (_Pointer, _Pointer)),
    "bpf_program__name": (ctypes.c_char_p, (_Pointer,)),
    "bpf_program__fd": (ctypes.c_int, (_Pointer,)),
    "bpf_program__set_autoload": (ctypes.c_int, (_Pointer, ctypes.c_bool)),
    "bpf_map__name": (ctypes.c_char_p, (_Pointer,)),
    "bpf_map__fd": (ctypes.c_int, (_Pointer,)),
    **{f"bpf_map__{attribute}": (ctypes.c_uint32, (_Pointer,)) for attribute in MAP_ATTRIBUTES},
    "bpf_map__reuse_fd": (ctypes.c_int, (_Pointer, ctypes.c_int)),
    "ring_buffer__new": (_Pointer, (ctypes.c_int, SAMPLE, _Pointer, _Pointer)),
    "ring_buffer__epoll_fd": (ctypes.c_int, (_Pointer,)),
    "ring_buffer__consume": (ctypes.c_int, (_Pointer,)),
    "ring_buffer__free": (None, (_Pointer,)),
    "btf__find_by_name_kind": (ctypes.c_int, (_Pointer, ctypes.c_char_p, ctypes.c_uint32)),
    "btf__type_by_id": (_Pointer, (_Pointer, ctypes.c_uint32)),
    "btf__resolve_type": (ctypes.c_int, (_Pointer, ctypes.c_uint32)),
    "btf__resolve_size": (ctypes.c_int64, (_Pointer, ctypes.c_uint32)),
    "btf__load_from_kernel_by_id": (_Pointer, (ctypes.c_uint32,)),
    "btf__load_vmlinux_btf": (_Pointer, ()),
    "btf__raw_data": (_Pointer, (_Pointer, ctypes.POINTER(ctypes.c_uint32))),
    "btf__free": (None, (_Pointer,)),
    "btf__name_by_offset": (ctypes.c_char_p, (_Pointer, ctypes.c_uint32)),
    "libbpf_set_print": (_Pointer, (_PRINT,)),
}


@functools.cache
def library() -> ctypes.CDLL:
    """Load libbpf; OSError if it is not installed."""
    loaded = ctypes.CDLL("libbpf.so.1", use_errno=True)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    loaded.libbpf_set_print(_callback)
    return loaded


def call(name: str, *arguments: object) -> int:
    """Call a function of libbpf that returns a negative errno if it fails.

    Raises:
        OSError: it failed, or libbpf is not installed.
    """
    result: int = getattr(library(), name)(*arguments)
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


class _LoadOptions(ctypes.Structure):
    """The part of `struct bpf_prog_load_opts` that we set."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("attempts", ctypes.c_int),
        ("attach_type", ctypes.c_int),
    )


def load_program(kind: int, attach_type: int, code: bytes) -> int:
    """Load a program of a few instructions; return its descriptor.

    Args:
        kind: BPF_PROG_TYPE_*.
        attach_type: expected attach type, 0 if the kind has none.
        code: what `instruction` has returned, joined.
    """
    options = _LoadOptions(ctypes.sizeof(_LoadOptions), 0, attach_type)
    count = len(code) // _INSTRUCTION.size
    return call("bpf_prog_load", kind, None, b"GPL", code, count, ctypes.byref(options))


def instruction(code: int, to: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    """Return an instruction in the byte order of this machine: its code, registers and operands."""
    low, high = (to, source) if sys.byteorder == "little" else (source, to)
    return _INSTRUCTION.pack(code, high << 4 | low, offset, value)


_warnings: list[str] = []


def _keep_warning(level: int, text: int, arguments: int) -> int:
    """Keep warnings for an error message; libbpf writes to stderr otherwise."""
    if level == 0:
        buffer = ctypes.create_string_buffer(1 << 16)
        vsnprintf = ctypes.CDLL(None).vsnprintf  # not at import: Windows has no libc
        vsnprintf.argtypes = (ctypes.c_char_p, ctypes.c_size_t, _Pointer, _Pointer)
        vsnprintf(buffer, len(buffer), text, arguments)
        _warnings.append(buffer.value.decode(errors="replace"))
    return 0


_callback = _PRINT(_keep_warning)  # a global, because libbpf keeps a pointer to it


class ObjectError(OSError):
    """The object cannot be loaded; the text has the messages of libbpf and the verifier."""


def forget_warnings() -> None:
    """Forget, and collect from now on, what `load_error` shows."""
    _warnings.clear()


def load_error(code: int, problem: str) -> ObjectError:
    """Return an error with the last messages of libbpf and the verifier."""
    messages = "".join(_warnings).splitlines()[-_LINES:]
    return ObjectError(code, "\n".join([f"{problem}: {os.strerror(code)}", *messages]))
