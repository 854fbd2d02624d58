"""Shapes of maps: what their keys and values are made of, as BTF says; and from one to another.

Only the outermost fields count: those inside of one (an address) have never changed. A map knows
its own BTF, so that what an older version has pinned can be read without knowing that version.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from steersman.modes.ebpf import bpf, layout

_STRUCT = 4  # BTF_KIND_STRUCT
_INFO = struct.Struct("=6I16sIIQQ3I")  # the start of struct bpf_map_info
_NUMBER = 8  # bytes; what is longer is no number

Fields: TypeAlias = Mapping[str, tuple[int, int]]
"""Offset and size of each field by name; one without name for what is no struct."""
Convert: TypeAlias = Callable[[bytes], bytes]


class Shape(NamedTuple):
    """What a map is."""

    kind: int
    """BPF_MAP_TYPE_*."""
    key_size: int
    value_size: int
    capacity: int
    flags: int
    key: Fields
    value: Fields


def of_pinned(library: ctypes.CDLL, fd: int) -> Shape:
    """The shape of a map that the kernel has."""
    values = _INFO.unpack(bpf.Object(fd).info(80)[: _INFO.size])
    kind, _, key_size, value_size, capacity, flags = values[:6]
    number, key, value = values[-3:]
    btf = library.btf__load_from_kernel_by_id(number) if number else None
    try:
        types = fields(library, btf, key), fields(library, btf, value)
    finally:
        library.btf__free(btf)
    return Shape(kind, key_size, value_size, capacity, flags, *types)


def of_object(library: ctypes.CDLL, btf: int, handle: int) -> Shape:
    """The shape of a map that an object asks for."""

    def ask(what: str) -> int:
        number: int = getattr(library, f"bpf_map__{what}")(handle)
        return number

    return Shape(
        *(ask("type"), ask("key_size"), ask("value_size"), ask("max_entries"), ask("map_flags")),
        fields(library, btf, ask("btf_key_type_id")),
        fields(library, btf, ask("btf_value_type_id")),
    )


def fields(library: ctypes.CDLL, btf: int | None, number: int) -> dict[str, tuple[int, int]]:
    """Fields of a type; none where BTF does not say."""
    if not btf or not number:
        return {}
    number = library.btf__resolve_type(btf, number)
    size = library.btf__resolve_size(btf, number)
    address = library.btf__type_by_id(btf, number)
    _, kind, _ = struct.unpack("=III", ctypes.string_at(address, 12))
    if kind >> 24 & 0x1F != _STRUCT:
        return {"": (0, size)}
    out = {}
    for place in range(kind & 0xFFFF):
        member = ctypes.string_at(address + 12 + 12 * place, 12)
        text, each, bits = struct.unpack("=III", member)
        name = library.btf__name_by_offset(btf, text).decode()
        out[name] = (bits // 8, library.btf__resolve_size(btf, each))
    return out


def same(a: Shape, b: Shape) -> bool:
    """Whether one map can be used as the other; what BTF does not say is no difference."""
    return a[:5] == b[:5] and all(
        not x or not y or x == y for x, y in zip(a[5:], b[5:], strict=True)
    )


def converter(old: Fields, new: Fields, size: int) -> Convert:
    """A function that rewrites records field by field, by name; what is new is zero.

    Args:
        old: fields of what it is given.
        new: fields of what it returns.
        size: bytes of what it returns.
    """
    shared = [(*old[name], *new[name]) for name in new if name in old]

    def convert(record: bytes) -> bytes:
        out = bytearray(size)
        for place, length, to, room in shared:
            out[to : to + room] = _resized(record[place : place + length], room)
        return bytes(out)

    return convert


def _resized(value: bytes, room: int) -> bytes:
    """A field in another size: a number keeps its value, of anything else the start stays."""
    if len(value) == room:
        return value
    if max(len(value), room) > _NUMBER:
        return value[:room].ljust(room, b"\0")
    number = int.from_bytes(value, layout.BYTE_ORDER) % (1 << 8 * room)
    return number.to_bytes(room, layout.BYTE_ORDER)
