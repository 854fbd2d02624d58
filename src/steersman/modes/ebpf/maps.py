"""BPF maps, typed by how they are used: by key, in batches, or as memory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from steersman.modes.ebpf import bpf
from steersman.modes.ebpf.slots import FullError

_CHUNK_BYTES = 1 << 18
"""Room for a batch that is read."""
_FULL = (errno.E2BIG, errno.ENOSPC)
"""Of hashes, and of tries."""
_NAME_END = 40
"""Where the name ends in struct bpf_map_info; it has 16 bytes."""
_FIRST_BYTES = 1 << 20
"""Of an array, mapped at once."""


class HashMap(bpf.Object):
    """A map that is read and written by key: hashes, tries, per-CPU arrays."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        info = struct.unpack_from("=6I", self.info(88))
        self.key_size, self.value_size, self.capacity = info[2], info[3], info[4]

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Say which map is full, instead of what the kernel says."""
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            name = self.info(_NAME_END)[_NAME_END - 16 :].rstrip(b"\0").decode()
            raise FullError(f"{name} has room for {self.capacity} entries") from error

    def get(self, key: bytes, size: int = 0) -> bytes | None:
        """Value of a key (of `size` bytes where that is not the map's own, as for per-CPU ones)."""
        keys = ctypes.create_string_buffer(key, len(key))
        value = ctypes.create_string_buffer(size or self.value_size)
        at = (ctypes.addressof(keys), ctypes.addressof(value))
        try:
            bpf.call(bpf.MAP_LOOKUP, "IIQQQ", self.fd, 0, *at, 0)
        except FileNotFoundError:
            return None
        return value.raw

    def put(self, key: bytes, value: bytes) -> None:
        """Set one value."""
        keys = ctypes.create_string_buffer(key, len(key))
        values = ctypes.create_string_buffer(value, len(value))
        at = (ctypes.addressof(keys), ctypes.addressof(values))
        with self._naming():
            bpf.call(bpf.MAP_UPDATE, "IIQQQ", self.fd, 0, *at, 0)

    def delete(self, key: bytes) -> bool:
        """Delete a key; whether it was there."""
        keys = ctypes.create_string_buffer(key, len(key))
        try:
            bpf.call(bpf.MAP_DELETE, "IIQQQ", self.fd, 0, ctypes.addressof(keys), 0, 0)
        except FileNotFoundError:
            return False
        return True

    def put_all(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Set many values, in one call where there are several."""
        pairs = list(items)
        if len(pairs) < 4:
            for key, value in pairs:
                self.put(key, value)
            return
        keys, values = b"".join([k for k, _ in pairs]), b"".join([v for _, v in pairs])
        key_buffer = ctypes.create_string_buffer(keys, len(keys))
        value_buffer = ctypes.create_string_buffer(values, len(values))
        at = (ctypes.addressof(key_buffer), ctypes.addressof(value_buffer))
        with self._naming():
            bpf.call(bpf.MAP_UPDATE_BATCH, "QQQQIIQQ", 0, 0, *at, len(pairs), self.fd, 0, 0)

    def delete_all(self, keys: Iterable[bytes]) -> int:
        """Delete keys; how many of them were there."""
        return sum(map(self.delete, keys))

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every key and value of a hash, read in batches."""
        chunk, cursor = max(_CHUNK_BYTES // (self.key_size + self.value_size), 16), b""
        while True:
            try:
                keys, values, cursor, last = self._batch(chunk, cursor)
            except OSError as error:
                if error.errno != errno.ENOSPC:  # a bucket that holds more than a chunk
                    raise
                chunk *= 2
                continue
            yield from zip(_cut(keys, self.key_size), _cut(values, self.value_size), strict=True)
            if last:
                return

    def _batch(self, chunk: int, cursor: bytes) -> tuple[bytes, bytes, bytes, bool]:
        keys = ctypes.create_string_buffer(chunk * self.key_size)
        values = ctypes.create_string_buffer(chunk * self.value_size)
        size = max(self.key_size, 4)
        start = ctypes.create_string_buffer(cursor, size)
        end = ctypes.create_string_buffer(size)
        attributes = ctypes.create_string_buffer(
            struct.pack(
                "=QQQQIIQQ",
                ctypes.addressof(start) if cursor else 0,
                *(ctypes.addressof(each) for each in (end, keys, values)),
                *(chunk, self.fd, 0, 0),
            )
        )
        last = False
        try:
            bpf.bpf(bpf.MAP_LOOKUP_BATCH, attributes, 56)
        except FileNotFoundError:
            last = True
        (count,) = struct.unpack_from("=I", attributes, 32)
        return (
            keys.raw[: count * self.key_size],
            values.raw[: count * self.value_size],
            end.raw,
            last,
        )


class SumMap(HashMap):
    """A hash of counters per CPU."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._counters = self.value_size // 8
        self.value_size *= possible_cpus()

    def sums(self) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """Keys, and their counters summed over all CPUs."""
        for key, value in self.items():
            numbers = memoryview(value).cast("Q")
            yield key, tuple(sum(numbers[n :: self._counters]) for n in range(self._counters))


class ArrayMap(bpf.Object):
    """An array of fixed records, mapped into memory: writing costs no system call.

    Only the part that has been used is mapped, for all that is counts as the process's own.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        info = struct.unpack_from("=6I", self.info(88))
        self.value_size, self.capacity = info[3], info[4]
        if self.value_size % 8:
            raise ValueError("records of a mapped array are whole words")
        self._map(_FIRST_BYTES)

    def _map(self, size: int) -> None:
        """Have the first bytes in memory, in whole pages."""
        pages = -(-min(size, self.value_size * self.capacity) // mmap.PAGESIZE)
        self.memory = memoryview(mmap.mmap(self.fd, pages * mmap.PAGESIZE))
        self.words = self.memory.cast("Q")
        """Stores of a word are seen whole."""

    def whole(self) -> memoryview:
        """Everything in memory, for whom no part of it is enough."""
        self._reach(self.value_size * self.capacity)
        return self.memory

    def _reach(self, end: int) -> None:
        """Have everything up to a byte in memory."""
        if end > len(self.memory):
            self._map(max(end, 2 * len(self.memory)))

    def read(self, index: int, count: int = 1) -> bytes:
        """Records from an index on."""
        start, end = index * self.value_size, (index + count) * self.value_size
        self._reach(end)
        return bytes(self.memory[start:end])

    def write(self, index: int, records: bytes) -> None:
        """Set records from an index on; nobody may be reading them."""
        start = index * self.value_size
        self._reach(start + len(records))
        self.memory[start : start + len(records)] = records

    def store(self, index: int, field: int, value: bytes) -> None:
        """Set the word of a record that begins at byte `field`, at once."""
        place = (index * self.value_size + field) // 8
        self._reach((place + 1) * 8)
        (self.words[place],) = struct.unpack("=Q", value)


def _cut(data: bytes, size: int) -> Iterator[bytes]:
    return (data[place : place + size] for place in range(0, len(data), size))


def possible_cpus() -> int:
    """How many CPUs per-CPU values have: those that could be plugged in, too."""
    text = Path("/sys/devices/system/cpu/possible").read_text()
    return int(re.findall(r"\d+", text)[-1]) + 1
