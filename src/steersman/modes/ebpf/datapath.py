"""The kernel side of the mode: maps, programs and devices of this node.

Everything blocks; mode.py calls it in threads. The order of an upgrade, which connections survive:

    load the new object, copy maps that changed shape    (datapath.py; the old programs work on)
    switch maps, replace the programs on all devices     flows may be opened again
    replace the socket programs                          copy flows of the last moments
    wait until no old program runs                       trust the presence filter
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from steersman.host.netlink import Subscription
from steersman.host.nlmsg import Message
from steersman.model.ruleset import Diff
from steersman.modes.ebpf import PINS, layout, loader
from steersman.modes.ebpf.attach import (
    XDP_PROGRAM,
    Pins,
    attach_sockets,
    detach_sockets,
    sockets_intact,
)
from steersman.modes.ebpf.bpf import ArrayMap, HashMap, Object, remove_pins, wait_for_programs
from steersman.modes.ebpf.devices import Change, DeviceTracker
from steersman.modes.ebpf.layout import Kind
from steersman.modes.ebpf.loader import Fields, LoadedObject, Shape, StaleMapsError
from steersman.modes.ebpf.netns import NodeNetns, ports_in_use, reserve_ports
from steersman.modes.ebpf.probe import cgroup_root
from steersman.modes.ebpf.tables import Tables
from steersman.modes.ebpf.tracking import Tracking
from steersman.netfilter.conntrack.ports import hold_ports

log = logging.getLogger("steersman.ebpf")

# -- Migration -------------------------------------------------------------------------------------
#
# From the pinned maps of an older version to those of this one, while the old programs work.
#
# If no map has changed its shape, the object is loaded into the present maps. Otherwise:
#
#   maps        maps-next           1. load the object into `maps-next`: unchanged maps get a second
#     |             |                  pin there; the others are created, and entries copied field
#     |  rename     |  rename          by field
#     v             v               2. right before the programs are replaced, copy the entries that
#   maps-old      maps                 programs have written since, and rename both directories
#                                   3. after that, copy the last entries, and remove `maps-old`
#
# A killed process leaves `maps-next`, which is created again, or `maps-old`, which is finished.

_HASH, _ARRAY, _PERCPU_ARRAY, _LRU_HASH, _LPM_TRIE = 1, 2, 6, 9, 11
_HASHES = (_HASH, _LRU_HASH, _LPM_TRIE)
_WRITTEN_BY_PROGRAMS = (_LRU_HASH,)
_MMAPABLE = 1 << 10
_LONGEST_NUMBER = 8  # bytes; a longer field is no number

Convert: TypeAlias = Callable[[bytes], bytes]


def converter(old: Fields, new: Fields, size: int) -> Convert:
    """Return a function that rewrites records field by field, by name; new fields are zero.

    A number of another size keeps its value; of any other field the first bytes stay.

    Args:
        old: fields of its argument.
        new: fields of its result.
        size: bytes of its result.
    """
    shared = [(*old[name], *new[name]) for name in new if name in old]

    def convert(record: bytes) -> bytes:
        out = bytearray(size)
        for start, length, to, room in shared:
            field = record[start : start + length]
            if max(length, room) <= _LONGEST_NUMBER and length != room:
                number = int.from_bytes(field, layout.BYTE_ORDER) % (1 << 8 * room)
                field = number.to_bytes(room, layout.BYTE_ORDER)
            out[to : to + room] = field[:room].ljust(room, b"\0")
        return bytes(out)

    return convert


class _Copy:
    """One map that has changed its shape."""

    def __init__(self, pin: Path, new: int) -> None:
        self._old, self._new = Object.pinned(pin), new
        self._shape, self._target = was, now = Shape.of_map(self._old.fd), Shape.of_map(new)
        self._key = converter(was.key, now.key, now.key_size)
        self._value = converter(was.value, now.value, now.value_size)
        # Entries of the previous round.
        self._copied: dict[bytes, bytes] = {}

    def close(self) -> None:
        self._old.close()

    def copy_all(self) -> None:
        """Copy everything that steersman and the programs have written."""
        was, now = self._shape, self._target
        if was.kind in _HASHES and now.kind in _HASHES:
            self._copy_hash()
        elif was.kind == now.kind == _PERCPU_ARRAY:
            old, new = HashMap(self._old.fd), HashMap(self._new)
            for number in range(min(old.capacity, new.capacity)):
                value = old.get(layout.number_key(number))
                if value and any(value) and old.value_size == new.value_size:
                    new.put(layout.number_key(number), value)
        elif was.kind == now.kind == _ARRAY and was.flags & _MMAPABLE:
            source, target = ArrayMap(self._old.fd), ArrayMap(self._new)
            size = source.value_size
            records = source.read(0, min(source.capacity, target.capacity))
            empty = bytes(size)
            for number in range(len(records) // size):
                record = records[number * size : (number + 1) * size]
                if record != empty:
                    target.write(number, self._value(record))

    def copy_new(self) -> None:
        """Copy what programs have written since the last round, unless new ones have, too."""
        if self._shape.kind in _WRITTEN_BY_PROGRAMS and self._target.kind in _HASHES:
            self._copy_hash()

    def _copy_hash(self) -> None:
        # An entry that new programs have written since the last round is newer than the old one.
        target = HashMap(self._new)
        found = {self._key(k): self._value(v) for k, v in HashMap(self._old.fd).items()}
        changed = {key: value for key, value in found.items() if self._copied.get(key) != value}
        have = dict(target.items())
        target.put_all(
            (key, value) for key, value in changed.items() if have.get(key) == self._copied.get(key)
        )
        self._copied = found

    def clear(self, field: str) -> None:
        """Set a field of the only record of an old array to zero: the old programs look there."""
        if self._shape.flags & _MMAPABLE and field in self._shape.value:
            start, size = self._shape.value[field]
            ArrayMap(self._old.fd).whole()[start : start + size] = bytes(size)


class Migration:
    """A change of maps under way."""

    def __init__(self, maps: Path, loaded: LoadedObject, names: Iterable[str]) -> None:
        """Start or continue a change.

        Args:
            maps: directory of the pins in use; the others are beside it.
            loaded: the new object.
            names: maps whose shape has changed.
        """
        self._maps = maps
        source = maps_old(maps) if maps_old(maps).exists() else maps
        self._copies = {
            name: _Copy(source / name, loaded.maps[name]) for name in names if name in loaded.maps
        }

    def copy(self) -> None:
        """Copy everything."""
        for each in self._copies.values():
            each.copy_all()

    def switch(self) -> None:
        """Copy new entries, and put the new maps into use.

        If new programs write another presence filter, old ones must no longer trust theirs.
        """
        if "marks" in self._copies:
            self._copies["marks"].clear("trusted")
        for each in self._copies.values():
            each.copy_new()
        if not maps_old(self._maps).exists():
            self._maps.rename(maps_old(self._maps))
            maps_next(self._maps).rename(self._maps)

    def finish(self) -> None:
        """Copy the last entries of the old programs, and remove the old maps."""
        for each in self._copies.values():
            each.copy_new()
            each.close()
        remove_pins(maps_old(self._maps))


def maps_next(maps: Path) -> Path:
    """Return the directory of new maps until they are in use."""
    return maps.with_name("maps-next")


def maps_old(maps: Path) -> Path:
    """Return the directory of the maps that were in use before."""
    return maps.with_name("maps-old")


def load(
    file: Path, maps: Path, without: Collection[str] = ()
) -> tuple[LoadedObject, Migration | None]:
    """Load an object into pinned maps, or into new ones that will replace them.

    Args:
        file: the compiled object.
        maps: directory of the pins.
        without: programs that are not needed.

    Raises:
        ObjectError: it cannot be loaded.
    """
    if maps_old(maps).exists() and maps_next(maps).exists():  # killed between the two renames
        maps.rmdir()
        maps_next(maps).rename(maps)
    remove_pins(maps_next(maps))
    try:
        loaded = LoadedObject(file, maps, without)
    except StaleMapsError as stale:
        return _load_beside(file, maps, without, stale.names)
    if not maps_old(maps).exists():
        return loaded, None

    # A process was killed in step 3: the maps that are not the old ones have changed.
    changed = []
    for path in maps_old(maps).iterdir():
        if path.name in loaded.maps:
            old = Object.pinned(path)
            if old.id != Object(loaded.maps[path.name]).id:
                changed.append(path.name)
            old.close()
    return loaded, Migration(maps, loaded, changed)


def _load_beside(
    file: Path, maps: Path, without: Collection[str], changed: frozenset[str]
) -> tuple[LoadedObject, Migration]:
    """Load an object into `maps-next`: step 1."""
    # Maps that have kept their shape get a second pin.
    place = maps_next(maps)
    place.mkdir(mode=0o700)
    remove_pins(maps_old(maps))  # of a third version
    for path in maps.iterdir():
        if path.name not in changed:
            pinned = Object.pinned(path)
            pinned.pin(place / path.name)
            pinned.close()
    # The object creates the others.
    loaded = LoadedObject(file, place, without)
    migration = Migration(maps, loaded, changed)
    migration.copy()
    return loaded, migration


# -- The datapath ----------------------------------------------------------------------------------


class EbpfOptions(msgspec.Struct, frozen=True):
    """Places in the system, and features of the mode."""

    pins: Path = PINS
    """Directory in a bpffs; created if it is missing."""
    cgroup: Path | None = None
    """The cgroup (version 2) whose sockets are balanced; None for the root of all."""
    guard_node_ports: bool = True
    """Whether processes of the node may not bind to a node port in use."""
    xdp_devices: tuple[str, ...] = ()
    """Devices whose packets are forwarded early if their connection is known."""
    sockets: bool = True
    """Whether to balance sockets, if there is a cgroup; otherwise all packets are rewritten."""
    tcx: bool | None = None
    """Whether to attach to devices by links, or by filters of tc; None chooses by the kernel."""
    file: Path = loader.FILE
    """The compiled object."""


_HOLD_SECONDS = 120  # the watcher prolongs it every 30


class Datapath:
    """Maps and programs of this node, opened when they are first needed."""

    def __init__(self, options: EbpfOptions, netns: NodeNetns) -> None:
        self.options = options
        self.pins = Pins(options.pins)
        self.tables: Tables | None = None
        self.tracking: Tracking | None = None
        self._netns = netns
        self._loaded: loader.LoadedObject | None = None
        self._migration: Migration | None = None
        self._devices = DeviceTracker(
            self.pins, netns, use_links=options.tcx, xdp_devices=options.xdp_devices
        )
        self._attaching = threading.Lock()

    def _open(self) -> Tables:
        if self.tables is None:
            self.pins.create()
            self.pins.lock()
            without = () if self.options.xdp_devices else (XDP_PROGRAM,)
            self._loaded, self._migration = load(self.options.file, self.pins.maps, without)
            tables = Tables(self._loaded.maps)
            tables.repair()
            self.tracking = Tracking(self._loaded, tables)
            self.tables = tables
        return self.tables

    def read(self) -> dict[bytes, bytes]:
        """Return the Ruleset in force; without programs if one of them is not attached."""
        if not self.pins.exist:
            return {}
        tables = self._open()
        ruleset = tables.read()
        if any(tables.node.programs) and self._intact(new_devices_too=True):
            ruleset[Kind.PROGRAMS.value] = tables.node.programs
        return ruleset

    def fingerprint(self) -> Hashable:
        """Return the pinned links, and whether all programs are attached.

        Pins of devices are left out, as devices come and go with pods.
        """
        pinned = [name for name in self.pins.link_names() if "-" not in name]
        return (self.pins.exist and self._intact(new_devices_too=False), *pinned)

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
        elif Kind.CONFIG.value in change.changed:
            self._devices.invalidate()
            self.attach_devices(self.write_devices())

    def _attach(self, tables: Tables, programs: bytes) -> None:
        """Attach all programs, or replace those of an older version."""
        assert self._loaded
        assert self.tracking
        tables.presence.distrust()
        cgroup = self._cgroup()
        cookie = self._netns.cookie() if cgroup else 0  # 0: packet programs serve the node, too
        tables.node.programs = bytes(16)
        tables.node.identify(cookie, self._netns.port_range())

        # Devices. Without programs on all of them no flow may be opened.
        if self._migration:
            tables.presence.allow_new_flows(True)  # the old programs are on every device
            self._migration.switch()
        self._devices.invalidate()
        self.attach_devices(self.write_devices())
        if not self._migration:  # its programs have chosen ports already
            self._reserve_ports()
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

    def _reserve_ports(self) -> None:
        """Keep programs from choosing ports of connections that netfilter masquerades."""
        assert self._loaded
        try:
            with self._netns.netfilter() as netlink:
                reserve_ports(HashMap(self._loaded.maps["flows"]), netlink)
        except OSError as error:  # without conntrack, netfilter masquerades nothing
            log.debug("ebpf: the connections of netfilter cannot be listed: %s", error)

    def prepare_port_hold(self) -> Callable[[], None]:
        """Return a function that keeps netfilter from choosing ports of masqueraded connections.

        It may take long, and has its own descriptor: syncs may run at the same time, and the mode
        may be closed.
        """
        if not self._loaded:
            return lambda: None
        flows = HashMap(os.dup(self._loaded.maps["flows"]))

        def hold() -> None:
            try:
                with self._netns.netfilter() as netlink:
                    hold_ports(netlink, ports_in_use(flows), _HOLD_SECONDS)
            finally:
                flows.close()

        return hold

    def device_changes(self) -> Subscription:
        """Subscribe to changes of devices."""
        return self._netns.device_changes()

    def device_change(self, news: Sequence[Message]) -> Change | None:
        """Return what notifications change; None if all devices must be listed."""
        return self._devices.change(news)

    def write_devices(self, change: Change | None = None) -> list[int]:
        """Write the map of devices; return the devices that need programs.

        Args:
            change: the change since the last time; None to list everything.
        """
        tables = self._open()
        assert self._loaded
        return self._devices.write(self._loaded, tables, change)

    def attach_devices(self, numbers: Sequence[int]) -> None:
        """Attach the programs to devices, possibly during a sync; do nothing once closed."""
        with self._attaching:
            if self._loaded:
                self._devices.attach(self._loaded, numbers)

    def close(self) -> None:
        """Close everything; the programs keep working."""
        with self._attaching:
            if self._loaded:
                self._loaded.close()
            self._loaded = self.tables = self.tracking = None
        self._devices.invalidate()
        self.pins.unlock()
