"""The compiled object: libbpf reads, relocates and loads it.

Before that, BTF (the object's type information) answers two questions. Do the structs of the object
have the fields of layout.py? And do pinned maps have the shape that the object asks for? If not,
migration.py makes new ones. A map knows its own BTF, so that maps of an older version can be read
without that version. Only the outermost fields of a key or value count: those inside of one (an
address) have never changed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, TypeAlias

from steersman.host.bpf_object import OpenedObject
from steersman.host.libbpf import MAP_ATTRIBUTES, library, load_error
from steersman.model.hashes import blake2b
from steersman.modes.ebpf import bpf, layout

FILE = Path(__file__).with_name(f"steersman-{'el' if sys.byteorder == 'little' else 'eb'}.o")
"""The object for this machine; the build creates it (hatch_build.py)."""

BTF_KIND_STRUCT = 4
_MAP_INFO = struct.Struct("=6I16sIIQQ3I")  # the start of struct bpf_map_info
_MAP_INFO_SIZE = 80


class StaleMapsError(Exception):
    """Pinned maps have another shape than those of the object; nothing was loaded."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(f"maps of another shape are pinned: {', '.join(sorted(names))}")
        self.names = names


Fields: TypeAlias = Mapping[str, tuple[int, int]]
"""Offset and size of each field by name; a type that is no struct has one field without name."""


class Shape(NamedTuple):
    """Type, sizes and fields of a map."""

    kind: int
    """BPF_MAP_TYPE_*."""
    key_size: int
    value_size: int
    capacity: int
    flags: int
    key: Fields
    value: Fields

    @classmethod
    def of_map(cls, fd: int) -> Shape:
        """Return the shape of a map in the kernel."""
        values = _MAP_INFO.unpack(bpf.Object(fd).info(_MAP_INFO_SIZE)[: _MAP_INFO.size])
        kind, _, key_size, value_size, capacity, flags = values[:6]
        number, key, value = values[-3:]
        btf = library().btf__load_from_kernel_by_id(number) if number else None
        try:
            types = read_fields(btf, key), read_fields(btf, value)
        finally:
            library().btf__free(btf)
        return cls(kind, key_size, value_size, capacity, flags, *types)

    @classmethod
    def of_object(cls, btf: int, handle: int) -> Shape:
        """Return the shape of a map that an object asks for."""
        attributes = [getattr(library(), f"bpf_map__{name}")(handle) for name in MAP_ATTRIBUTES]
        kind, key, value, capacity, flags, *types = attributes
        return cls(kind, key, value, capacity, flags, *(read_fields(btf, each) for each in types))

    def serves_as(self, other: Shape) -> bool:
        """Whether a map can be used as another one; fields that BTF does not know may differ."""
        return self[:5] == other[:5] and all(
            not mine or not theirs or mine == theirs
            for mine, theirs in ((self.key, other.key), (self.value, other.value))
        )


def read_fields(btf: int | None, number: int) -> dict[str, tuple[int, int]]:
    """Return the fields of a type; none if BTF does not know it."""
    if not btf or not number:
        return {}
    # libbpf has no accessors: read struct btf_type, and the struct btf_member after it.
    number = library().btf__resolve_type(btf, number)
    size = library().btf__resolve_size(btf, number)
    address = library().btf__type_by_id(btf, number)
    _, info, _ = struct.unpack("=III", ctypes.string_at(address, 12))
    if info >> 24 & 0x1F != BTF_KIND_STRUCT:
        return {"": (0, size)}
    out = {}
    for place in range(info & 0xFFFF):
        member = ctypes.string_at(address + 12 + 12 * place, 12)
        text, member_type, bits = struct.unpack("=III", member)
        name = library().btf__name_by_offset(btf, text).decode()
        out[name] = (bits // 8, library().btf__resolve_size(btf, member_type))
    return out


def digest(path: Path = FILE) -> bytes:
    """Return sixteen bytes that identify an object."""
    return blake2b(path.read_bytes(), digest_size=16).digest()


class LoadedObject:
    """The programs and maps of the mode, in the kernel while this is open or they are pinned."""

    def __init__(self, path: Path, pins: Path | None, without: Collection[str] = ()) -> None:
        """Load an object; use the maps that are pinned in `pins`, and pin the others there.

        Pins of maps that only another version has are removed; its programs keep the maps.

        Args:
            path: the compiled object.
            pins: directory in a bpffs; None to pin nothing.
            without: programs that are not needed.

        Raises:
            ObjectError: libbpf or the kernel refused it, or its structs are not ours.
            StaleMapsError: maps of another shape are pinned.
        """
        self.programs: dict[str, int] = {}
        """Descriptors by name."""
        self.maps: dict[str, int] = {}
        """Descriptors by name."""
        try:
            with closing(OpenedObject(path)) as opened:
                check_structs(opened, layout.SIZES, layout.OFFSETS)
                pinned = use_pinned(opened, pins) if pins else frozenset[str]()
                opened.leave_out(without)
                opened.load()
                # Copies, because libbpf's memory is given back, 1 MB.
                for name, fd in opened.descriptors("program").items():
                    if name not in without:
                        self.programs[name] = os.dup(fd)
                for name, fd in opened.descriptors("map").items():
                    if not name.endswith(".rodata"):  # constants
                        self.maps[name] = os.dup(fd)
            for name, fd in self.maps.items():
                if pins and name not in pinned and not name.endswith(".bss"):
                    bpf.Object(fd).pin(pins / name)
        except BaseException:
            self.close()
            raise
        for pin in pins.iterdir() if pins else ():
            if pin.name not in self.maps:
                pin.unlink()

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        for fd in (*self.programs.values(), *self.maps.values()):
            os.close(fd)
        self.programs, self.maps = {}, {}


class BesideObject(OpenedObject):
    """Programs beside those of the mode, whose maps they share.

    Nothing is pinned: when this process ends, however it does, the kernel detaches and frees all.
    """

    def __init__(
        self,
        path: Path,
        maps: Path,
        sizes: Mapping[str, int],
        offsets: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        """Load an object, with the mode's maps where it declares the same ones.

        Args:
            path: the compiled object.
            maps: directory of the mode's pinned maps.
            sizes: of its structs, as Python knows them.
            offsets: of their fields.

        Raises:
            FileNotFoundError: nothing is pinned, or the object is missing.
            ObjectError: libbpf or the kernel refused it, or its structs are not ours.
            StaleMapsError: the mode's maps are those of another version.
        """
        super().__init__(path)
        try:
            check_structs(self, sizes, offsets or {})
            use_pinned(self, maps)
            self.load()
        except BaseException:
            self.close()
            raise
        self.maps = self.descriptors("map")
        """Descriptors by name."""


def explain(error: OSError | StaleMapsError, file: Path) -> str:
    """Say why a BesideObject cannot be loaded from a file, and what to do."""
    if isinstance(error, StaleMapsError):
        return (
            f"the running programs are those of another version of steersman ({error}): use the "
            "same version"
        )
    if isinstance(error, FileNotFoundError) and error.filename == str(file):
        return f"the programs for that are not installed ({file.name} is missing)"
    if isinstance(error, FileNotFoundError):
        return f"the mode's programs are not attached: {error}"
    if error.errno in (errno.EPERM, errno.EACCES):
        return (
            "it needs root (CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN), and a kernel that is not "
            f"locked down for confidentiality: {error}"
        )
    return f"it needs Linux 5.18 with BTF (/sys/kernel/btf/vmlinux): {error}"


def use_pinned(opened: OpenedObject, pins: Path) -> frozenset[str]:
    """Have an object use those of its maps that are pinned; return their names.

    Raises:
        StaleMapsError: some have another shape.
    """
    btf, stale = library().bpf_object__btf(opened.handle), set()
    pinned = frozenset(os.listdir(pins))
    for name, handle in opened.each("map"):
        if name in pinned:
            shared = bpf.Object.pinned(pins / name)
            if not Shape.of_map(shared.fd).serves_as(Shape.of_object(btf, handle)):
                stale.add(name)
            library().bpf_map__reuse_fd(handle, shared.fd)  # libbpf duplicates it
            shared.close()
    if stale:
        raise StaleMapsError(frozenset(stale))
    return pinned


def check_structs(
    opened: OpenedObject, sizes: Mapping[str, int], offsets: Mapping[str, Mapping[str, int]]
) -> None:
    """Compare the structs of an object with those that Python knows.

    Raises:
        ObjectError: one differs.
    """
    if wrong := next(iter(differences(opened.handle, sizes, offsets)), ""):
        raise load_error(
            errno.EINVAL, f"{opened.path} has other structs than this version: {wrong}"
        )


def differences(
    handle: int, sizes: Mapping[str, int], offsets: Mapping[str, Mapping[str, int]]
) -> Iterator[str]:
    """Yield differences between the structs of an object and those that Python knows."""
    btf = library().bpf_object__btf(handle)
    for name, size in sizes.items():
        number = library().btf__find_by_name_kind(btf, name.encode(), BTF_KIND_STRUCT)
        if number < 0:
            yield f"struct {name} is missing"
            continue
        if (found := library().btf__resolve_size(btf, number)) != size:
            yield f"struct {name} has {found} bytes, not {size}"
        members = read_fields(btf, number)
        for member, offset in offsets.get(name, {}).items():
            at, _ = members.get(member, (None, 0))
            if at != offset:
                yield f"{name}.{member} is at {at}, not {offset}"
