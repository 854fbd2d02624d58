"""Programs attached by links: to the cgroup, and to devices. Pins keep the links.

    PINS/maps/NAME              maps
    PINS/links/PROGRAM          one link to the cgroup for each socket program
    PINS/links/xdp_INDEX        one link for each device with the XDP program
    PINS/links/INDEX-PROGRAM    two links for each device (or filters: attach.py)

Pinned links keep working without a process. A new process finds them, and replaces the programs in
place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from steersman.host.files import lock_holder
from steersman.host.netlink import Netlink
from steersman.host.nlmsg import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    Request,
    attributes,
    nested,
    string,
    text,
    u32,
)
from steersman.host.rtnetlink import Interface
from steersman.modes.ebpf.bpf import (
    CGROUP_ATTACH_TYPES,
    TCX_EGRESS,
    TCX_INGRESS,
    XDP,
    Link,
    remove_pins,
)
from steersman.modes.ebpf.netns import NodeNetns

# -- Links -----------------------------------------------------------------------------------------

log = logging.getLogger("steersman.ebpf")
_XDP_PIN = "xdp_"
# Errors of a device that is gone: before a link is made, and before one is used again.
_DEVICE_GONE = (errno.ENODEV, errno.ENOLINK)
DEVICE_PROGRAMS = {"sm_ingress": TCX_INGRESS, "sm_egress": TCX_EGRESS}
"""Attach type by program."""
XDP_PROGRAM = "sm_xdp"


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


# -- Filters of tc ---------------------------------------------------------------------------------
#
# Programs on devices as filters of tc, for kernels without TCX (Linux 6.6).
#
# A device gets a qdisc `clsact`, and below it one filter for each direction. Filters stay when the
# process ends, and are replaced in one step. Ours are recognised by the filter's name; directories
# beside the pins note what to remove:
#
#     PINS/filters/INDEX          this device has filters of ours
#     PINS/filters/INDEX-qdisc    the qdisc is ours, too: it goes with the last filter

_RTM_NEWQDISC, _RTM_DELQDISC = 36, 37
_RTM_NEWTFILTER, _RTM_DELTFILTER, _RTM_GETTFILTER = 44, 45, 46
_TCMSG = struct.Struct("=B3xiIII")  # family, device, handle, parent, info
_TCA_KIND, _TCA_OPTIONS = 1, 2
_TCA_BPF_FD, _TCA_BPF_NAME, _TCA_BPF_FLAGS = 6, 7, 8
_DIRECT_ACTION = 1
_CLSACT, _CLSACT_HANDLE = 0xFFFFFFF1, 0xFFFF0000
PARENTS = {"sm_ingress": 0xFFFFFFF2, "sm_egress": 0xFFFFFFF3}
"""Parent of each program's filter: ffff:fff2 and ffff:fff3, as tc(8) writes it."""
_ALL = socket.htons(0x0003)  # ETH_P_ALL
# Of new filters. The first priority, or else the first free one: a filter of others may end the
# packet's way through them, or be of a kind or for a protocol that excludes ours.
_PRIORITY, _HANDLE = 1, 0x736D
_GONE = (errno.ENODEV, errno.ENOENT, errno.EINVAL)


class Filter(NamedTuple):
    """A filter of a device."""

    priority: int
    handle: int
    name: str
    """Name of a filter of kind bpf; "" for others."""


class Filters:
    """The programs of devices as filters."""

    def __init__(self, directory: Path, netns: NodeNetns) -> None:
        """Work with filters.

        Args:
            directory: for the notes; created when needed.
            netns: network namespace of the devices.
        """
        self._notes = directory
        self._netns = netns

    def attach(self, programs: Mapping[str, int], devices: Collection[int]) -> None:
        """Attach the programs to devices, or replace them; skip devices that are gone."""
        with self._netns.rtnetlink() as netlink:
            for index in devices:
                try:
                    self._note(f"{index}")
                    self._create_qdisc(netlink, index)
                    for name, parent in PARENTS.items():
                        _put_filter(netlink, index, parent, name, programs[name])
                except OSError as error:
                    if error.errno != errno.ENODEV:
                        raise OSError(
                            error.errno, f"the filters of device {index}: {error.strerror}"
                        ) from error

    def _create_qdisc(self, netlink: Netlink, index: int) -> None:
        # The note is made first: a process that is killed in between must not leave a qdisc.
        noted = not self._note(f"{index}-qdisc")
        payload = _TCMSG.pack(0, index, _CLSACT_HANDLE, _CLSACT, 0) + text(_TCA_KIND, "clsact")
        try:
            netlink.request(Request(_RTM_NEWQDISC, payload, NLM_F_CREATE | NLM_F_EXCL))
        except OSError as error:
            if not noted:  # the qdisc belongs to others, or there is none
                (self._notes / f"{index}-qdisc").rmdir()
            if error.errno != errno.EEXIST:
                raise

    def intact(self, devices: Iterable[int]) -> bool:
        """Return whether every device has both filters."""
        with self._netns.rtnetlink() as netlink:
            return all(
                _find(netlink, index, parent, name)
                for index in devices
                for name, parent in PARENTS.items()
            )

    def keep_only(self, devices: Iterable[int]) -> None:
        """Remove the notes about all devices except these."""
        keep = {str(index) for index in devices}
        for note in self._noted():
            if note.partition("-")[0] not in keep:
                (self._notes / note).rmdir()

    def drop(self, devices: Iterable[int]) -> None:
        """Remove the notes about devices that are gone."""
        for index in devices:
            for note in (f"{index}", f"{index}-qdisc"):
                with contextlib.suppress(FileNotFoundError):
                    (self._notes / note).rmdir()

    def remove(self) -> None:
        """Remove all filters of ours, and the qdiscs that only served them."""
        noted = self._noted()
        if not noted:
            return
        with self._netns.rtnetlink() as netlink:
            for note in noted:  # INDEX-qdisc is sorted after INDEX
                index, _, qdisc = note.partition("-")
                for request in _removal(netlink, int(index), qdisc=bool(qdisc)):
                    try:
                        netlink.request(request)
                    except OSError as error:
                        if error.errno not in _GONE:
                            raise
                (self._notes / note).rmdir()
        self._notes.rmdir()

    def _note(self, name: str) -> bool:
        """Make a note; return False if it was there."""
        self._notes.mkdir(mode=0o700, exist_ok=True)
        try:
            (self._notes / name).mkdir(mode=0o700)
        except FileExistsError:
            return False
        return True

    def _noted(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(self._notes))
        return []


def _filter_name(program: str) -> str:
    return f"steersman/{program}"


def _filter_request(
    kind: int, index: int, parent: int, which: Filter, options: bytes = b""
) -> Request:
    info = which.priority << 16 | _ALL
    head = _TCMSG.pack(0, index, which.handle, parent, info)
    flags = NLM_F_CREATE | NLM_F_REPLACE if kind == _RTM_NEWTFILTER else 0
    return Request(kind, head + text(_TCA_KIND, "bpf") + options, flags)


def _put_filter(netlink: Netlink, index: int, parent: int, name: str, program: int) -> None:
    """Create a filter, or replace it."""
    options = nested(
        _TCA_OPTIONS,
        u32(_TCA_BPF_FD, program),
        text(_TCA_BPF_NAME, _filter_name(name)),
        u32(_TCA_BPF_FLAGS, _DIRECT_ACTION),
    )
    have = _find(netlink, index, parent, name)
    which = have or Filter(_PRIORITY, _HANDLE, "")
    try:
        netlink.request(_filter_request(_RTM_NEWTFILTER, index, parent, which, options))
    except OSError as error:
        if have or error.errno != errno.EINVAL:
            raise
        # The first priority belongs to a filter of another kind or protocol.
        taken = {each.priority for each in _list(netlink, index, parent)}
        free = next(number for number in range(1, 1 << 16) if number not in taken)
        which = Filter(free, _HANDLE, "")
        netlink.request(_filter_request(_RTM_NEWTFILTER, index, parent, which, options))


def _list(netlink: Netlink, index: int, parent: int) -> Iterator[Filter]:
    """Yield the filters of a device; the kernel lists each priority, too, with handle 0."""
    for reply in netlink.dump(Request(_RTM_GETTFILTER, _TCMSG.pack(0, index, 0, parent, 0))):
        _, _, handle, _, info = _TCMSG.unpack_from(reply.payload)
        options = attributes(attributes(reply.payload, _TCMSG.size).get(_TCA_OPTIONS, b""))
        yield Filter(info >> 16, handle, string(options.get(_TCA_BPF_NAME, b"")))


def _find(netlink: Netlink, index: int, parent: int, program: str) -> Filter | None:
    name = _filter_name(program)
    found = [each for each in _list(netlink, index, parent) if each.name == name]
    return found[0] if found else None


def _removal(netlink: Netlink, index: int, *, qdisc: bool) -> list[Request]:
    """Return requests that delete our filters, or the qdisc unless others have filters there."""
    if not qdisc:
        return [
            _filter_request(_RTM_DELTFILTER, index, parent, have)
            for name, parent in PARENTS.items()
            if (have := _find(netlink, index, parent, name))
        ]
    if any(list(_list(netlink, index, parent)) for parent in PARENTS.values()):
        return []
    return [Request(_RTM_DELQDISC, _TCMSG.pack(0, index, _CLSACT_HANDLE, _CLSACT, 0))]
