"""Programs at their places: links to the cgroup and to devices, and the pins that keep them.

    PINS/maps/NAME              maps
    PINS/links/PROGRAM          one link per program of sockets, to the cgroup
    PINS/links/xdp_INDEX        one link per device that was named for it
    PINS/links/INDEX-PROGRAM    two links per device (or filters: clsact.py)

What is pinned goes on working without us. A new process finds it, and replaces programs in place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from steersman.host.files import lock_holder
from steersman.host.rtnetlink import Interface
from steersman.modes.ebpf.bpf import CGROUP_ATTACH_TYPES, TCX_EGRESS, TCX_INGRESS, XDP, Link

log = logging.getLogger("steersman.ebpf")
_XDP = "xdp_"
_GONE = (errno.ENODEV, errno.ENOLINK)
"""Of a device: before a link is made, and before one is used again."""
DEVICE_PROGRAMS = {"sm_ingress": TCX_INGRESS, "sm_egress": TCX_EGRESS}


class HeldError(Exception):
    """Another process works with these pins."""


class Pins:
    """A directory in a bpffs that belongs to one process at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.maps, self.links = root / "maps", root / "links"
        self._lock = -1

    @property
    def exist(self) -> bool:
        """Whether something of ours is pinned."""
        return self.maps.is_dir()

    def make(self) -> None:
        """Make the directories."""
        for directory in (self.root, self.maps, self.links):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def hold(self) -> None:
        """Keep other processes away for as long as this one lives; HeldError where one has it."""
        if self._lock >= 0:
            return
        lock = os.open(self.root, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise HeldError(f"{self.root} is held{lock_holder(self.root)}") from error
        self._lock = lock

    def release(self) -> None:
        """Let others have it; twice is once."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Remove every pin: maps go, and what is still attached goes too."""
        for name in sorted(self.names(), key=_turn):
            self.detach(name)
        self.release()
        shutil.rmtree(self.root, ignore_errors=True)

    def detach(self, name: str) -> None:
        """Take a program off at once: unpinning alone does it a little later."""
        link = self.link(name)
        if link is not None:
            with contextlib.suppress(OSError):  # its device is gone, and it with that
                link.detach()
            link.close()

    def link(self, name: str) -> Link | None:
        """A pinned link."""
        with contextlib.suppress(FileNotFoundError):
            return Link.pinned(self.links / name)
        return None

    def names(self) -> list[str]:
        """Names of the pinned links."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(self.links))
        return []


class Links:
    """The programs of devices as links (TCX), pinned."""

    def __init__(self, pins: Pins, do: Callable[[Callable[[], None]], None]) -> None:
        """Work with links.

        Args:
            pins: where they are pinned.
            do: calls a function in the node's network namespace.
        """
        self._pins = pins
        self._do = do

    def attach(self, programs: Mapping[str, int], devices: Iterable[int]) -> None:
        """Attach the programs to devices, or replace them there; what is gone is passed over."""

        def inside() -> None:
            for index in devices:
                self._attach(programs, index)

        self._do(inside)

    def _attach(self, programs: Mapping[str, int], index: int) -> None:
        for name, place in DEVICE_PROGRAMS.items():
            try:
                _attach(self._pins, f"{index}-{name}", programs[name], (index, index), place)
            except OSError as error:
                if error.errno not in _GONE:
                    raise

    def intact(self, devices: Iterable[int]) -> bool:
        """Whether every device has both links."""
        wanted = {f"{i}-{name}": i for i in devices for name in DEVICE_PROGRAMS}
        return all(_target(self._pins, name) == target for name, target in wanted.items())

    def forget(self, devices: Iterable[int]) -> None:
        """Remove the pins of devices that are gone: all but these."""
        keep = {f"{index}-{name}" for index in devices for name in DEVICE_PROGRAMS}
        for name in self._pins.names():
            if "-" in name and name not in keep:
                (self._pins.links / name).unlink(missing_ok=True)

    def drop(self, devices: Iterable[int]) -> None:
        """Remove the pins of these devices, which are gone."""
        for index in devices:
            for name in DEVICE_PROGRAMS:
                (self._pins.links / f"{index}-{name}").unlink(missing_ok=True)


class Accelerated:
    """The program that sends known packets on (XDP), on devices that are named for it."""

    def __init__(
        self, pins: Pins, do: Callable[[Callable[[], None]], None], names: Collection[str]
    ) -> None:
        """Work with links.

        Args:
            pins: where they are pinned.
            do: calls a function in the node's network namespace.
            names: of the devices.
        """
        self._pins = pins
        self._do = do
        self._names = names
        self._refused: set[str] = set()

    def follow(self, program: int, devices: Iterable[Interface]) -> set[int]:
        """Have the program on the named devices that are there, and on no other; their indices.

        A device that takes none (it has somebody else's) is left to tc, and that is logged once.
        """
        wanted = {device.number: device.name for device in devices if device.name in self._names}
        for pin in self._pins.names():
            if pin.startswith(_XDP) and int(pin.removeprefix(_XDP)) not in wanted:
                self._pins.detach(pin)
                (self._pins.links / pin).unlink(missing_ok=True)
        on: set[int] = set()
        self._do(lambda: on.update(i for i in wanted if self._attach(program, i, wanted[i])))
        return on

    def _attach(self, program: int, index: int, name: str) -> bool:
        try:
            _attach(self._pins, f"{_XDP}{index}", program, (index, index), XDP)
        except OSError as error:
            if name not in self._refused:
                log.warning("ebpf: %s takes no XDP program (%s); tc goes on", name, error)
            self._refused.add(name)
            return False
        return True


def attach_sockets(pins: Pins, programs: Mapping[str, int], cgroup: Path) -> None:
    """Attach every program of sockets to a cgroup, or replace it there."""
    target, identity = os.open(cgroup, os.O_RDONLY | os.O_CLOEXEC), cgroup.stat().st_ino
    try:
        for name, place in CGROUP_ATTACH_TYPES.items():
            _attach(pins, name, programs[name], (target, identity), place)
    finally:
        os.close(target)


def detach_sockets(pins: Pins) -> None:
    """Take the programs of sockets off, where there are any."""
    for name in sorted(set(pins.names()) & set(CGROUP_ATTACH_TYPES), key=_turn):
        pins.detach(name)
        (pins.links / name).unlink(missing_ok=True)


def _turn(name: str) -> int:
    """Sort key of what is detached: what asks goes before what translates the answers."""
    types = list(CGROUP_ATTACH_TYPES)
    return -types.index(name) if name in types else 1


def sockets_intact(pins: Pins, cgroup: Path) -> bool:
    """Whether every program of sockets is where it should be."""
    identity = cgroup.stat().st_ino
    return all(_target(pins, name) == identity for name in CGROUP_ATTACH_TYPES)


def _attach(pins: Pins, name: str, program: int, target: tuple[int, int], place: int) -> None:
    where, identity = target
    link = pins.link(name)
    if link is not None and link.target == identity:
        if not link.has(program):  # to replace it would wait for a grace period of RCU
            link.replace(program)
    else:
        if link is not None:
            (pins.links / name).unlink()
            link.close()
        link = Link.attach(program, where, place)
        link.pin(pins.links / name)
    link.close()


def _target(pins: Pins, name: str) -> int:
    link = pins.link(name)
    if link is None:
        return 0
    try:
        return link.target
    finally:
        link.close()
