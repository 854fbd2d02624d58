"""Programs attached by links: to the cgroup, and to devices. Pins keep the links (pins.py)."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from steersman.host.rtnetlink import Interface
from steersman.modes.ebpf.bpf import (
    CGROUP_ATTACH_TYPES,
    TCX_EGRESS,
    TCX_INGRESS,
    XDP,
)
from steersman.modes.ebpf.pins import Pins, detach_order

log = logging.getLogger("steersman.ebpf")
_XDP_PIN = "xdp_"
# Errors of a device that is gone: before a link is made, and before one is used again.
_DEVICE_GONE = (errno.ENODEV, errno.ENOLINK)
DEVICE_PROGRAMS = {"sm_ingress": TCX_INGRESS, "sm_egress": TCX_EGRESS}
"""Attach type by program."""
XDP_PROGRAM = "sm_xdp"


class Links:
    """The programs of devices as pinned links (TCX)."""

    def __init__(self, pins: Pins) -> None:
        self._pins = pins

    def attach(self, programs: Mapping[str, int], device: int) -> None:
        """Attach the programs to a device, or replace them; skip it if it is gone.

        Each waits for a grace period of RCU, often 20 ms.
        """
        for name, attach_type in DEVICE_PROGRAMS.items():
            pin, target = f"{device}-{name}", (device, device)
            try:
                self._pins.attach(pin, programs[name], target, attach_type)
            except OSError as error:
                if error.errno not in _DEVICE_GONE:
                    raise

    def intact(self, devices: Iterable[int]) -> bool:
        """Return whether every device has both links."""
        wanted = {f"{index}-{name}": index for index in devices for name in DEVICE_PROGRAMS}
        return all(self._pins.target(name) == index for name, index in wanted.items())

    def forget(self, devices: Iterable[int]) -> None:
        """Remove the pins of devices that are gone."""
        for index in devices:
            for name in DEVICE_PROGRAMS:
                (self._pins.links / f"{index}-{name}").unlink(missing_ok=True)


class XdpPrograms:
    """The program that forwards packets of known connections early (XDP), on named devices."""

    def __init__(self, pins: Pins, names: Collection[str]) -> None:
        self._pins = pins
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
        for index, name in wanted.items():
            try:
                self._pins.attach(f"{_XDP_PIN}{index}", program, (index, index), XDP)
                attached.add(index)
            except OSError as error:
                if name not in self._refused:
                    log.warning("ebpf: %s takes no XDP program (%s); using tc", name, error)
                self._refused.add(name)
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
    for name in sorted(set(pins.link_names()) & set(CGROUP_ATTACH_TYPES), key=detach_order):
        pins.detach(name)


def sockets_intact(pins: Pins, cgroup: Path) -> bool:
    """Return whether every socket program is attached to the cgroup."""
    identity = cgroup.stat().st_ino
    return all(pins.target(name) == identity for name in CGROUP_ATTACH_TYPES)
