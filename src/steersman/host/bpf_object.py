"""A compiled object of BPF programs, as libbpf reads and loads it.

Nothing is pinned: when this process ends, however it does, the kernel detaches and frees all.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from steersman.host.libbpf import SAMPLE, call, forget_warnings, library, load_error


class _OpenOptions(ctypes.Structure):
    """The part of `struct bpf_object_open_opts` that we set."""

    _fields_ = (("size", ctypes.c_size_t), ("object_name", ctypes.c_char_p))


class OpenedObject:
    """An object that libbpf has read; `load` brings its programs and maps into the kernel."""

    def __init__(self, path: Path) -> None:
        """Read an object.

        Raises:
            ObjectError: it is none.
        """
        self.path = path
        self._ring: int | None = None
        self._links: list[int] = []
        data = path.read_bytes()
        options = _OpenOptions(ctypes.sizeof(_OpenOptions), b"steersman")
        forget_warnings()
        self.handle = library().bpf_object__open_mem(data, len(data), ctypes.byref(options))
        if not self.handle:
            raise load_error(ctypes.get_errno(), f"{path} is no BPF object")

    def leave_out(self, programs: Collection[str]) -> None:
        """Have `load` not load these programs."""
        for name, handle in self.each("program"):
            if name in programs:
                library().bpf_program__set_autoload(handle, False)

    def load(self) -> None:
        """Load everything; the verifier checks every program.

        Raises:
            ObjectError: libbpf or the kernel refused it.
        """
        if failed := library().bpf_object__load(self.handle):
            raise load_error(-failed, f"the kernel does not load {self.path}")

    def each(self, kind: str) -> Iterator[tuple[str, int]]:
        """Yield names and handles of libbpf of every `program` or `map`."""
        next_one = getattr(library(), f"bpf_object__next_{kind}")
        name_of = getattr(library(), f"bpf_{kind}__name")
        handle = next_one(self.handle, None)
        while handle:
            yield name_of(handle).decode(), handle
            handle = next_one(self.handle, handle)

    def descriptors(self, kind: str) -> dict[str, int]:
        """Return the descriptor of every `program` or `map` by name, once they are loaded."""
        fd_of = getattr(library(), f"bpf_{kind}__fd")
        return {name: fd_of(handle) for name, handle in self.each(kind)}

    def attach_tracepoint(self, name: str) -> int:
        """Attach a program that is loaded to its tracepoint, until `detach` or `close`.

        Raises:
            OSError: the kernel refused it.
        """
        descriptor = self.descriptors("program")[name]
        self._links.append(call("bpf_raw_tracepoint_open", None, descriptor))
        return self._links[-1]

    def attach_socket(self, name: str, cgroup: int, attach_type: int) -> None:
        """Attach a program of sockets to a cgroup (a descriptor), behind those that are there.

        Raises:
            OSError: the kernel refused it.
        """
        descriptor = self.descriptors("program")[name]
        self._links.append(call("bpf_link_create", descriptor, cgroup, attach_type, None))

    def detach(self, link: int) -> None:
        """Detach what `attach_tracepoint` has attached."""
        self._links.remove(link)
        os.close(link)

    def listen(self, name: str, take: Callable[[bytes], object]) -> None:
        """Read a ring buffer: `consume` gives each record to a function."""

        def keep(_context: int, data: int, size: int) -> int:
            take(ctypes.string_at(data, size))
            return 0

        self._callback = SAMPLE(keep)  # an attribute, because libbpf has a pointer to it
        self._ring = library().ring_buffer__new(
            self.descriptors("map")[name], self._callback, None, None
        )
        if not self._ring:
            raise load_error(ctypes.get_errno(), "there is no ring buffer")

    def fileno(self) -> int:
        """Return a descriptor that is readable when there are records."""
        number: int = library().ring_buffer__epoll_fd(self._ring)
        return number

    def consume(self) -> None:
        """Take the records that are there."""
        library().ring_buffer__consume(self._ring)

    def close(self) -> None:
        """Detach programs, and close every descriptor. Idempotent."""
        for descriptor in self._links:
            os.close(descriptor)
        self._links = []
        if self._ring:
            library().ring_buffer__free(self._ring)
            self._ring = None
        if self.handle:
            library().bpf_object__close(self.handle)
            self.handle = None
