"""The devices of this node, as the programs need to know them; read over rtnetlink."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from steersman.host.netlink import NETLINK_ROUTE, Netlink
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
from steersman.model.names import Family
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.layout import DEVICE_NO_ETHERNET, DEVICE_POD, DEVICE_XDP

_UNUSABLE = IFA_F_DADFAILED | IFA_F_TENTATIVE
_MAPPED = layout.UNSPECIFIED[Family.IPV4][:12]


class Found(NamedTuple):
    """What there is."""

    devices: tuple[Interface, ...]
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
        links = list(map(parse_link, netlink.dump(LIST_LINKS)))
        addresses: dict[int, tuple[bytes, ...]] = {}
        deprecated: dict[int, tuple[bytes, ...]] = {}
        for reply in netlink.dump(LIST_ADDRESSES):
            address = parse_address(reply)
            if address.scope != RT_SCOPE_UNIVERSE or address.flags & _UNUSABLE:
                continue
            packed = address.packed
            if address.family == socket.AF_INET:
                packed = _MAPPED + packed
            if len(packed) == 16:
                which = deprecated if address.flags & IFA_F_DEPRECATED else addresses
                which[address.link] = (*which.get(address.link, ()), packed)
    return Found(
        tuple(link for link in links if link.kind != ARPHRD_LOOPBACK), addresses, deprecated
    )


def after(found: Found, news: Iterable[Message]) -> Found | None:
    """Return what there is after notifications; None if only a new list can tell.

    That is so for global addresses: a notification does not say where in the kernel's order they
    are.
    """
    devices = {device.number: device for device in found.devices}
    for each in news:
        if each.kind in (RTM_NEWADDR, RTM_DELADDR):
            if parse_address(each).scope == RT_SCOPE_UNIVERSE:
                return None
        elif is_bridge_port(each):
            continue
        elif each.kind == RTM_DELLINK:
            gone = devices.pop(parse_link(each).number, None)
            if gone and (gone.number in found.addresses or gone.number in found.deprecated):
                return None
        elif each.kind == RTM_NEWLINK:
            device = parse_link(each)
            if device.kind != ARPHRD_LOOPBACK:
                devices[device.number] = device
    return found._replace(devices=tuple(devices.values()))


def open_route() -> Netlink:
    """Open rtnetlink in the network namespace of the calling thread."""
    return Netlink(NETLINK_ROUTE, buffer=1 << 20)


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
        flags |= 0 if device.kind == ARPHRD_ETHER else DEVICE_NO_ETHERNET
        flags |= DEVICE_XDP if device.number in accelerated else 0
        out[device.number] = layout.DEVICE.pack(_first(mine, True), _first(mine, False), flags, 0)
    return out


def without_ethernet(found: Found) -> list[int]:
    """Indices of the devices whose packets begin with the IP header."""
    return [device.number for device in found.devices if device.kind != ARPHRD_ETHER]


def _first(addresses: Iterable[bytes], ipv4: bool) -> bytes:
    return next((a for a in addresses if (a[:12] == _MAPPED) is ipv4), bytes(16))


def _is_pod(names: Iterable[str], interface: str, prefix: str) -> bool:
    return any(n and (n == interface or (prefix and n.startswith(prefix))) for n in names)
