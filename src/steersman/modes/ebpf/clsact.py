"""Programs on devices as filters of tc, for kernels without TCX (Linux 6.6).

A device gets a qdisc `clsact`, and below it one filter for each direction. Filters stay when the
process ends, and are replaced in one step. Ours are recognised by the filter's name; directories
beside the pins note what to remove:

    PINS/filters/INDEX          this device has filters of ours
    PINS/filters/INDEX-qdisc    the qdisc is ours, too: it goes with the last filter
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

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
from steersman.modes.ebpf.netns import rtnetlink

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

    def __init__(self, directory: Path) -> None:
        """Work with filters.

        Args:
            directory: for the notes; created when needed.
        """
        self._notes = directory

    def attach(self, programs: Mapping[str, int], device: int) -> None:
        """Attach the programs to a device, or replace them; skip it if it is gone."""
        with rtnetlink() as netlink:
            try:
                self._note(f"{device}")
                self._create_qdisc(netlink, device)
                for name, parent in PARENTS.items():
                    _put_filter(netlink, device, parent, name, programs[name])
            except OSError as error:
                if error.errno != errno.ENODEV:
                    raise OSError(
                        error.errno, f"the filters of device {device}: {error.strerror}"
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
        with rtnetlink() as netlink:
            return all(
                _find(netlink, index, parent, name)
                for index in devices
                for name, parent in PARENTS.items()
            )

    def forget(self, devices: Iterable[int]) -> None:
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
        with rtnetlink() as netlink:
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
