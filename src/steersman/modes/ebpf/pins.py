"""A directory of pins in a bpffs.

    PINS/maps/NAME              maps
    PINS/links/PROGRAM          one link to the cgroup for each socket program
    PINS/links/xdp_INDEX        one link for each device with the XDP program
    PINS/links/INDEX-PROGRAM    two links for each device (or filters: clsact.py)

Pinned links keep working without a process. A new process finds them, and replaces the programs in
place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from steersman.host.files import lock_holder
from steersman.modes.ebpf.bpf import (
    CGROUP_ATTACH_TYPES,
    Link,
    remove_pins,
)


class LockedError(Exception):
    """Another process works with these pins."""


class Pins:
    """A directory in a bpffs that belongs to one process at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.maps, self.links = root / "maps", root / "links"
        self._lock = -1

    @property
    def exist(self) -> bool:
        """Whether the mode has pinned anything."""
        return self.maps.is_dir()

    def create(self) -> None:
        """Create the directories."""
        for directory in (self.root, self.maps, self.links):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def lock(self) -> None:
        """Keep other processes away as long as this one lives. Idempotent.

        Raises:
            LockedError: another process has the lock.
        """
        if self._lock >= 0:
            return
        lock = os.open(self.root, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise LockedError(f"{self.root} is held{lock_holder(self.root)}") from error
        # The lock ends with the descriptor, also if the process is killed.
        self._lock = lock

    def unlock(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Remove every pin, and detach the programs."""
        for name in sorted(self.link_names(), key=detach_order):
            self.detach(name)
        self.unlock()
        remove_pins(self.root)

    def detach(self, name: str) -> None:
        """Detach a program at once and remove its pin; removing only the pin takes a while."""
        link = self.link(name)
        if link is not None:
            with contextlib.suppress(OSError):  # its device is gone
                link.detach()
            link.close()
            (self.links / name).unlink(missing_ok=True)

    def link(self, name: str) -> Link | None:
        """Open a pinned link."""
        with contextlib.suppress(FileNotFoundError):
            return Link.pinned(self.links / name)
        return None

    def link_names(self) -> list[str]:
        """Return the names of the pinned links."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(self.links))
        return []

    def attach(self, name: str, program: int, target: tuple[int, int], attach_type: int) -> None:
        """Attach a program by a pinned link, or replace the program of that link.

        Args:
            name: name of the pin.
            program: descriptor.
            target: the cgroup or device as bpf(2) takes it, and as links report it.
            attach_type: hook of the target.
        """
        argument, identity = target
        link = self.link(name)
        # The pin of a device that is gone, or of another cgroup, is of no use.
        if link is not None and link.target != identity:
            (self.links / name).unlink()
            link.close()
            link = None
        made = link is None
        link = link or Link.attach(program, argument, attach_type)
        try:
            if made:
                link.pin(self.links / name)
            elif not link.has(program):  # replacing waits for a grace period of RCU
                link.replace(program)
        finally:
            link.close()

    def target(self, name: str) -> int:
        """Return the target of a pinned link; 0 if there is none."""
        link = self.link(name)
        if link is None:
            return 0
        try:
            return link.target
        finally:
            link.close()


def detach_order(name: str) -> int:
    """Sort key: the reverse of attaching, so that no answer is left untranslated."""
    types = list(CGROUP_ATTACH_TYPES)
    return -types.index(name) if name in types else 1
