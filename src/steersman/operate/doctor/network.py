"""The interfaces and routes of the node, as the checks of doctor ask for them."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec

from steersman.host.netlink import NETLINK_ROUTE, DumpInterruptedError, Netlink
from steersman.host.rtnetlink import (
    LIST_LINKS,
    LinkDetails,
    get_route,
    parse_link_details,
    parse_route,
)
from steersman.model.names import Family

T = TypeVar("T")


class Link(msgspec.Struct, frozen=True):
    """A network interface."""

    name: str
    mtu: int = 1500
    up: bool = True
    driver: str = ""
    """Kind of a virtual interface, such as `bridge` or `vxlan`."""
    master: str = ""
    """The bridge or bond that it belongs to."""
    below: str = ""
    """The interface that an overlay or VLAN sends through."""
    hairpin: bool | None = None
    """For the port of a bridge: whether a frame may leave by the port that it came in by."""
    promiscuous: bool = False


class Way(msgspec.Struct, frozen=True):
    """The way to an address, or why there is none."""

    device: str = ""
    gateway: str = ""
    mtu: int = 0
    """Of the route, else of the device."""
    local: bool = False
    """The address is one of this machine."""
    trouble: str = ""
    """The kernel's reason if it has no route."""


class Network(Protocol):
    """What checks ask about interfaces and routes."""

    async def links(self) -> Mapping[str, Link]:
        """Return all interfaces by name."""
        ...

    async def way(self, address: str) -> Way:
        """Return the way to an address."""
        ...


_IFF_UP, _IFF_PROMISC = 0x1, 0x100


class KernelNetwork:
    """The network namespace of this process."""

    async def links(self) -> Mapping[str, Link]:
        """Return all interfaces by name."""

        def read() -> list[LinkDetails]:
            found: list[LinkDetails] = []
            # A list that changed while it was read is good enough here.
            with Netlink(NETLINK_ROUTE, buffer=1 << 20) as netlink, suppress(DumpInterruptedError):
                found.extend(map(parse_link_details, netlink.dump(LIST_LINKS)))
            return found

        found = await asyncio.to_thread(read)
        names = {each.interface.number: each.interface.name for each in found}
        return {
            each.interface.name: Link(
                each.interface.name,
                each.mtu,
                bool(each.flags & _IFF_UP),
                each.driver,
                names.get(each.interface.master, ""),
                # The peer of a veth is no interface to send through.
                names.get(each.below, "") if each.driver != "veth" else "",
                each.hairpin,
                bool(each.flags & _IFF_PROMISC),
            )
            for each in found
        }

    async def way(self, address: str) -> Way:
        """Return the way to an address."""
        return await asyncio.to_thread(self.look_up, address)

    @staticmethod
    def look_up(address: str) -> Way:
        """Return the way to an address, in the network namespace of this thread; it blocks."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with Netlink(NETLINK_ROUTE, buffer=1 << 16) as netlink:
            try:
                (reply,) = netlink.request(get_route(socket.inet_pton(family, address)))
            except OSError as error:
                # For a blackhole, the kernel calls the request invalid.
                code = error.errno or errno.EIO
                words = os.strerror(code) if code != errno.EINVAL else "a blackhole route"
                return Way(trouble=words)
        route = parse_route(reply)
        name = socket.if_indextoname(route.device) if route.device else ""
        return Way(name, route.gateway, route.mtu, route.local)


def family_folder(family: Family) -> str:
    """Return where the sysctls of a family are: `proc/sys/net/ipv4`."""
    return f"proc/sys/net/ipv{int(family)}"
