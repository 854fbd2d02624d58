"""Objects of bpf(2): links, pins, and maps by how they are used: by key, in batches, or as memory.

Every call raises OSError with the kernel's errno. The owner of a descriptor, an `Object`, closes
it.

An object serves one thread only, that of the mode: also because a map's buffer for a value is made
once, as a system call takes less time than to make it.
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
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from steersman.host.libbpf import call
from steersman.host.threads import OfOneThread

# Attach types, `enum bpf_attach_type`.
XDP = 37
TCX_INGRESS, TCX_EGRESS = 46, 47
_BEFORE = 1 << 3  # BPF_F_BEFORE
_LINK_OPTIONS = struct.Struct("=QI4x")  # struct bpf_link_create_opts: its size, flags
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
_ARRAY, _ARRAY_OF_MAPS = 2, 12


class _MapOptions(ctypes.Structure):
    """The part of `struct bpf_map_create_opts` that we set."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        *((name, ctypes.c_uint32) for name in ("btf_fd", "key_type", "value_type", "struct_ops")),
        ("inner_map_fd", ctypes.c_uint32),
    )


def _create_map(shape: tuple[int, int, int, int], inner: int = 0) -> int:
    """Create a map without a name; return its descriptor.

    Args:
        shape: type, sizes of key and value, capacity.
        inner: descriptor of a map like those that an array of maps holds.
    """
    options = _MapOptions(ctypes.sizeof(_MapOptions), 0, 0, 0, 0, inner)
    kind, *sizes = shape
    return call("bpf_map_create", kind, None, *sizes, ctypes.byref(options))


def wait_for_programs() -> None:
    """Wait until every program that runs now has ended, and so all that were replaced before.

    The kernel does so when an array of maps is written: who writes it may rely on that no program
    uses the old element any more.
    """
    inner = Object(_create_map((_ARRAY, 4, 4, 1)))
    outer = Object(_create_map((_ARRAY_OF_MAPS, 4, 4, 1), inner=inner.fd))
    try:
        call("bpf_map_update_elem", outer.fd, bytes(4), inner.fd.to_bytes(4, sys.byteorder), 0)
    finally:
        inner.close()
        outer.close()


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


class Object(OfOneThread):
    """A descriptor of a map, program or link."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def pinned(cls, path: Path) -> Self:
        """Open a pinned object; FileNotFoundError if there is none."""
        return cls(call("bpf_obj_get", os.fsencode(path)))

    def _call(self, name: str, *arguments: object) -> int:
        """Call a function of libbpf that takes the descriptor first."""
        self._use()
        return call(name, self.fd, *arguments)

    def pin(self, path: Path) -> None:
        """Pin at a path of a bpffs."""
        self._call("bpf_obj_pin", os.fsencode(path))

    def info(self, size: int) -> bytes:
        """Return the kernel's `bpf_*_info`, up to `size` bytes."""
        buffer = ctypes.create_string_buffer(size)
        self._call("bpf_obj_get_info_by_fd", buffer, ctypes.byref(ctypes.c_uint32(size)))
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
        """Attach a program to a cgroup (by descriptor) or a device (by index).

        On a device it comes before those that are there (TCX): such as Cilium's may accept a
        packet, and those behind them do not see it.
        """
        first = attach_type in (TCX_INGRESS, TCX_EGRESS)
        options = _LINK_OPTIONS.pack(_LINK_OPTIONS.size, _BEFORE) if first else None
        return cls(call("bpf_link_create", program, target, attach_type, options))

    def replace(self, program: int) -> None:
        """Replace the program atomically: each packet or socket sees one or the other."""
        self._call("bpf_link_update", program, None)

    def has(self, program: int) -> bool:
        """Whether this program (by descriptor) is the attached one."""
        _, _, own = struct.unpack_from("=III", self.info(32))
        return bool(own == Object(program).id)

    def detach(self) -> None:
        """Detach the program, even if others have the link open."""
        self._call("bpf_link_detach")

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
        self._value = ctypes.create_string_buffer(self.value_size)

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
            self._call("bpf_map_lookup_elem", key, self._value)
        except FileNotFoundError:
            return None
        return self._value.raw

    def put(self, key: bytes, value: bytes) -> None:
        """Set one value; FullError if there is no room."""
        with self._explain_full():
            self._call("bpf_map_update_elem", key, value, 0)

    def delete(self, key: bytes) -> bool:
        """Delete a key; return whether it was there."""
        try:
            self._call("bpf_map_delete_elem", key)
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
            count = ctypes.c_uint32(len(pairs))
            packed = b"".join(keys), b"".join(values)
            with self._explain_full():
                self._call("bpf_map_update_batch", *packed, ctypes.byref(count), None)

    def delete_all(self, keys: Iterable[bytes]) -> int:
        """Delete keys; return how many of them were there."""
        left = list(keys)
        if len(left) < _FEW or not self._deletes_batches:
            return sum(map(self.delete, left))
        deleted = 0
        while left:
            count = ctypes.c_uint32(len(left))
            with contextlib.suppress(FileNotFoundError):
                self._call("bpf_map_delete_batch", b"".join(left), ctypes.byref(count), None)
            deleted += count.value
            del left[: count.value + 1]  # the kernel stops at a key that is not there
        return deleted

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield every key and value of a hash, read in batches."""
        return itertools.chain.from_iterable(self.batches())

    def batches(self) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield the keys and values of a hash as they are read, some hundred at a time."""
        chunk, cursor = self._chunk, b""
        while True:
            try:
                keys, values, cursor, last = self._read_batch(chunk, cursor)
            except OSError as error:
                if error.errno != errno.ENOSPC:  # a bucket that holds more than a chunk
                    raise
                chunk *= 2
                continue
            yield list(zip(_cut(keys, self.key_size), _cut(values, self.value_size), strict=True))
            if last:
                return

    def _read_batch(self, chunk: int, cursor: bytes) -> tuple[bytes, bytes, bytes, bool]:
        """Return keys, values, the next cursor, and whether this was the last batch."""
        keys = ctypes.create_string_buffer(chunk * self.key_size)
        values = ctypes.create_string_buffer(chunk * self.value_size)
        size = max(self.key_size, 4)
        end = ctypes.create_string_buffer(size)
        count, last = ctypes.c_uint32(chunk), False
        buffers = cursor or None, end, keys, values, ctypes.byref(count)
        try:
            self._call("bpf_map_lookup_batch", *buffers, None)
        except FileNotFoundError:
            last = True
        # The kernel has replaced the chunk size by the number of entries.
        return (
            keys.raw[: count.value * self.key_size],
            values.raw[: count.value * self.value_size],
            end.raw,
            last,
        )


class SumMap(HashMap):
    """A hash or array of 64-bit counters per CPU."""

    def sums(self) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """Yield keys of a hash, and their counters summed over all CPUs."""
        return ((key, self.total(value)) for key, value in self.items())

    def total(self, value: bytes) -> tuple[int, ...]:
        """Return the counters of a value summed over all CPUs."""
        count = self.value_size // 8 // possible_cpus()
        numbers = memoryview(value).cast("Q")
        return tuple(sum(numbers[n::count]) for n in range(count))

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
