"""Programs attached by links: to the cgroup, and to devices. Pins keep the links.

    PINS/maps/NAME              maps
    PINS/links/PROGRAM          one link to the cgroup for each socket program
    PINS/links/xdp_INDEX        one link for each device with the XDP program
    PINS/links/INDEX-PROGRAM    two links for each device (or filters: clsact.py)

Pinned links keep working without a process. A new process finds them, and replaces the programs in
place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from steersman.host.files import lock_holder
from steersman.host.rtnetlink import Interface
from steersman.modes.ebpf.bpf import CGROUP_ATTACH_TYPES, TCX_EGRESS, TCX_INGRESS, XDP, Link
from steersman.modes.ebpf.netns import NodeNetns

log = logging.getLogger("steersman.ebpf")
_XDP_PIN = "xdp_"
# Errors of a device that is gone: before a link is made, and before one is used again.
_DEVICE_GONE = (errno.ENODEV, errno.ENOLINK)
DEVICE_PROGRAMS = {"sm_ingress": TCX_INGRESS, "sm_egress": TCX_EGRESS}
"""Attach type by program."""


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
        for name in sorted(self.link_names(), key=_detach_order):
            self.detach(name)
        self.unlock()
        shutil.rmtree(self.root, ignore_errors=True)

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
        if link is None:
            link = Link.attach(program, argument, attach_type)
            link.pin(self.links / name)
        elif not link.has(program):  # replacing waits for a grace period of RCU
            link.replace(program)
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


class Links:
    """The programs of devices as pinned links (TCX)."""

    def __init__(self, pins: Pins, netns: NodeNetns) -> None:
        self._pins = pins
        self._netns = netns

    def attach(self, programs: Mapping[str, int], devices: Collection[int]) -> None:
        """Attach the programs to devices, or replace them; skip devices that are gone."""

        def attach_all() -> None:
            for index in devices:
                for program, attach_type in DEVICE_PROGRAMS.items():
                    pin = f"{index}-{program}"
                    try:
                        self._pins.attach(pin, programs[program], (index, index), attach_type)
                    except OSError as error:
                        if error.errno not in _DEVICE_GONE:
                            raise

        self._netns.run(attach_all)

    def intact(self, devices: Iterable[int]) -> bool:
        """Return whether every device has both links."""
        wanted = {f"{index}-{name}": index for index in devices for name in DEVICE_PROGRAMS}
        return all(self._pins.target(name) == index for name, index in wanted.items())

    def keep_only(self, devices: Iterable[int]) -> None:
        """Remove the pins of all devices except these."""
        keep = {f"{index}-{name}" for index in devices for name in DEVICE_PROGRAMS}
        for name in self._pins.link_names():
            if "-" in name and name not in keep:
                (self._pins.links / name).unlink(missing_ok=True)

    def drop(self, devices: Iterable[int]) -> None:
        """Remove the pins of devices that are gone."""
        for index in devices:
            for name in DEVICE_PROGRAMS:
                (self._pins.links / f"{index}-{name}").unlink(missing_ok=True)


class XdpPrograms:
    """The program that forwards packets of known connections early (XDP), on named devices."""

    def __init__(self, pins: Pins, netns: NodeNetns, names: Collection[str]) -> None:
        self._pins = pins
        self._netns = netns
        self._names = names
        # Devices whose refusal is logged.
        self._refused: set[str] = set()

    def attach(self, program: int, devices: Iterable[Interface]) -> set[int]:
        """Attach the program to the named devices, and to no other; return their indices.

        If a device takes none (it may have one already), its packets are left to the programs of
        tc. That is logged once.
        """
        wanted = {device.number: device.name for device in devices if device.name in self._names}
        # Detach from devices that are no longer named.
        for pin in self._pins.link_names():
            if pin.startswith(_XDP_PIN) and int(pin.removeprefix(_XDP_PIN)) not in wanted:
                self._pins.detach(pin)

        attached: set[int] = set()

        def attach_all() -> None:
            for index, name in wanted.items():
                try:
                    self._pins.attach(f"{_XDP_PIN}{index}", program, (index, index), XDP)
                    attached.add(index)
                except OSError as error:
                    if name not in self._refused:
                        log.warning("ebpf: %s takes no XDP program (%s); using tc", name, error)
                    self._refused.add(name)

        self._netns.run(attach_all)
        return attached


def attach_sockets(pins: Pins, programs: Mapping[str, int], cgroup: Path) -> None:
    """Attach every socket program to a cgroup, or replace it."""
    # bpf(2) takes a cgroup by descriptor; a link reports its id, which is the inode number.
    target, identity = os.open(cgroup, os.O_RDONLY | os.O_CLOEXEC), cgroup.stat().st_ino
    try:
        for name, attach_type in CGROUP_ATTACH_TYPES.items():
            pins.attach(name, programs[name], (target, identity), attach_type)
    finally:
        os.close(target)


def detach_sockets(pins: Pins) -> None:
    """Detach the socket programs that are attached."""
    for name in sorted(set(pins.link_names()) & set(CGROUP_ATTACH_TYPES), key=_detach_order):
        pins.detach(name)


def _detach_order(name: str) -> int:
    """Sort key: the reverse of attaching, so that no answer is left untranslated."""
    types = list(CGROUP_ATTACH_TYPES)
    return -types.index(name) if name in types else 1


def sockets_intact(pins: Pins, cgroup: Path) -> bool:
    """Return whether every socket program is attached to the cgroup."""
    identity = cgroup.stat().st_ino
    return all(pins.target(name) == identity for name in CGROUP_ATTACH_TYPES)
