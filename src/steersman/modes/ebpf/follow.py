"""The devices of the node: what programs know about each, and the programs on them.

A pod that comes or goes costs what it changes: the kernel's notifications are applied to what was
listed before. Only addresses are listed again, as their order matters.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Collection, Sequence

from steersman.host.netlink import Netlink
from steersman.host.nlmsg import Message
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.attach import Accelerated, Links, Pins
from steersman.modes.ebpf.clsact import Filters
from steersman.modes.ebpf.devices import Found, after, describe, list_devices, without_ethernet
from steersman.modes.ebpf.features import tcx
from steersman.modes.ebpf.loader import LoadedObject
from steersman.modes.ebpf.maps import HashMap
from steersman.modes.ebpf.tables import Tables


class Concern(enum.Enum):
    """What notifications of devices mean."""

    NOTHING = enum.auto()
    CHANGE = enum.auto()
    """A few system calls."""
    LIST = enum.auto()
    """All devices and addresses are to be listed."""


class Follower:
    """Keeps the map of devices, and the programs on devices, up to date. Blocks."""

    def __init__(
        self,
        pins: Pins,
        connect: Callable[[], Netlink],
        do: Callable[[Callable[[], None]], None],
        *,
        links: bool | None = None,
        accelerated: Sequence[str] = (),
    ) -> None:
        """Know nothing yet.

        Args:
            pins: where links are pinned.
            connect: opens rtnetlink in the node's network namespace.
            do: calls a function there.
            links: whether devices have links; filters of tc if not, None for what the kernel can.
            accelerated: names of the devices that have the program of XDP.
        """
        self._pins = pins
        self._connect = connect
        self._do = do
        self._links = links
        self._names = accelerated
        self._accelerated = Accelerated(pins, do, accelerated)
        self.filters = Filters(pins.root / "filters", connect)
        self._found: Found | None = None
        """What was written last; None if that is to be listed afresh."""
        self._attached: set[int] = set()
        """Devices that have got their programs from us."""

    @functools.cached_property
    def _programs(self) -> Links | Filters:
        links = tcx() if self._links is None else self._links
        return Links(self._pins, self._do) if links else self.filters

    def intact(self, *, fresh_ones_too: bool) -> bool:
        """Whether every device has its programs; one that has just come may still get them.

        Args:
            fresh_ones_too: whether such a device counts as well.
        """
        numbers = [each.number for each in list_devices(self._connect).devices]
        if self._found is not None and not fresh_ones_too:
            numbers = [number for number in numbers if number in self._attached]
        return self._programs.intact(numbers)

    def forget(self) -> None:
        """Have everything listed and written afresh the next time."""
        self._found = None

    def concern(self, news: Sequence[Message]) -> Concern:
        """Return what notifications mean for what is written."""
        found = self._found  # a thread may replace it
        now = after(found, news) if found else None
        if now is None:
            return Concern.LIST
        return Concern.NOTHING if now == found else Concern.CHANGE

    def write(
        self, loaded: LoadedObject, tables: Tables, news: Sequence[Message] | None = None
    ) -> list[int]:
        """Write what programs must know about devices before they run there.

        Args:
            loaded: the programs and maps.
            tables: the same maps.
            news: what has changed since the last time; None to list everything.

        Returns:
            The devices that are to have programs.
        """
        before, self._found = self._found, None  # if this fails, everything is listed again
        found = after(before, news) if before is not None and news is not None else None
        known = before if found is not None else None
        found = found or list_devices(self._connect)
        old = {each.number: each for each in known.devices} if known else {}
        new = {each.number: each for each in found.devices}
        fresh = [number for number, each in new.items() if old.get(number) != each]
        devices = HashMap(loaded.maps["devices"])
        devices.put_all(self._values(loaded, tables, found, fresh))
        if known:
            gone = old.keys() - new.keys()
            self._programs.drop(gone)
        else:
            gone = {int.from_bytes(k, layout.BYTE_ORDER) for k, _ in devices.items()} - new.keys()
            self._programs.forget(new)
        devices.delete_all(map(_key, gone))
        self._attached &= new.keys()
        tables.marks.bare(without_ethernet(found))
        self._found = found
        return fresh

    def _values(
        self, loaded: LoadedObject, tables: Tables, found: Found, numbers: Collection[int]
    ) -> list[tuple[bytes, bytes]]:
        config = tables.node.read() or bytes(layout.NODE_VALUE.size)
        _, _, _, interface, prefix = layout.NODE_VALUE.unpack(config)
        texts = [text.rstrip(b"\0").decode() for text in (interface, prefix)]
        fast: set[int] = set()
        if self._names or len(numbers) == len(found.devices):  # else it is on no device
            fast = self._accelerated.follow(loaded.programs["sm_xdp"], found.devices)
        values = describe(found, texts[0], texts[1], fast, numbers)
        return [(_key(number), value) for number, value in values.items()]

    def attach(self, loaded: LoadedObject, numbers: Sequence[int]) -> None:
        """Attach the programs to devices; each takes a grace period of RCU."""
        self._programs.attach(loaded.programs, numbers)
        self._attached |= set(numbers)


def _key(number: int) -> bytes:
    return number.to_bytes(4, layout.BYTE_ORDER)
