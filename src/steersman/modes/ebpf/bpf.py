"""Objects of bpf(2): links, pins, and maps by how they are used: by key, in batches, or as memory.

Commands and structs are those of `union bpf_attr` in linux/bpf.h. Every call raises OSError with
the kernel's errno. The owner of a descriptor, an `Object`, closes it.

A map object serves one thread at a time: its buffers are made once, because a system call takes
less time than to make them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import mmap
import os
import re
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

# System call numbers of bpf(2) and membarrier(2) by machine.
_NUMBERS = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "s390x": 351, "ppc64le": 361}
_MEMBARRIERS = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "s390x": 356, "ppc64le": 365}
_MEMBARRIER_GLOBAL = 1
_GRACE = 0.1  # seconds; no program takes a thousandth of it

# Commands, `enum bpf_cmd`.
MAP_CREATE, MAP_LOOKUP, MAP_UPDATE, MAP_DELETE = 0, 1, 2, 3
OBJ_PIN, OBJ_GET = 6, 7
PROG_GET_FD_BY_ID = 13
OBJ_GET_INFO = 15
RAW_TRACEPOINT_OPEN, BTF_LOAD = 17, 18
MAP_LOOKUP_BATCH, MAP_UPDATE_BATCH, MAP_DELETE_BATCH = 24, 26, 27
LINK_CREATE, LINK_UPDATE, LINK_DETACH = 28, 29, 34

# Attach types, `enum bpf_attach_type`.
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

_LINK_CGROUP = 3  # BPF_LINK_TYPE_CGROUP
_LPM_TRIE = 11  # BPF_MAP_TYPE_LPM_TRIE
_PER_CPU = (5, 6, 10)  # BPF_MAP_TYPE_PERCPU_HASH, _PERCPU_ARRAY, _LRU_PERCPU_HASH
# Size of a batch. From 128 kB on, the C library maps new memory for each buffer, and each page of
# it costs a fault: 2.5 us, as much as to write three entries.
_CHUNK_BYTES = 1 << 16
# Entries for which single calls are as fast as a batch.
_FEW = 4
# Errors of full hashes, and of full tries.
_FULL = (errno.E2BIG, errno.ENOSPC)
# End of the name in struct bpf_map_info; it has 16 bytes.
_NAME_END = 40
# Bytes of an array that are mapped at first.
_FIRST_BYTES = 1 << 16
# Attributes of a call for one element: map, key, value, flags.
_ELEMENT = struct.Struct("=IIQQQ")
# Bytes of them with which a key alone is given.
_TO_KEY = 16
# Attributes of a call for a batch: cursors, keys, values, count, map, flags.
_BATCH = struct.Struct("=QQQQIIQQ")
_COUNT_AT = 32

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


# Cached: a system call takes less time than to compile a struct layout.
_attributes = functools.cache(struct.Struct)


def call(command: int, layout: str, *values: int | bytes) -> int:
    """Call bpf(2) with attributes of a native struct layout without padding ("=...").

    Raises:
        OSError: as `bpf`.
    """
    attributes = ctypes.create_string_buffer(_attributes(layout).pack(*values))
    return bpf(command, attributes, len(attributes) - 1)


def create_map(name: str, attributes: Sequence[int], types: int) -> int:
    """Create a map; return its descriptor.

    Args:
        name: up to 15 bytes.
        attributes: type, sizes of key and value, capacity, flags, and the ids of the types of key
            and value in BTF.
        types: descriptor of that BTF.
    """
    *shape, key, value = attributes
    # Between them: inner map, NUMA node, name, device.
    layout, own = "=7I16sIIII", (0, 0, name.encode(), 0)
    return call(MAP_CREATE, layout, *shape, *own, types, key, value)


def wait_for_programs() -> None:
    """Wait until every program that runs now has ended, and so all that were replaced before.

    membarrier(2) waits for a grace period of RCU, and programs run within one. A kernel with
    tickless CPUs (nohz_full) or a seccomp filter refuses it: then sleep.
    """
    number = _MEMBARRIERS.get(_MACHINE, -1)
    if _libc.syscall(number, _MEMBARRIER_GLOBAL, None, 0):
        time.sleep(_GRACE)


def remove_pins(folder: Path) -> None:
    """Remove a directory of pins and all below it, as far as that is possible.

    `shutil.rmtree` does the same, but brings the compressors of archives: 0.5 MB.
    """
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(place, name))
        with contextlib.suppress(OSError):
            os.rmdir(place)


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

    @property
    def id(self) -> int:
        """The kernel's id of a map or program."""
        _, number = struct.unpack("=II", self.info(8))
        return int(number)

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
        return bool(own == Object(program).id)

    def detach(self) -> None:
        """Detach the program, even if others have the link open."""
        call(LINK_DETACH, "=I", self.fd)

    @property
    def target(self) -> int:
        """Id of the cgroup, or index of the device; 0 if that is gone."""
        kind, _, _, _, target, extra = struct.unpack_from("=IIIIII", self.info(32))
        identity: int = target | extra << 32 if kind == _LINK_CGROUP else target
        return identity


class FullError(OSError):
    """A map has no room left."""


class HashMap(Object):
    """A map that is read and written by key: hashes, tries, per-CPU arrays.

    The value of a per-CPU map is the values of all possible CPUs, each in whole words.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        kind, _, self.key_size, self.value_size, self.capacity, _ = struct.unpack(
            "=6I", self.info(24)
        )
        self._deletes_batches = kind != _LPM_TRIE  # tries: since Linux 5.16
        if kind in _PER_CPU:
            self.value_size = -(-self.value_size // 8) * 8 * possible_cpus()
        self._chunk = max(_CHUNK_BYTES // (self.key_size + self.value_size), 16)
        self._key = ctypes.create_string_buffer(self.key_size)
        self._value = ctypes.create_string_buffer(self.value_size)
        self._element = ctypes.create_string_buffer(_ELEMENT.size)
        _ELEMENT.pack_into(
            self._element, 0, 0, 0, ctypes.addressof(self._key), ctypes.addressof(self._value), 0
        )

    def _call(self, command: int, key: bytes) -> None:
        """Call bpf(2) for an element, with its value in `_value`."""
        # The descriptor is written each time: after `close` it is invalid, as it must be.
        self._key.raw = key
        struct.pack_into("=I", self._element, 0, self.fd)
        size = _TO_KEY if command == MAP_DELETE else _ELEMENT.size
        bpf(command, self._element, size)

    @contextlib.contextmanager
    def _explain_full(self) -> Iterator[None]:
        """Turn the kernel's error for a full map into FullError with the map's name."""
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            name = self.info(_NAME_END)[_NAME_END - 16 :].rstrip(b"\0").decode()
            raise FullError(f"{name} has room for {self.capacity} entries") from error

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key."""
        try:
            self._call(MAP_LOOKUP, key)
        except FileNotFoundError:
            return None
        return self._value.raw

    def put(self, key: bytes, value: bytes) -> None:
        """Set one value; FullError if there is no room."""
        self._value.raw = value
        with self._explain_full():
            self._call(MAP_UPDATE, key)

    def delete(self, key: bytes) -> bool:
        """Delete a key; return whether it was there."""
        try:
            self._call(MAP_DELETE, key)
        except FileNotFoundError:
            return False
        return True

    def put_all(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Set many values, in few calls; FullError if there is no room for all."""
        rest = iter(items)
        while pairs := list(itertools.islice(rest, self._chunk)):
            if len(pairs) < _FEW:
                for key, value in pairs:
                    self.put(key, value)
                return
            keys, values = zip(*pairs, strict=True)
            with self._explain_full():
                self._write_batch(MAP_UPDATE_BATCH, keys, values)

    def delete_all(self, keys: Iterable[bytes]) -> int:
        """Delete keys; return how many of them were there."""
        left = list(keys)
        if len(left) < _FEW or not self._deletes_batches:
            return sum(map(self.delete, left))
        deleted = 0
        while left:
            done = self._write_batch(MAP_DELETE_BATCH, left)
            deleted += done
            del left[: done + 1]  # the kernel stops at a key that is not there
        return deleted

    def _write_batch(
        self, command: int, keys: Collection[bytes], values: Iterable[bytes] = ()
    ) -> int:
        """Return how many keys were written until the first that is not there."""
        key_buffer = ctypes.create_string_buffer(b"".join(keys))
        value_buffer = ctypes.create_string_buffer(b"".join(values)) if values else None
        attributes = ctypes.create_string_buffer(
            _BATCH.pack(
                *(0, 0, ctypes.addressof(key_buffer)),
                ctypes.addressof(value_buffer) if value_buffer else 0,
                *(len(keys), self.fd, 0, 0),
            )
        )
        with contextlib.suppress(FileNotFoundError):
            bpf(command, attributes, _BATCH.size)
        (count,) = struct.unpack_from("=I", attributes, _COUNT_AT)
        return int(count)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield every key and value of a hash, read in batches."""
        chunk, cursor = self._chunk, b""
        while True:
            try:
                keys, values, cursor, last = self._read_batch(chunk, cursor)
            except OSError as error:
                if error.errno != errno.ENOSPC:  # a bucket that holds more than a chunk
                    raise
                chunk *= 2
                continue
            yield from zip(_cut(keys, self.key_size), _cut(values, self.value_size), strict=True)
            if last:
                return

    def _read_batch(self, chunk: int, cursor: bytes) -> tuple[bytes, bytes, bytes, bool]:
        """Return keys, values, the next cursor, and whether this was the last batch."""
        keys = ctypes.create_string_buffer(chunk * self.key_size)
        values = ctypes.create_string_buffer(chunk * self.value_size)
        size = max(self.key_size, 4)
        start = ctypes.create_string_buffer(cursor, size)
        end = ctypes.create_string_buffer(size)
        attributes = ctypes.create_string_buffer(
            _BATCH.pack(
                ctypes.addressof(start) if cursor else 0,
                *(ctypes.addressof(each) for each in (end, keys, values)),
                *(chunk, self.fd, 0, 0),
            )
        )
        last = False
        try:
            bpf(MAP_LOOKUP_BATCH, attributes, _BATCH.size)
        except FileNotFoundError:
            last = True
        # The kernel has replaced the chunk size by the number of entries.
        (count,) = struct.unpack_from("=I", attributes, _COUNT_AT)
        return (
            keys.raw[: count * self.key_size],
            values.raw[: count * self.value_size],
            end.raw,
            last,
        )


class SumMap(HashMap):
    """A hash or array of 64-bit counters per CPU."""

    def sums(self) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """Yield keys of a hash, and their counters summed over all CPUs."""
        count = self.value_size // 8 // possible_cpus()
        for key, value in self.items():
            numbers = memoryview(value).cast("Q")
            yield key, tuple(sum(numbers[n::count]) for n in range(count))

    def sum(self, key: bytes) -> int:
        """Return a single counter summed over all CPUs; 0 if the key is not there."""
        return sum(memoryview(self.get(key) or b"").cast("Q"))


class ArrayMap(Object):
    """An array of records, mapped into memory: writing needs no system call.

    Only the part that has been used is mapped, as all of it would count as the process's memory.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        _, _, _, self.value_size, self.capacity, _ = struct.unpack("=6I", self.info(24))
        if self.value_size % 8:
            raise ValueError("records of a mapped array are whole words")
        self._map(_FIRST_BYTES)

    def _map(self, size: int) -> None:
        """Map the first bytes, in whole pages."""
        pages = -(-min(size, self.value_size * self.capacity) // mmap.PAGESIZE)
        self.memory = memoryview(mmap.mmap(self.fd, pages * mmap.PAGESIZE))
        self.words = self.memory.cast("Q")
        """Programs see either the old or the new value of a word."""

    def whole(self) -> memoryview:
        """Map everything."""
        self._reach(self.value_size * self.capacity)
        return self.memory

    def _reach(self, end: int) -> None:
        """Map everything up to a byte."""
        if end > len(self.memory):
            self._map(max(end, 5 * len(self.memory) // 4))

    def read(self, index: int, count: int = 1) -> bytes:
        """Return records from an index on."""
        start, end = index * self.value_size, (index + count) * self.value_size
        self._reach(end)
        return bytes(self.memory[start:end])

    def write(self, index: int, records: bytes) -> None:
        """Set records from an index on; no program may be reading them."""
        start = index * self.value_size
        self._reach(start + len(records))
        self.memory[start : start + len(records)] = records

    def store(self, index: int, field: int, value: bytes) -> None:
        """Set the word of a record that begins at byte `field`, in one store."""
        place = (index * self.value_size + field) // 8
        self._reach((place + 1) * 8)
        (self.words[place],) = struct.unpack("=Q", value)


def _cut(data: bytes, size: int) -> Iterator[bytes]:
    return (data[place : place + size] for place in range(0, len(data), size))


@functools.cache
def possible_cpus() -> int:
    """Count the CPUs of per-CPU values: all that could be plugged in."""
    text = Path("/sys/devices/system/cpu/possible").read_text()
    return int(re.findall(r"\d+", text)[-1]) + 1
