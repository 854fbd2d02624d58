"""The devices of this node, as the programs need to know them; read over rtnetlink."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from steersman.host.netlink import NETLINK_ROUTE, Netlink, Request
from steersman.host.nlmsg import Message, attributes, string
from steersman.model.names import Family
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.layout import DEVICE_NO_ETHERNET, DEVICE_POD, DEVICE_XDP

_RTM_NEWLINK, _RTM_DELLINK, _RTM_GETLINK = 16, 17, 18
_RTM_NEWADDR, _RTM_DELADDR, _RTM_GETADDR = 20, 21, 22
_IFLA_IFNAME, _IFLA_MASTER = 3, 10
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFINFOMSG = struct.Struct("=BxHiII")
_IFADDRMSG = struct.Struct("=BBBBI")
_ETHER, _LOOPBACK = 1, 772  # ARPHRD_*
_SCOPE_GLOBAL = 0
_UNUSABLE, _DEPRECATED = 0x08 | 0x40, 0x20  # IFA_F_DADFAILED, _TENTATIVE, _DEPRECATED
_MAPPED = layout.UNSPECIFIED[Family.IPV4][:12]


class Device(NamedTuple):
    """A network device."""

    number: int
    name: str
    kind: int
    """ARPHRD_*."""
    master: int
    """Index of the bridge or bond that it belongs to; 0 for none."""


class Found(NamedTuple):
    """What there is."""

    devices: tuple[Device, ...]
    addresses: Mapping[int, tuple[bytes, ...]]
    """Packed global addresses by index of the device, in the kernel's order."""
    deprecated: Mapping[int, tuple[bytes, ...]] = {}
    """Likewise those that are to be no source (RFC 4862, 5.5.4), as virtual ones often are."""


def list_devices(connect: Callable[[], Netlink]) -> Found:
    """List devices, without loopback, and all addresses.

    Raises:
        OSError: rtnetlink does not answer.
    """
    with connect() as netlink:
        links = [_device(reply) for reply in netlink.dump(Request(_RTM_GETLINK, bytes(16)))]
        addresses: dict[int, tuple[bytes, ...]] = {}
        deprecated: dict[int, tuple[bytes, ...]] = {}
        for reply in netlink.dump(Request(_RTM_GETADDR, bytes(8))):
            index, packed, flags = _address(reply)
            if packed and not flags & _UNUSABLE:
                which = deprecated if flags & _DEPRECATED else addresses
                which[index] = (*which.get(index, ()), packed)
    return Found(tuple(link for link in links if link.kind != _LOOPBACK), addresses, deprecated)


def after(found: Found, news: Iterable[Message]) -> Found | None:
    """Return what there is after notifications; None if only a new list can tell.

    That is so for global addresses: a notification does not say where in the kernel's order they
    are.
    """
    devices = {device.number: device for device in found.devices}
    for each in news:
        if each.kind in (_RTM_NEWADDR, _RTM_DELADDR):
            if each.payload[3] == _SCOPE_GLOBAL:
                return None
        elif each.payload[0] != socket.AF_UNSPEC:
            continue  # of a port of a bridge
        elif each.kind == _RTM_DELLINK:
            gone = devices.pop(_device(each).number, None)
            if gone and (gone.number in found.addresses or gone.number in found.deprecated):
                return None
        elif each.kind == _RTM_NEWLINK:
            device = _device(each)
            if device.kind != _LOOPBACK:
                devices[device.number] = device
    return found._replace(devices=tuple(devices.values()))


def open_route() -> Netlink:
    """Open rtnetlink in the network namespace of the calling thread."""
    return Netlink(NETLINK_ROUTE, buffer=1 << 20)


def _device(reply: Message) -> Device:
    _, kind, index, _, _ = _IFINFOMSG.unpack_from(reply.payload)
    values = attributes(reply.payload, 16)
    master = int.from_bytes(values.get(_IFLA_MASTER, b"\0\0\0\0"), sys.byteorder)
    return Device(index, string(values.get(_IFLA_IFNAME, b"")), kind, master)


def _address(reply: Message) -> tuple[int, bytes, int]:
    """Index of the device, address (b"" for one that is not global), and IFA_F_*."""
    family, _, flags, scope, index = _IFADDRMSG.unpack_from(reply.payload)
    values = attributes(reply.payload, 8)
    packed = values.get(_IFA_LOCAL) or values.get(_IFA_ADDRESS, b"")
    if scope != _SCOPE_GLOBAL:
        return index, b"", flags
    if family == socket.AF_INET:
        packed = _MAPPED + packed
    return index, packed if len(packed) == 16 else b"", flags


def describe(
    found: Found,
    interface: str,
    prefix: str,
    accelerated: Collection[int] = (),
    numbers: Collection[int] | None = None,
) -> dict[int, bytes]:
    """What the map `devices` should hold, by index.

    Masquerading takes an address of the device that the packet leaves by, and where that has
    none, the first one that any device has, loopback last: much as the kernel's own does.

    Args:
        found: what there is.
        interface: of the detector: pods are behind this device ("" for none).
        prefix: of the detector: pods are behind devices whose names begin so.
        accelerated: indices of the devices that have the program of XDP.
        numbers: indices of the devices to describe; None for all.
    """
    names = {device.number: device.name for device in found.devices}
    sorts = (found.addresses, found.deprecated)
    ordered = [
        [
            address
            for index in sorted(sort, key=lambda n: (n not in names, n))
            for address in sort[index]
        ]
        for sort in sorts
    ]
    out = {}
    for device in found.devices:
        if numbers is not None and device.number not in numbers:
            continue
        mine = [
            address
            for sort, every in zip(sorts, ordered, strict=True)
            for address in (*sort.get(device.number, ()), *every)
        ]
        belongs = (device.name, names.get(device.master, ""))
        flags = DEVICE_POD if _is_pod(belongs, interface, prefix) else 0
        flags |= 0 if device.kind == _ETHER else DEVICE_NO_ETHERNET
        flags |= DEVICE_XDP if device.number in accelerated else 0
        out[device.number] = layout.DEVICE.pack(_first(mine, True), _first(mine, False), flags, 0)
    return out


def without_ethernet(found: Found) -> list[int]:
    """Indices of the devices whose packets begin with the IP header."""
    return [device.number for device in found.devices if device.kind != _ETHER]


def _first(addresses: Iterable[bytes], ipv4: bool) -> bytes:
    return next((a for a in addresses if (a[:12] == _MAPPED) is ipv4), bytes(16))


def _is_pod(names: Iterable[str], interface: str, prefix: str) -> bool:
    return any(n and (n == interface or (prefix and n.startswith(prefix))) for n in names)
