"""BPF maps by how they are used: by key and in batches, or as memory.

A map object serves one thread at a time: its buffers are made once, as a system call takes less
time than making them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from steersman.modes.ebpf import bpf

_LPM_TRIE = 11
_PER_CPU = (5, 6, 10)  # BPF_MAP_TYPE_PERCPU_HASH, _PERCPU_ARRAY, _LRU_PERCPU_HASH
_CHUNK_BYTES = 1 << 18
"""Size of a batch that is read."""
_FEW = 4
"""Entries for which single calls are as fast as a batch."""
_FULL = (errno.E2BIG, errno.ENOSPC)
"""Errors of full hashes, and of full tries."""
_NAME_END = 40
"""End of the name in struct bpf_map_info; it has 16 bytes."""
_FIRST_BYTES = 1 << 20
"""Bytes of an array that are mapped at first."""
_ELEMENT = struct.Struct("=IIQQQ")
"""Attributes of a call for one element: map, key, value, flags."""
_TO_KEY = 16
"""Bytes of them with which a key alone is given."""
_BATCH = struct.Struct("=QQQQIIQQ")
"""Attributes of a call for a batch: cursors, keys, values, count, map, flags."""
_COUNT_AT = 32


class FullError(OSError):
    """A map has no room left."""


class HashMap(bpf.Object):
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
        self._key = ctypes.create_string_buffer(self.key_size)
        self._value = ctypes.create_string_buffer(self.value_size)
        self._element = ctypes.create_string_buffer(_ELEMENT.size)
        _ELEMENT.pack_into(
            self._element, 0, 0, 0, ctypes.addressof(self._key), ctypes.addressof(self._value), 0
        )

    def _call(self, command: int, key: bytes) -> None:
        """Call bpf(2) for an element, with its value in `_value`."""
        self._key.raw = key
        struct.pack_into("=I", self._element, 0, self.fd)
        size = _TO_KEY if command == bpf.MAP_DELETE else _ELEMENT.size
        bpf.bpf(command, self._element, size)

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
            self._call(bpf.MAP_LOOKUP, key)
        except FileNotFoundError:
            return None
        return self._value.raw

    def put(self, key: bytes, value: bytes) -> None:
        """Set one value; FullError if there is no room."""
        self._value.raw = value
        with self._explain_full():
            self._call(bpf.MAP_UPDATE, key)

    def delete(self, key: bytes) -> bool:
        """Delete a key; return whether it was there."""
        try:
            self._call(bpf.MAP_DELETE, key)
        except FileNotFoundError:
            return False
        return True

    def put_all(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Set many values, in one call if there are several; FullError if there is no room."""
        pairs = list(items)
        if len(pairs) < _FEW:
            for key, value in pairs:
                self.put(key, value)
            return
        with self._explain_full():
            self._write_batch(
                bpf.MAP_UPDATE_BATCH, [key for key, _ in pairs], [value for _, value in pairs]
            )

    def delete_all(self, keys: Iterable[bytes]) -> int:
        """Delete keys; return how many of them were there."""
        left = list(keys)
        if len(left) < _FEW or not self._deletes_batches:
            return sum(map(self.delete, left))
        deleted = 0
        while left:
            done = self._write_batch(bpf.MAP_DELETE_BATCH, left)
            deleted += done
            del left[: done + 1]  # the kernel stops at a key that is not there
        return deleted

    def _write_batch(self, command: int, keys: list[bytes], values: Iterable[bytes] = ()) -> int:
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
            bpf.bpf(command, attributes, _BATCH.size)
        (count,) = struct.unpack_from("=I", attributes, _COUNT_AT)
        return int(count)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield every key and value of a hash, read in batches."""
        chunk, cursor = max(_CHUNK_BYTES // (self.key_size + self.value_size), 16), b""
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
            bpf.bpf(bpf.MAP_LOOKUP_BATCH, attributes, _BATCH.size)
        except FileNotFoundError:
            last = True
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


class ArrayMap(bpf.Object):
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
            self._map(max(end, 2 * len(self.memory)))

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
