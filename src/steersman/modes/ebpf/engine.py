"""The kernel's half of the mode, blocking: maps, programs, devices. mode.py calls it in threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from steersman.host.netlink import NETLINK_NETFILTER, NETLINK_ROUTE, Netlink, Subscription
from steersman.host.nlmsg import Message
from steersman.host.rtnetlink import RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR, RTNLGRP_LINK
from steersman.model.ruleset import Diff
from steersman.modes.ebpf import layout, loader
from steersman.modes.ebpf.attach import (
    Pins,
    attach_sockets,
    detach_sockets,
    sockets_intact,
)
from steersman.modes.ebpf.bpf import settle
from steersman.modes.ebpf.devices import open_route
from steersman.modes.ebpf.follow import Concern, Follower
from steersman.modes.ebpf.layout import Kind
from steersman.modes.ebpf.migrate import Migration, load
from steersman.modes.ebpf.probe import cgroup_root
from steersman.modes.ebpf.tables import Tables
from steersman.modes.ebpf.tracking import Tracking

T = TypeVar("T")
_SO_NETNS_COOKIE = 71
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Of the network namespace that asks; both families."""


class EbpfOptions(msgspec.Struct, frozen=True):
    """Where the mode works."""

    pins: Path = Path("/sys/fs/bpf/steersman")
    """Directory in a bpffs; made where it is missing."""
    cgroup: Path | None = None
    """The cgroup (version 2) whose sockets are balanced; None for the root of them all."""
    guard_node_ports: bool = True
    """Whether processes of the node may not bind to a node port in use."""
    xdp_devices: tuple[str, ...] = ()
    """Devices whose packets are sent on early where their connection is known."""
    sockets: bool = True
    """Whether sockets are balanced, where a cgroup is there; packets see to everything if not."""
    tcx: bool | None = None
    """Whether devices have links; filters of tc if not, None for what the kernel can."""
    file: Path = loader.FILE
    """The compiled object."""


def here(function: Callable[[], object]) -> object:
    """Call a function in the network namespace that we are in."""
    return function()


class Inside:
    """Calls functions in the network namespace of the node."""

    def __init__(self, enter: Callable[[Callable[[], object]], object] = here) -> None:
        self._enter = enter

    def netfilter(self) -> Netlink:
        """Open the netlink of netfilter there."""
        opened = self._enter(lambda: Netlink(NETLINK_NETFILTER))
        assert isinstance(opened, Netlink)
        return opened

    def netlink(self) -> Netlink:
        """Open rtnetlink there."""
        opened = self._enter(open_route)
        assert isinstance(opened, Netlink)
        return opened

    def news(self) -> Subscription:
        """Hear of changes of devices and addresses."""
        groups = (RTNLGRP_LINK, RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR)
        opened = self._enter(lambda: Subscription(NETLINK_ROUTE, groups))
        assert isinstance(opened, Subscription)
        return opened

    def cookie(self) -> int:
        """Number of the namespace, as programs see it (Linux 5.14)."""
        number = self._enter(_netns_cookie)
        assert isinstance(number, int)
        return number

    def ports(self) -> tuple[int, int]:
        """First and last port that sockets get where they do not ask for one."""
        found = self._enter(_PORT_RANGE.read_text)
        assert isinstance(found, str)
        first, last = map(int, found.split())
        return first, last

    def do(self, function: Callable[[], None]) -> None:
        """Call a function there."""
        self._enter(function)


def _netns_cookie() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        value = sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
    return int.from_bytes(value, layout.BYTE_ORDER)


class Engine:
    """Maps and programs of this node, opened when they are first needed."""

    def __init__(self, options: EbpfOptions, inside: Inside) -> None:
        self.options = options
        self.pins = Pins(options.pins)
        self.tables: Tables | None = None
        self._inside = inside
        self._loaded: loader.LoadedObject | None = None
        self.tracking: Tracking | None = None
        self._migration: Migration | None = None
        self._follower = Follower(
            self.pins,
            inside.netlink,
            inside.do,
            links=options.tcx,
            accelerated=options.xdp_devices,
        )
        self._attaching = threading.Lock()

    def _open(self) -> Tables:
        if self.tables is None:
            self.pins.make()
            self.pins.hold()
            self._loaded, self._migration = load(self.options.file, self.pins.maps)
            tables = Tables(self._loaded.maps)
            tables.mend()
            self.tracking = Tracking(self._loaded, tables)
            self.tables = tables
        return self.tables

    def read(self) -> dict[bytes, bytes]:
        """Return the Ruleset that is in force; without programs if one is not at its place."""
        if not self.pins.exist:
            return {}
        tables = self._open()
        ruleset = tables.read()
        if any(tables.node.programs) and self._intact(fresh_devices_too=True):
            ruleset[Kind.PROGRAMS.value] = tables.node.programs
        return ruleset

    def fingerprint(self) -> Hashable:
        """Say what is pinned, and whether all of it is at its place.

        Devices come and go with pods: that all of them have programs is enough.
        """
        pinned = [name for name in self.pins.names() if "-" not in name]
        return (self.pins.exist and self._intact(fresh_devices_too=False), *pinned)

    def _intact(self, *, fresh_devices_too: bool) -> bool:
        cgroup = self._cgroup()
        devices = self._follower.intact(fresh_ones_too=fresh_devices_too)
        return devices and (not cgroup or sockets_intact(self.pins, cgroup))

    def _cgroup(self) -> Path | None:
        """The cgroup whose sockets are balanced; None where none are."""
        return (self.options.cgroup or cgroup_root()) if self.options.sockets else None

    def apply(self, change: Diff) -> None:
        """Write the maps; attach the programs after that, and detach them before."""
        if not change:  # where there is nothing, nothing is made
            return
        if Kind.CONFIG.value in change.removed:
            self._remove()
            return
        tables = self._open()
        tables.write(change)
        programs = change.added.get(Kind.PROGRAMS.value)
        if programs is None and Kind.PROGRAMS.value in change.changed:
            programs = change.changed[Kind.PROGRAMS.value][1]
        if programs is not None:
            self._attach(tables, programs)
        elif Kind.CONFIG.value in change.changed:
            self._follower.forget()
            self.attach_devices(self.follow_devices())

    def _attach(self, tables: Tables, programs: bytes) -> None:
        assert self._loaded
        assert self.tracking
        tables.marks.distrust()
        cgroup = self._cgroup()
        cookie = self._inside.cookie() if cgroup else 0  # by which packets know that all is theirs
        tables.node.programs = bytes(16)
        tables.node.identify(cookie, self._inside.ports())
        if self._migration:
            tables.marks.open_flows(True)  # with the old ones, which are everywhere
            self._migration.exchange()
        self._follower.forget()
        self.attach_devices(self.follow_devices())
        tables.marks.open_flows(True)
        if cgroup:
            attach_sockets(self.pins, self._loaded.programs, cgroup)
        else:
            detach_sockets(self.pins)
        if self._migration:
            self._migration.finish()
            self._migration = None
        settle()  # one that was replaced may be about to write a flow that it does not mark
        self.tracking.mark()
        tables.node.programs = programs

    def follow_devices(self, news: Sequence[Message] | None = None) -> list[int]:
        """Tell programs which devices there are; return those that are to have programs.

        Args:
            news: what has changed since the last time; None to list everything.
        """
        tables = self._open()
        assert self._loaded
        return self._follower.write(self._loaded, tables, news)

    def concern(self, news: Sequence[Message]) -> Concern:
        """Return what notifications of devices mean here."""
        return self._follower.concern(news)

    def attach_devices(self, numbers: Sequence[int]) -> None:
        """Attach the programs to devices, also while maps are written; nothing once closed."""
        with self._attaching:
            if self._loaded:
                self._follower.attach(self._loaded, numbers)

    def _remove(self) -> None:
        if self.tables is not None:
            self.tables.marks.open_flows(False)
        with self._attaching:
            self._follower.filters.remove()
            self.pins.remove()
        self.close()

    def news(self) -> Subscription:
        """Hear of changes of devices."""
        return self._inside.news()

    def close(self) -> None:
        """Let go of everything, and leave it working."""
        with self._attaching:
            if self._loaded:
                self._loaded.close()
            self._loaded = self.tables = self.tracking = None
        self._follower.forget()
        self.pins.release()
