"""The kernel side of the mode: maps, programs and devices of this node.

Everything blocks, and runs in the thread of the mode's worker. Only programs of new devices are
attached in another one, as each waits for a grace period of RCU. The order of an upgrade, which
connections survive:

    load the new object, copy maps that changed shape    (migration.py; the old programs work on)
    switch maps, replace the programs on all devices     flows may be opened again
    replace the socket programs                          copy flows of the last moments
    wait until no old program runs                       trust the presence filter
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import msgspec

from steersman.host.netlink import Subscription
from steersman.host.nlmsg import Message
from steersman.host.worker import Pause, apart
from steersman.model.errors import BusyError
from steersman.model.ruleset import Diff
from steersman.modes.ebpf import PINS, loader
from steersman.modes.ebpf.bpf import wait_for_programs
from steersman.modes.ebpf.counts import Tracking
from steersman.modes.ebpf.devices import DeviceTracker
from steersman.modes.ebpf.layout import Kind
from steersman.modes.ebpf.links import XDP_PROGRAM, attach_sockets, detach_sockets, sockets_intact
from steersman.modes.ebpf.migration import Migration, load
from steersman.modes.ebpf.netns import device_changes, netns_cookie, port_range
from steersman.modes.ebpf.pins import Pins
from steersman.modes.ebpf.probe import cgroup_root, mount_bpffs
from steersman.modes.ebpf.tables import Tables

T = TypeVar("T")


class EbpfOptions(msgspec.Struct, frozen=True):
    """Places in the system, and features of the mode."""

    pins: Path = PINS
    """Directory in a bpffs; created if it is missing."""
    cgroup: Path | None = None
    """The cgroup (version 2) whose sockets are balanced; None for the root of all."""
    guard_node_ports: bool = True
    """Whether processes of the node may not bind to a node port in use."""
    fast_path: bool = False
    """Whether packets of known connections are sent on past the network stack."""
    xdp_devices: tuple[str, ...] = ()
    """Devices whose packets are forwarded early if their connection is known."""
    sockets: bool = True
    """Whether to balance sockets, if there is a cgroup; otherwise all packets are rewritten."""
    tcx: bool | None = None
    """Whether to attach to devices by links, or by filters of tc; None chooses by the kernel."""
    file: Path = loader.FILE
    """The compiled object."""


class Datapath:
    """Maps and programs of this node, opened when they are first needed."""

    def __init__(self, options: EbpfOptions) -> None:
        self.options = options
        self.pins = Pins(options.pins)
        self.tables: Tables | None = None
        self.tracking: Tracking | None = None
        self._loaded: loader.LoadedObject | None = None
        self._migration: Migration | None = None
        self._times_missing = 0
        self._devices = DeviceTracker(
            self.pins, use_links=options.tcx, xdp_devices=options.xdp_devices
        )
        self._attaching = threading.RLock()
        """Held while programs are attached to devices or detached, and while all is closed."""

    def _open(self) -> Tables:
        if self.tables is None:
            mount_bpffs(self.pins.root.parent)  # elsewhere pinning fails, with EPERM
            self.pins.create()
            self.pins.lock()
            without = () if self.options.xdp_devices else (XDP_PROGRAM,)
            self._loaded, self._migration = load(self.options.file, self.pins.maps, without)
            try:
                tables = Tables(self._loaded.maps)
                tables.repair()
                self.tracking = Tracking(self._loaded, tables)
            except BaseException:  # the next attempt loads everything again
                self.close()
                raise
            self.tables = tables
        return self.tables

    def read(self) -> dict[bytes, bytes]:
        """Return the Ruleset in force; without programs if one of them is not attached.

        A device that has just appeared gets its programs from the watcher, not by a new sync.
        """
        if not self.pins.exist:
            return {}
        tables = self._open()
        ruleset = tables.read()
        if any(tables.node.programs) and self._intact(new_devices_too=False):
            ruleset[Kind.PROGRAMS.value] = tables.node.programs
        return ruleset

    def fingerprint(self) -> int:
        """Return how often programs that this process attached were found to be missing."""
        if self.tables is not None and not (
            self.pins.exist and self._intact(new_devices_too=False)
        ):
            self._times_missing += 1
        return self._times_missing

    def is_attached(self) -> bool:
        """Return whether all programs are attached; it opens and changes nothing."""
        return self.pins.exist and self._intact(new_devices_too=True)

    def _intact(self, *, new_devices_too: bool) -> bool:
        cgroup = self._cgroup()
        devices = self._devices.intact(new_too=new_devices_too)
        return devices and (not cgroup or sockets_intact(self.pins, cgroup))

    def _cgroup(self) -> Path | None:
        """Return the cgroup whose sockets are balanced; None if none are."""
        return (self.options.cgroup or cgroup_root()) if self.options.sockets else None

    def apply(self, change: Diff) -> None:
        """Write the maps, then attach the programs; to remove everything, detach them first."""
        if not change:  # create nothing for nothing
            return
        if Kind.CONFIG.value in change.removed:  # everything goes
            if self.tables is not None:
                self.tables.presence.allow_new_flows(False)
            with self._attaching:
                self._devices.filters.remove()
                self.pins.remove()
                self.close()
            return
        tables = self._open()
        tables.write(change)
        # Another configuration may name other devices of pods: then write the map of devices again.
        programs = change.added.get(Kind.PROGRAMS.value)
        if programs is None and Kind.PROGRAMS.value in change.changed:
            programs = change.changed[Kind.PROGRAMS.value][1]
        if programs is not None:
            self._attach(tables, programs)
        elif Kind.CONFIG.value in change.changed and self._loaded:
            self._attach_all_devices()

    def _attach(self, tables: Tables, programs: bytes) -> None:
        """Attach all programs, or replace those of an older version."""
        assert self._loaded
        assert self.tracking
        tables.presence.distrust()
        cgroup = self._cgroup()
        cookie = netns_cookie() if cgroup else 0  # 0: packet programs serve the node, too
        tables.node.programs = bytes(16)
        tables.node.identify(cookie, port_range())

        # Devices. Without programs on all of them no flow may be opened.
        if self._migration:
            tables.presence.allow_new_flows(True)  # the old programs are on every device
            self._migration.switch()
        self._attach_all_devices()
        if not self._migration:  # its programs have chosen ports already
            self.tracking.reserve_ports()
        tables.presence.allow_new_flows(True)

        # Sockets, which send connections to endpoints from now on.
        if cgroup:
            attach_sockets(self.pins, self._loaded.programs, cgroup)
        else:
            detach_sockets(self.pins)

        # From here on, all programs are new: copy the last entries, and trust the filter.
        if self._migration:
            self._migration.finish()
            self._migration = None
        wait_for_programs()  # a replaced one may be about to open a flow that is not in the filter
        self.tracking.trust_filter()
        tables.node.programs = programs

    def while_open(
        self, work: Callable[[Tracking], Generator[None, None, T]]
    ) -> Generator[None, None, T | None]:
        """Do something in steps with the connections; None if nothing is open.

        Raises:
            BusyError: the maps were closed between two steps.
        """
        tracking = self.tracking
        if tracking is None:
            return None
        steps = work(tracking)
        with closing(steps):
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    result: T = end.value
                    return result
                yield
                if self.tracking is not tracking:
                    raise BusyError("ebpf: the programs were replaced in the meantime")

    def device_changes(self) -> Subscription:
        """Subscribe to changes of devices."""
        return device_changes()

    def write_devices(self, news: Sequence[Message] | None = None) -> list[int]:
        """Write the map of devices; return the devices that need programs.

        Args:
            news: notifications since the last time; None to list everything.
        """
        tables = self._open()
        assert self._loaded
        return self._devices.write(self._loaded, tables, news)

    def _attach_all_devices(self) -> None:
        with self._attaching:
            self._devices.invalidate()
            self._attach_devices(self._loaded, self.write_devices())

    def attach_devices(self, numbers: Collection[int]) -> Generator[Pause, None, None]:
        """Attach the programs to devices in another thread, while syncs go on."""
        if numbers:
            yield from apart(self._attach_devices, self._loaded, numbers)

    def _attach_devices(self, loaded: loader.LoadedObject | None, numbers: Iterable[int]) -> None:
        """Attach the programs to one device after the other; end once these are closed."""
        for number in numbers:
            with self._attaching:
                if loaded is None or loaded is not self._loaded:
                    return
                self._devices.attach(loaded, number)

    def close(self) -> None:
        """Close everything; the programs keep working."""
        with self._attaching:
            if self._migration:
                self._migration.close()
            if self._loaded:
                self._loaded.close()
            self._loaded = self._migration = self.tables = self.tracking = None
        self._devices.invalidate()
        self.pins.unlock()
