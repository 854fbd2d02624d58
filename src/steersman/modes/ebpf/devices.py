"""The devices of this node: what the programs know about each, and the programs on them.

A pod that starts or stops costs only what it changes:

    notifications -> Inventory.updated -> the map `devices` -> programs on new devices

Only global addresses are listed again, because a notification does not say where in the kernel's
order they are. The map is written first: a program must find the device it runs on.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from steersman.host.nlmsg import Message
from steersman.host.rtnetlink import (
    ARPHRD_ETHER,
    ARPHRD_LOOPBACK,
    IFA_F_DADFAILED,
    IFA_F_DEPRECATED,
    IFA_F_TENTATIVE,
    LIST_ADDRESSES,
    LIST_LINKS,
    RT_SCOPE_UNIVERSE,
    RTM_DELADDR,
    RTM_DELLINK,
    RTM_NEWADDR,
    RTM_NEWLINK,
    Interface,
    is_bridge_port,
    parse_address,
    parse_link,
)
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.clsact import Filters
from steersman.modes.ebpf.links import XDP_PROGRAM, Links, XdpPrograms
from steersman.modes.ebpf.loader import LoadedObject
from steersman.modes.ebpf.netns import rtnetlink
from steersman.modes.ebpf.pins import Pins
from steersman.modes.ebpf.probe import tcx
from steersman.modes.ebpf.tables import Tables

_UNUSABLE = IFA_F_DADFAILED | IFA_F_TENTATIVE


class Inventory(NamedTuple):
    """Devices without loopback, and the global addresses of all devices."""

    devices: tuple[Interface, ...]
    addresses: Mapping[int, tuple[bytes, ...]]
    """Packed addresses by index of the device, in the kernel's order."""
    deprecated: Mapping[int, tuple[bytes, ...]] = {}
    """Addresses that should be no source (RFC 4862, 5.5.4), as virtual ones often are."""

    def updated(self, news: Iterable[Message]) -> Inventory | None:
        """Return the inventory after notifications; None if it must be listed again."""
        devices = {device.number: device for device in self.devices}
        for each in news:
            if each.kind in (RTM_NEWADDR, RTM_DELADDR):
                if parse_address(each).scope == RT_SCOPE_UNIVERSE:
                    return None
            elif is_bridge_port(each):
                continue
            elif each.kind == RTM_DELLINK:
                # The kernel removes the addresses of the device without a message for each.
                gone = devices.pop(parse_link(each).number, None)
                if gone and (gone.number in self.addresses or gone.number in self.deprecated):
                    return None
            elif each.kind == RTM_NEWLINK:
                device = parse_link(each)
                if device.kind != ARPHRD_LOOPBACK:
                    devices[device.number] = device
        return self._replace(devices=tuple(devices.values()))


def list_devices() -> Inventory:
    """List devices and addresses; OSError if rtnetlink does not answer."""
    with rtnetlink() as netlink:
        links = list(map(parse_link, netlink.dump(LIST_LINKS)))
        addresses: dict[int, tuple[bytes, ...]] = {}
        deprecated: dict[int, tuple[bytes, ...]] = {}
        for reply in netlink.dump(LIST_ADDRESSES):
            address = parse_address(reply)
            if address.scope != RT_SCOPE_UNIVERSE or address.flags & _UNUSABLE:
                continue
            packed = address.packed
            if address.family == socket.AF_INET:
                packed = layout.IPV4_PREFIX + packed
            if len(packed) == layout.ADDRESS_SIZE:
                which = deprecated if address.flags & IFA_F_DEPRECATED else addresses
                which[address.link] = (*which.get(address.link, ()), packed)
    devices = tuple(link for link in links if link.kind != ARPHRD_LOOPBACK)
    return Inventory(devices, addresses, deprecated)


def describe(
    inventory: Inventory,
    interface: str,
    prefix: str,
    accelerated: Collection[int] = (),
    numbers: Collection[int] | None = None,
) -> dict[int, bytes]:
    """Return the values of the map `devices` by index.

    Masquerading takes an address of the device that the packet leaves by. If that has none, it
    takes the first one of any device, loopback last: much as the kernel's own masquerading.

    Args:
        inventory: devices and addresses.
        interface: device of the detector: pods are behind it ("" for none).
        prefix: pods are behind devices with this prefix in their names ("" for none).
        accelerated: indices of the devices with the XDP program.
        numbers: indices of the devices to describe; None for all.
    """
    names = {device.number: device.name for device in inventory.devices}

    def of_all(addresses: Mapping[int, tuple[bytes, ...]]) -> list[bytes]:
        """Return the addresses of all devices by index, those of loopback last."""
        order = sorted(addresses, key=lambda number: (number not in names, number))
        return [address for number in order for address in addresses[number]]

    preferred, deprecated = of_all(inventory.addresses), of_all(inventory.deprecated)
    unspecified = bytes(layout.ADDRESS_SIZE)
    out = {}
    for device in inventory.devices:
        if numbers is not None and device.number not in numbers:
            continue
        sources = [
            *inventory.addresses.get(device.number, ()),
            *preferred,
            *inventory.deprecated.get(device.number, ()),
            *deprecated,
        ]
        ipv4 = next((each for each in sources if layout.is_ipv4(each)), unspecified)
        ipv6 = next((each for each in sources if not layout.is_ipv4(each)), unspecified)
        # A port of a bridge is a pod's device if its bridge is.
        flags = 0
        for name in filter(None, (device.name, names.get(device.master, ""))):
            if name == interface or (prefix and name.startswith(prefix)):
                flags |= layout.DEVICE_POD
        if device.kind != ARPHRD_ETHER:
            flags |= layout.DEVICE_NO_ETHERNET
        if device.number in accelerated:
            flags |= layout.DEVICE_XDP
        if device.peer_elsewhere:
            flags |= layout.DEVICE_PEER
        out[device.number] = layout.DEVICE.pack(ipv4, ipv6, flags, 0)
    return out


class DeviceTracker:
    """Keeps the map of devices, and the programs on devices, up to date. Blocks."""

    def __init__(
        self,
        pins: Pins,
        *,
        use_links: bool | None = None,
        xdp_devices: Sequence[str] = (),
    ) -> None:
        """Start without an inventory.

        Args:
            pins: directory for links.
            use_links: attach by links (TCX), or by filters of tc; None chooses by the kernel.
            xdp_devices: names of the devices that get the XDP program.
        """
        self._use_links = use_links
        self._xdp_devices = xdp_devices
        self._xdp = XdpPrograms(pins, xdp_devices)
        self._links = Links(pins)
        self.filters = Filters(pins.root / "filters")
        # The inventory in the map; None if it must be listed again.
        self._written: Inventory | None = None
        # Devices to which this process has attached the programs.
        self._attached: set[int] = set()

    @functools.cached_property
    def _programs(self) -> Links | Filters:
        use_links = tcx() if self._use_links is None else self._use_links
        return self._links if use_links else self.filters

    def intact(self, *, new_too: bool) -> bool:
        """Return whether every device has its programs.

        Args:
            new_too: count devices that have just appeared and may still get theirs.
        """
        numbers = [each.number for each in list_devices().devices]
        if self._attached and not new_too:
            numbers = [number for number in numbers if number in self._attached]
        return self._programs.intact(numbers)

    def invalidate(self) -> None:
        """List, write and attach everything the next time."""
        self._written = None
        self._attached.clear()

    def write(
        self, loaded: LoadedObject, tables: Tables, news: Sequence[Message] | None = None
    ) -> list[int]:
        """Write the map of devices; return the devices that need programs.

        Args:
            loaded: the programs.
            tables: the maps.
            news: notifications since the last time; None to list everything.
        """
        # If this fails, everything is listed the next time.
        before, self._written = (self._written if news is not None else None), None
        inventory = before.updated(news) if before and news else before
        if inventory is None:
            before, inventory = None, list_devices()
        old = {each.number: each for each in before.devices} if before else {}
        new = {each.number: each for each in inventory.devices}
        if before and old == new:  # a device is announced again when it goes up or gets an address
            self._written = inventory
            return []
        changed = [number for number, each in new.items() if old.get(number) != each]

        # The XDP program is on named devices only: without names there is nothing to attach, and it
        # is not even loaded.
        accelerated: set[int] = set()
        if self._xdp_devices or not before:
            accelerated = self._xdp.attach(loaded.programs.get(XDP_PROGRAM, -1), inventory.devices)
        interface, prefix = tables.node.pod_devices()
        values = describe(inventory, interface, prefix, accelerated, changed)
        tables.devices.put_all((layout.number_key(n), value) for n, value in values.items())

        # Devices that are gone. Without an inventory the entries tell which they were.
        known = old.keys() if before else {layout.read_number(k) for k, _ in tables.devices.items()}
        gone = known - new.keys()
        self._programs.forget(gone)
        tables.devices.delete_all(map(layout.number_key, gone))
        self._attached &= new.keys()

        without_ethernet = [n for n, each in new.items() if each.kind != ARPHRD_ETHER]
        tables.presence.set_l3_devices(without_ethernet)
        self._written = inventory
        # One that was renamed, or has joined a bridge, has its programs.
        return [number for number in changed if not before or number not in self._attached]

    def attach(self, loaded: LoadedObject, number: int) -> None:
        """Attach the programs to a device."""
        self._programs.attach(loaded.programs, number)
        self._attached.add(number)
